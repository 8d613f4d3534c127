"""Copies files, at least one of two on a mount, and decides by their names what copies them."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpufs.client._cancellation import Cancellation
from gpufs.copying import entries
from gpufs.copying.entries import Entry, OpenFile
from gpufs.copying.identity import Identity
from gpufs.copying.job import CopyContext, CopyJob
from gpufs.copying.types import (
    STREAM,
    CopyError,
    CopyOptions,
    CopyResult,
    NotOnMountCopyError,
    Outcome,
    Progress,
    copy_error,
)
from gpufs.copying.walk import End, Step
from gpufs.syscalls import Closing

if TYPE_CHECKING:
    from gpufs.copying.store_copy import StoreCopies


class FileCopier(Closing):
    """Copies single files, also from several threads, and keeps its connections to daemons for the next ones."""

    def __init__(self, options: CopyOptions, notice: Callable[[str], None] | None) -> None:
        self.context = CopyContext(options, notice)
        self._store_copies: StoreCopies | None = None
        self._lock = threading.Lock()  # guards the creation of the above

    def close(self) -> None:
        """End the connections."""
        if self._store_copies is not None:
            self._store_copies.close()
        self.context.close()

    def copy_each(self, step: Step, ends: Sequence[End], progress: Progress, cancel: Cancellation) -> list[Outcome]:
        """Copy a file, of this machine or of a store, to each of its destinations by the fastest way that they have.

        The outcomes are in the order of ``ends``. A destination that fails does not end the other copies. Of several
        destinations ``progress`` counts the bytes of all copies, from several threads, one at a time.
        """
        names = [end for end in ends if isinstance(end, Entry)]
        identity, source = None, step.source
        assert source is not None
        try:
            if not isinstance(source, Entry) and source.cached is not None:
                identity = Identity.of_stored(source)
                source = Entry(source.url.shown, source.cached)
            if not isinstance(source, Entry):
                return self._stores().download(source, names, progress, cancel)
            if len(names) > 1:
                from gpufs.copying.fan_out import FanOut

                return FanOut(self.context, source, names, identity, progress, cancel).run()
            if names:
                with entries.open_source(source) as opened:
                    return [self._copy(opened, names[0], progress, cancel, identity=identity)]
            urls = [end for end in ends if not isinstance(end, Entry)]
            return [self._stores().upload(source, url, progress, cancel) for url in urls]
        except CopyError as error:
            return [error] * len(ends)

    def _stores(self) -> StoreCopies:
        from gpufs.copying.store_copy import StoreCopies

        with self._lock:
            if self._store_copies is None:
                self._store_copies = StoreCopies(self.context)
            return self._store_copies

    def copy_from_stream(self, source_fd: int, end: Entry, progress: Progress, cancel: Cancellation) -> CopyResult:
        """Copy what a pipe, or another open file, returns up to its end. Its descriptor stays the caller's.

        The calling thread reads, so an OSError that a signal handler raises ends the copy.
        """
        source = OpenFile(Entry.of(STREAM), source_fd, os.fstat(source_fd))
        return self._copy(source, end, progress, cancel, stream=True)

    def _copy(
        self,
        source: OpenFile,
        destination: Entry,
        progress: Progress,
        cancel: Cancellation,
        *,
        stream: bool = False,
        identity: Identity | None = None,
    ) -> CopyResult:
        try:
            with destination.located() as located:
                return CopyJob.open(
                    *(self.context, source, located), stream=stream, identity=identity, progress=progress, cancel=cancel
                ).run()
        except OSError as error:  # of the destination's directory
            raise copy_error(error, destination.path) from None

    def copy_to_stream(
        self, source: Entry, destination_fd: int, *, progress: Progress, cancel: Cancellation
    ) -> CopyResult:
        """Copy a file into a pipe, or another open file, whose descriptor stays the caller's."""
        with entries.open_source(source) as opened:
            if opened.status.st_dev not in self.context.mounts():
                raise NotOnMountCopyError(errno.EXDEV, "is not on a gpufs mount: use cat", source.path)
            output = OpenFile(Entry.of(STREAM), destination_fd, os.fstat(destination_fd))
            if stat.S_ISREG(opened.status.st_mode) and os.path.samestat(opened.status, output.status):
                raise CopyError(errno.EINVAL, "is the same file as the output", source.path)
            return CopyJob(self.context, opened, output, progress=progress, cancel=cancel).run_to_stream()
