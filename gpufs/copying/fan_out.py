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
from dataclasses import InitVar, dataclass
from functools import partial

from gpufs import waiting
from gpufs.client._cancellation import Cancellation
from gpufs.copying import entries
from gpufs.copying.entries import Entry, OpenFile
from gpufs.copying.identity import Identity
from gpufs.copying.job import CopyContext, CopyJob
from gpufs.copying.types import CopyError, CopyProgress, Outcome, Progress
from gpufs.syscalls import close_all


@dataclass(eq=False)
class FanOut:
    """One such copy.

    Between two GPUs a copy is much faster than reading a file, and each finished copy can be read while others are
    read: with N destinations the source is read once, and then about log2(N) rounds of copies run.
    """

    context: CopyContext
    source: Entry
    destinations: Sequence[Entry]
    identity: Identity | None
    progress: Progress
    cancel: InitVar[Cancellation | None]

    def __post_init__(self, cancel: Cancellation | None) -> None:
        self._cancel = cancel or Cancellation()
        self._opened = ExitStack()
        self._outcomes: dict[int, Outcome] = {}  # by the place in destinations
        self._lock = threading.Lock()  # guards the next two, and calls of progress
        self._moved: dict[int, int] = {}
        self._verified: dict[int, int] = {}

    def run(self) -> list[Outcome]:
        """Copy to all destinations. Their outcomes, in order."""
        try:
            source = entries.open_source(self.source)
        except CopyError as error:
            return [error] * len(self.destinations)
        with self._opened as opened:
            opened.callback(close_all, (source.fd,))
            # A failure cancels these copies, but not others of the caller's that have the same object.
            self._cancel = opened.enter_context(self._cancel.follower())
            groups: dict[int, list[tuple[int, CopyJob]]] = defaultdict(list)
            seen: set[tuple[int, int]] = set()
            for place, destination in enumerate(self.destinations):
                try:
                    located = opened.enter_context(destination.located())
                    job = self._open(place, source, located)
                except OSError as error:  # also of the destination's directory
                    self._outcomes[place] = entries.open_failure(error, destination.path)
                    continue
                opened.callback(_close, job)
                status = job.destination.status
                if (status.st_dev, status.st_ino) in seen:
                    text = "is given more than once as a destination"
                    self._outcomes[place] = CopyError(errno.EINVAL, text, destination.path)
                    continue
                seen.add((status.st_dev, status.st_ino))
                groups[status.st_dev].append((place, job))
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
            cancel=self._cancel,
        )

    def _copy_group(self, jobs: list[tuple[int, CopyJob]], copies: list[OpenFile], *, shares: bool) -> None:
        """Copy to destinations of one file system. ``copies``: what can be read there."""
        attributes = jobs[0][1].attributes
        ours = len(copies)
        while jobs:
            count = max(min(len(copies), len(jobs)), 1)
            batch, jobs = jobs[:count], jobs[count:]
            for (_, job), copy in zip(batch, copies, strict=False):
                job.read_from(copy)
            for copied in filter(None, self._copy_at_once(batch)):
                # A copy that may be written only is not a source.
                if shares and fcntl.fcntl(copied.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR:
                    copies.append(copied)
        if self.context.options.preserve and len(copies) > ours:
            for copy in copies[ours:]:
                with suppress(OSError):  # each copy has set them once already
                    entries.preserve(copy.fd, attributes)  # reading the copies has changed their times

    def _copy_at_once(self, batch: list[tuple[int, CopyJob]]) -> list[OpenFile | None]:
        """Make copies; returns those that are complete, and None for each failure."""
        if len(batch) == 1:  # on this thread, which an interrupt ends
            return [self._copy(batch[0])]
        with ThreadPoolExecutor(len(batch)) as pool:
            try:
                return waiting.results([pool.submit(self._copy, placed) for placed in batch])
            except BaseException:
                self._cancel.cancel()
                raise

    def _copy(self, placed: tuple[int, CopyJob]) -> OpenFile | None:
        """Make one copy; returns it, with a descriptor of its own, unless it fails."""
        place, job = placed
        if job.cancelled:
            names = (job.source.entry.path, job.destination.entry.path)
            self._outcomes[place] = CopyError(errno.ECANCELED, "", *names)
            return None
        try:
            fd = os.dup(job.fd)
        except OSError as error:
            self._outcomes[place] = entries.open_failure(error, job.destination.entry.path)
            return None
        try:
            self._outcomes[place] = job.run()
        except CopyError as error:
            close_all((fd,))
            self._outcomes[place] = error
            return None
        except BaseException:  # for example by progress()
            self._cancel.cancel()
            close_all((fd,))
            raise
        self._opened.callback(close_all, (fd,))
        return OpenFile(job.destination.entry, fd, os.fstat(fd))

    def _report(self, place: int, progress: CopyProgress) -> None:
        """Add up the progress of all copies."""
        assert self.progress is not None
        with self._lock:
            counts = self._moved if progress.phase == "copy" else self._verified
            counts[place] = progress.moved
            total = progress.total * len(self.destinations)
            self.progress(CopyProgress(sum(counts.values()), total, progress.paths, progress.phase))


def _close(job: CopyJob) -> None:
    """Close a destination that was opened and never copied to, and remove it if this created it."""
    if job.fd >= 0:
        job.clean_up(partial=False)
        job.close()
