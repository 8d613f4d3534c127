"""Copies one file to several destinations and reads it once: the first copy on a mount is the source of the others."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from gpufs.client._cancellation import Cancellation
from gpufs.copying import entries
from gpufs.copying.entries import Entry, OpenFile
from gpufs.copying.identity import Identity
from gpufs.copying.job import CopyContext, CopyJob
from gpufs.copying.types import CopyError, CopyProgress, Outcome, Progress, copy_error
from gpufs.syscalls import close_all


@dataclass(eq=False)
class FanOut:
    """One such copy. ``progress`` gets the sums of all, from several threads, one at a time.

    Between two GPUs a copy is much faster than reading a file, and each finished copy can be read while others are
    read: with N destinations the source is read once, and then about log2(N) rounds of copies run.
    """

    context: CopyContext
    source: Entry
    destinations: Sequence[Entry]
    identity: Identity | None
    progress: Progress
    cancel: Cancellation

    def __post_init__(self) -> None:
        self._opened = ExitStack()
        self._outcomes: dict[int, Outcome] = {}  # by the place in destinations
        self._lock = threading.Lock()  # guards the next, and calls of progress
        self._counts: dict[str, dict[int, int]] = defaultdict(dict)  # of each phase, by place

    def run(self) -> list[Outcome]:
        """Copy to all destinations. Their outcomes, in order. CopyError if the source cannot be opened."""
        with self._opened as opened:
            source = opened.enter_context(entries.open_source(self.source))
            groups: dict[int, dict[int, CopyJob]] = defaultdict(dict)  # by file system and place
            seen: set[tuple[int, int]] = set()
            for place, destination in enumerate(self.destinations):
                try:
                    job = self._open(place, source, opened.enter_context(destination.located()))
                    opened.callback(_close, job)
                    status = job.destination.status
                    if (status.st_dev, status.st_ino) in seen:
                        raise CopyError(errno.EINVAL, "is given more than once as a destination", destination.path)
                except OSError as error:  # also of the destination's directory
                    self._outcomes[place] = copy_error(error, destination.path)
                    continue
                seen.add((status.st_dev, status.st_ino))
                groups[status.st_dev][place] = job
            for device, jobs in groups.items():
                shares = device in self.context.mounts()
                copies = [source] if shares and device == source.status.st_dev else []
                self._copy_group(jobs, copies, shares=shares)
        return [self._outcomes[place] for place in range(len(self.destinations))]

    def _open(self, place: int, source: OpenFile, destination: Entry) -> CopyJob:
        progress = None if self.progress is None else partial(self._report, place)
        return CopyJob.open(
            *(self.context, source, destination),
            readable=True,
            identity=self.identity,
            progress=progress,
            cancel=self.cancel,
        )

    def _copy_group(self, jobs: dict[int, CopyJob], copies: list[OpenFile], *, shares: bool) -> None:
        """Copy to destinations of one file system. ``copies``: what can be read there."""
        waiting, ours = list(jobs.items()), len(copies)
        with ThreadPoolExecutor(len(jobs)) as pool:
            while waiting:
                count = max(min(len(copies), len(waiting)), 1)
                batch, waiting = waiting[:count], waiting[count:]
                for (_, job), copy in zip(batch, copies, strict=False):
                    job.read_from(copy)
                for copied in filter(None, pool.map(self._copy, *zip(*batch, strict=True))):
                    # A copy that may be written only is not a source.
                    if shares and fcntl.fcntl(copied.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR:
                        copies.append(copied)
        for copy in copies[ours:] if self.context.options.preserve else ():
            with suppress(OSError):  # each copy has set them once already
                entries.preserve(copy.fd, next(iter(jobs.values())).attributes)  # reading it has changed its times

    def _copy(self, place: int, job: CopyJob) -> OpenFile | None:
        try:
            if self.cancel.cancelled:
                raise CopyError(errno.ECANCELED, "", job.source.entry.path, job.destination.entry.path)
            fd = os.dup(job.fd)
            self._opened.callback(close_all, (fd,))
            self._outcomes[place] = job.run()
            return OpenFile(job.destination.entry, fd, os.fstat(fd))
        except OSError as error:
            self._outcomes[place] = copy_error(error, job.destination.entry.path)
            return None

    def _report(self, place: int, progress: CopyProgress) -> None:
        assert self.progress is not None
        with self._lock:
            counts = self._counts[progress.phase]
            counts[place] = progress.moved
            total = progress.total * len(self.destinations)
            self.progress(CopyProgress(sum(counts.values()), total, progress.paths, progress.phase))


def _close(job: CopyJob) -> None:
    """Close a destination that was opened and never copied to, and remove it if this created it."""
    if job.fd >= 0:
        job.clean_up(partial=False)
        job.close()
