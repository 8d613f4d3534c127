"""Copies files, at least one of two on a mount, and decides by their names what copies them."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpufs._naming import named_in
from gpufs.client._cancellation import Cancellation
from gpufs.copying import entries
from gpufs.copying.entries import Entry, OpenFile, kind_of
from gpufs.copying.identity import Identity
from gpufs.copying.job import CopyContext, CopyJob
from gpufs.copying.types import (
    STREAM,
    CopyError,
    CopyOptions,
    CopyResult,
    Fastpath,
    NotOnMountCopyError,
    Outcome,
    Progress,
)
from gpufs.syscalls import Closing

if TYPE_CHECKING:
    from gpufs.copying.store_copy import StoreCopies
    from gpufs.stores.files import StoreFile
    from gpufs.stores.urls import Url


@named_in("gpufs.client")
class Copier(Closing):
    """Copies files one after the other or from several threads, and keeps its connections to daemons for the next.

    Parameters
    ----------
    fastpath : {"auto", "off", "require"}
        "off" and "require" override the mount's configuration.
    fsync : bool
        Host files are on their disk before a copy succeeds.
    verify : bool
        Both files are read again, with ``fsync`` from disk, and their SHA-256 compared.
    preserve : bool
        Mode, times and, if allowed, owner of the source are kept.
    partial : bool
        A copy that does not fit is begun all the same, and a failed or cancelled copy keeps a new destination, with the
        bytes copied so far, instead of removing it.
    times : bool
        Copies have the times of files of this machine.
    replace : bool
        A new file takes an existing name when it is complete, and programs that have the old one keep that.
    notice : callable, optional
        Called with one line, once for each mount whose daemon cannot be reached.

    Examples
    --------
    >>> with gpufs.client.Copier(verify=True) as copier:  # doctest: +SKIP
    ...     copier.copy_file("weights", "/mnt/gpufs/gpu0/weights")
    """

    def __init__(
        self,
        *,
        fastpath: Fastpath = "auto",
        fsync: bool = False,
        verify: bool = False,
        preserve: bool = False,
        partial: bool = False,
        times: bool = False,
        replace: bool = False,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        options = CopyOptions(fastpath, fsync, verify, preserve, partial, times, replace)
        self.context = CopyContext(options, notice)
        self._store_copies: StoreCopies | None = None
        self._lock = threading.Lock()  # guards the creation of the above

    def close(self) -> None:
        """End the connections."""
        if self._store_copies is not None:
            self._store_copies.close()
        self.context.close()

    def copy_file(
        self, source: str, destination: str, *, progress: Progress = None, cancel: Cancellation | None = None
    ) -> CopyResult:
        """Copy one file to a name and overwrite an existing file. Raises CopyError.

        ``progress`` is called from this thread about ten times a second; an exception that it raises ends the copy. A
        copy that is cancelled before it starts changes nothing. One of the two may be a URL or HOST:PATH.
        """
        _check_callbacks(progress, cancel)
        if kind_of((source, destination)) == "file":
            return self.copy_entry(Entry.of(source), Entry.of(destination), progress=progress, cancel=cancel)
        (outcome,) = self.copy_names(source, [destination], progress=progress, cancel=cancel)
        if isinstance(outcome, CopyError):
            raise outcome
        return outcome

    def copy_names(
        self,
        source: str,
        destinations: Sequence[str],
        *,
        progress: Progress = None,
        cancel: Cancellation | None = None,
    ) -> list[Outcome]:
        """Copy one file to several names, which may be URLs or HOST:PATH; the outcomes are in their order."""
        kind = kind_of((source, *destinations))
        if kind == "url":
            cancel = cancel or Cancellation()
            copy = partial(self.copy_each, progress=progress, cancel=cancel)
            return self._stores().copy_names(source, destinations, copy, progress, cancel)
        if kind == "host":
            from gpufs.copying import host_copy

            return host_copy.copy_names(self.context, source, destinations, progress, cancel)
        return self.copy_to_each(
            Entry.of(source), [Entry.of(name) for name in destinations], progress=progress, cancel=cancel
        )

    def copy_entry(
        self,
        source: Entry,
        destination: Entry,
        *,
        identity: Identity | None = None,
        progress: Progress = None,
        cancel: Cancellation | None = None,
    ) -> CopyResult:
        """Copy as :meth:`copy_file` does, for names in directories that are open. ``identity``: as of CopyJob."""
        _check_callbacks(progress, cancel)
        if cancel is not None and cancel.cancelled:
            raise CopyError(errno.ECANCELED, "", source.path, destination.path)
        if not destination.path:
            raise CopyError(errno.ENOENT, "", destination.path)
        with entries.open_source(source) as opened:
            return self._copy(opened, destination, progress, cancel, identity=identity)

    def copy_to_each(
        self,
        source: Entry,
        destinations: Sequence[Entry],
        *,
        identity: Identity | None = None,
        progress: Progress = None,
        cancel: Cancellation | None = None,
    ) -> list[Outcome]:
        """Copy one file to several names; the outcomes are in the order of ``destinations``.

        The source is read once for each mount: its first copy there is the source of the others. A destination that
        fails does not end the other copies. ``progress`` counts the bytes of all copies, and is called from several
        threads, one at a time.
        """
        from gpufs.copying.fan_out import FanOut

        return FanOut(self.context, source, destinations, identity, progress, cancel).run()

    def copy_each(
        self,
        source: Entry | StoreFile,
        ends: Sequence[Entry | Url],
        *,
        progress: Progress,
        cancel: Cancellation,
    ) -> list[Outcome]:
        """Copy a file, of this machine or of a store, to each of its destinations by the fastest way that they have."""
        names = [end for end in ends if isinstance(end, Entry)]
        identity = None
        try:
            if not isinstance(source, Entry) and source.cached is not None:
                identity = Identity.of_stored(source)
                source = Entry(source.url.shown, source.cached)
            if not isinstance(source, Entry):
                return self._stores().download(source, names, progress, cancel)
            if len(names) > 1:
                return self.copy_to_each(source, names, identity=identity, progress=progress, cancel=cancel)
            if names:
                return [self.copy_entry(source, names[0], identity=identity, progress=progress, cancel=cancel)]
            urls = [end for end in ends if not isinstance(end, Entry)]
            return [self._stores().upload(source, url, progress, cancel) for url in urls]
        except CopyError as error:
            return [error]

    def _stores(self) -> StoreCopies:
        from gpufs.copying.store_copy import StoreCopies

        with self._lock:
            if self._store_copies is None:
                self._store_copies = StoreCopies(self.context)
            return self._store_copies

    def copy_from_stream(
        self, source_fd: int, destination: Entry, *, progress: Progress = None, cancel: Cancellation | None = None
    ) -> CopyResult:
        """Copy what a pipe, or another open file, returns up to its end. Its descriptor stays the caller's.

        The calling thread reads, so an OSError that a signal handler raises ends the copy.
        """
        source = OpenFile(Entry.of(STREAM), source_fd, os.fstat(source_fd))
        return self._copy(source, destination, progress, cancel, stream=True)

    def _copy(
        self,
        source: OpenFile,
        destination: Entry,
        progress: Progress,
        cancel: Cancellation | None,
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
            raise entries.open_failure(error, destination.path) from None

    def copy_to_stream(
        self, source: Entry, destination_fd: int, *, progress: Progress = None, cancel: Cancellation | None = None
    ) -> CopyResult:
        """Copy a file into a pipe, or another open file, whose descriptor stays the caller's."""
        with entries.open_source(source) as opened:
            if opened.status.st_dev not in self.context.mounts():
                raise NotOnMountCopyError(errno.EXDEV, "is not on a gpufs mount: use cat", source.path)
            output = OpenFile(Entry.of(STREAM), destination_fd, os.fstat(destination_fd))
            if stat.S_ISREG(opened.status.st_mode) and os.path.samestat(opened.status, output.status):
                raise CopyError(errno.EINVAL, "is the same file as the output", source.path)
            return CopyJob(self.context, opened, output, progress=progress, cancel=cancel).run_to_stream()


def _check_callbacks(progress: object, cancel: object) -> None:
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: {progress!r} cannot be called")
    if cancel is not None and not isinstance(cancel, Cancellation):
        raise TypeError(f"cancel: {cancel!r} is not a Cancellation")
