"""Copies between files of a mount and URLs: what gpufs.stores moves, under the names and rules of copies.

A file that is loaded has the name .NAME.gpufs-part until it is complete. Then it replaces what NAME was, in one step.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from functools import partial
from typing import Final

from gpufs import waiting
from gpufs.client._cancellation import Cancellation
from gpufs.copying import entries
from gpufs.copying.checksums import blocks
from gpufs.copying.deletion import Names
from gpufs.copying.entries import Entry, OpenFile
from gpufs.copying.identity import Identity, seconds_text, settle
from gpufs.copying.job import CopyContext
from gpufs.copying.patterns import Selection
from gpufs.copying.tree import TreeState
from gpufs.copying.types import (
    CopyError,
    CopyProgress,
    CopyResult,
    NotOnMountCopyError,
    Outcome,
    Progress,
    copy_error,
)
from gpufs.copying.walk import Step, walk_store
from gpufs.new_file import NewFile
from gpufs.stores import checksums, finding, urls
from gpufs.stores.checksums import Checksum
from gpufs.stores.download import PARTS_IN_FLIGHT, Download, sha256_of_stored
from gpufs.stores.errors import TRIES, StoreError
from gpufs.stores.files import StoreFile, noted_of, open_store, upload
from gpufs.stores.urls import Url
from gpufs.syscalls import os_error, path_of
from gpufs.waiting import Workers

_NOT_ON_MOUNT: Final = "neither of them is on a gpufs mount: use a program of the store"


class _Arrival:
    """A file of a store on its way to one name: an incomplete file, locked against other copies to that name."""

    def __init__(
        self, context: CopyContext, pool: Workers, file: StoreFile, entry: Entry, cancel: Cancellation
    ) -> None:
        """``entry`` has its directory open. OSError if nothing can be copied there."""
        assert entry.directory is not None
        self.file = file
        self.identity = Identity.of_stored(file)  # what the copy notes
        self._context = context
        self._entry = entry
        self._cancel = cancel
        self._began = time.monotonic()
        if os.fstat(entry.directory).st_dev not in context.mounts():
            raise NotOnMountCopyError(errno.EXDEV, _NOT_ON_MOUNT, file.url.shown, entry.path)
        entry.check_replaceable()
        self._new = NewFile.part_of(entry.directory, entry.name)
        self.fd = self._new.fd
        self._loading = Download(file, self.fd, pool)
        try:
            if not (context.options.partial and self._loading.resume()):
                self._loading.forget()  # first: a list of parts that are gone would make the next copy keep holes
                os.ftruncate(self.fd, 0)
            context.check_space(self.fd, file.size, cancel)
            # The writes allocate memory while others wait for the store. Allocating all of it first takes longer.
            os.ftruncate(self.fd, file.size)
        except BaseException:
            self._discard(keep=bool(self._loading.kept))
            os.close(self.fd)
            raise

    def load(self, progress: Progress) -> CopyResult:
        """Load it, and give it its name. Raises CopyError, and cleans up then."""
        loading, source, name, options = self._loading, self.file.url.shown, self._entry.path, self._context.options
        has_come = False
        try:
            loading.run(partial(self._report, progress), lambda: self._cancel.cancelled, self._check_space)
            has_come = True
            digest = self._verified(progress) if options.verify else None
            self._complete()
        except OSError as error:
            differs = has_come and error.errno == errno.EIO  # from the store's checksum, which is not continued
            failure = copy_error(error, source, name)
            failure.left, failure.bytes_total = self._discard(keep=options.partial and not differs), loading.size
            raise failure from None
        except BaseException:  # for example by progress()
            self._discard(keep=options.partial)
            raise
        paths = {"remote": loading.size - loading.kept, "kept": loading.kept}
        moved = {path: count for path, count in paths.items() if count}
        seconds = time.monotonic() - self._began
        return CopyResult(source, name, loading.size, seconds, "remote", moved, sha256=digest)

    def close(self) -> None:
        """Close the file after its last write, so that a late one does not find another file behind the descriptor."""
        if self._loading.running:
            waiting.start(_close_after, self._loading.running, self.fd)
        else:
            os.close(self.fd)

    def _report(self, progress: Progress, moved: int) -> None:
        if progress is not None:
            kept, size = self._loading.kept, max(self._loading.size, moved)
            done = min(kept + moved, size)
            progress(CopyProgress(done, size, {"remote": done - kept, "kept": kept}))

    def _check_space(self, more: int) -> None:
        self._context.check_space(self.fd, more, self._cancel)

    def _verified(self, progress: Progress) -> str:
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        content = blocks(self.fd, lambda: self._cancel.cancelled)
        again = partial(sha256_of_stored, self.file, lambda: self._cancel.cancelled)
        names = (self.file.url.shown, self._entry.path)
        return _verify(self._context, self.file.checksum, self._loading.size, content, again, *names, progress)

    def _complete(self) -> None:
        file = self.file
        if self.identity.version and file.url.is_web and self._loading.is_whole:
            # The request has not said which version it wants: it is noted if it is still there.
            now = Identity.of_stored(_find_one(file.url, self._cancel))
            self.identity = now if now == self.identity else self.identity._replace(version="")
        self._loading.forget()
        self._new.keep_attributes_of(self._entry.name)
        self.identity.note(self.fd)
        self._new.complete(self._entry.name)

    def _discard(self, *, keep: bool) -> str:
        """Remove the file, or keep it for the next copy; what became of it, in words."""
        done = self._loading.bytes_done
        if keep and done:
            return f"{done} bytes are kept in {self._new.temporary}: --partial or partial=True goes on from there"
        self._new.discard()
        with suppress(OSError):
            os.ftruncate(self.fd, 0)  # the memory is free at once, also where a silent server keeps the file open
        return ""


def _widened(progress: Progress, moved: int, count: int) -> Progress:
    """Return a progress of several copies that one of them reports to: ``moved`` bytes are counted already."""
    if progress is None:
        return None
    return lambda one: progress(one._replace(moved=one.moved + moved, total=one.total * count + moved))


def _close_after(parts: Sequence[Future[None]], fd: int) -> None:
    wait(parts)
    os.close(fd)


def _find_one(url: urls.Url, cancel: Cancellation) -> StoreFile:
    """Return the file that a URL names. ValueError for several."""
    (file,) = waiting.result(waiting.start(partial(finding.find, url, recursive=False)), lambda: cancel.cancelled)
    return file


def _verify(
    context: CopyContext,
    expected: Checksum | None,
    size: int,
    content: Iterator[memoryview],
    again: Callable[[], str],
    source: str,
    destination: str,
    progress: Progress,
) -> str:
    """The SHA-256 of a copy. CopyError if the store's checksum is another.

    ``again`` reads the store's file and returns its SHA-256: an ETag may be something else.
    """

    def report(offset: int) -> None:
        if progress is not None:
            progress(CopyProgress(offset, size, {}, "verify"))

    verification = checksums.verify(content, expected, size, report)
    if expected is None and context.notice is not None:
        context.notice(f"{source}: the store has no checksum, so only the size was verified")
    if verification.matches():
        return verification.sha256
    assert expected is not None
    stored = again() if expected.kind in ("md5", "parts") else ""
    if stored != verification.sha256:
        kind = "SHA-256" if expected.kind == "sha256" else "ETag" if expected.kind != "git" else "Git object"
        text = f"the copy differs: the store's {kind} is {expected.value}, and its SHA-256 {verification.sha256}"
        raise CopyError(errno.EIO, text, source, destination, bytes_total=size)
    if context.notice is not None:
        context.notice(f"{source}: its ETag is not its checksum, so it was read again and compared")
    return verification.sha256


class StoreCopies:
    """The copies from and to URLs of a Copier. Thread-safe."""

    def __init__(self, context: CopyContext) -> None:
        self._context = context
        # The threads start when they are needed, and all files share them.
        self._pool = Workers(PARTS_IN_FLIGHT)
        # A store of each bucket, whose connections all uploads use.
        self._open = functools.cache(partial(open_store, retries=TRIES))

    def close(self) -> None:
        self._pool.close()

    def download(
        self, file: StoreFile, destinations: Sequence[Entry], progress: Progress, cancel: Cancellation
    ) -> list[Outcome]:
        """Copy a file of a store to each destination. The first copy is the source of the others."""
        outcomes: list[Outcome] = []
        for place, destination in enumerate(destinations):
            others = destinations[place + 1 :]
            try:
                with (
                    destination.located() as located,
                    closing(_Arrival(self._context, self._pool, file, located, cancel)) as arrival,
                ):
                    # The progress counts the bytes of all copies.
                    outcomes.append(arrival.load(_widened(progress, 0, 1 + len(others))))
                    if others:
                        outcomes += self._copy_arrived(arrival, others, progress, cancel)
                    return outcomes
            except OSError as error:
                outcomes.append(copy_error(error, destination.path))
        return outcomes

    def _copy_arrived(
        self, arrival: _Arrival, others: Sequence[Entry], progress: Progress, cancel: Cancellation
    ) -> list[Outcome]:
        from gpufs.copying.fan_out import FanOut

        source, size = Entry(arrival.file.url.shown, path_of(arrival.fd)), os.fstat(arrival.fd).st_size
        copies = FanOut(self._context, source, others, arrival.identity, _widened(progress, size, 1), cancel)
        outcomes = copies.run()
        if progress is not None:
            total = size * (1 + len(others))
            progress(CopyProgress(total, total, {"remote": size}))
        return outcomes

    def upload(self, source: Entry, url: urls.Url, progress: Progress, cancel: Cancellation) -> CopyResult:
        """Copy a file of a mount to an object store. Raises CopyError."""
        try:
            with entries.open_source(source) as opened:
                return self._upload(opened, url, progress, cancel)
        except OSError as error:
            raise copy_error(error, source.path, url.shown) from None

    def _upload(self, opened: OpenFile, url: urls.Url, progress: Progress, cancel: Cancellation) -> CopyResult:
        began = time.monotonic()
        source, size = opened.entry.path, entries.size_of(opened)
        if opened.status.st_dev not in self._context.mounts():
            raise NotOnMountCopyError(errno.EXDEV, _NOT_ON_MOUNT, source, url.shown)

        stopped = threading.Event()
        done = 0

        def read(count: int) -> None:
            nonlocal done
            done = count
            if stopped.is_set() or cancel.cancelled:
                raise os_error(errno.ECANCELED)

        def report() -> None:
            if progress is not None:
                progress(CopyProgress(done, size, {"remote": done}))

        settle(opened.status)
        written = self._context.is_written(opened.status)
        modified = "" if written else seconds_text(opened.status.st_mtime_ns)
        store = self._open(Url(f"{url.scheme}://{url.place}", url.scheme, url.place, ""))
        sending = waiting.start(upload, store, os.dup(opened.fd), size, modified, url, read)
        try:
            checksum = waiting.result(sending, lambda: cancel.cancelled, report)
        finally:
            stopped.set()
            # An upload that ends early is removed from the store.
            if wait([sending], waiting.END_SECONDS).not_done and self._context.notice is not None:
                self._context.notice(f"{url.shown}: the server does not answer, and may keep parts of the upload")
        digest = None
        if self._context.options.verify:
            content = blocks(opened.fd, lambda: cancel.cancelled)

            def again() -> str:
                return sha256_of_stored(_find_one(url, cancel), lambda: cancel.cancelled)

            digest = _verify(self._context, checksum, size, content, again, url.shown, source, progress)
        paths = {"remote": size} if size else {}
        return CopyResult(source, url.shown, size, time.monotonic() - began, "remote", paths, sha256=digest)


def plan(sources: Sequence[str], ends: Sequence[str]) -> tuple[list[urls.Url], urls.Url | None]:
    """Return the URLs of the sources, and that of the destination. OSError EINVAL for what is not possible."""
    remote = [urls.parse(name) for name in sources if urls.is_url(name)]
    if remote and len(remote) < len(sources):
        raise OSError(errno.EINVAL, "files and URLs cannot be copied by one command: use one for each")
    uploads = [urls.parse(name) for name in ends if urls.is_url(name)]
    for url in uploads:
        if remote:
            raise OSError(errno.EINVAL, "a URL cannot be copied to another: copy it to a mount first", url.shown)
        if not url.is_bucket:
            raise OSError(errno.EINVAL, "takes no uploads: s3://, gs:// and az:// do", url.shown)
    if uploads and len(ends) > 1:
        raise OSError(errno.EINVAL, "a URL is the only destination: repeat the command for others")
    return remote, uploads[0] if uploads else None


class StoredCopies:
    """Which objects below a URL are copies of files already: the time of their source is noted in each."""

    def __init__(self, url: urls.Url, *, recursive: bool) -> None:
        self._store = open_store(url)
        self._sizes: dict[str, int] | None = None  # None: not known
        if recursive:  # else one request for each object that does not exist, or has another size
            with suppress(StoreError):
                self._sizes = {file.url.key: file.size for file in finding.below(url)}

    def has(self, url: urls.Url, identity: Identity) -> bool:
        """Return whether an object is a copy of a file. OSError if nobody can tell."""
        if identity.modified_ns is None or (self._sizes is not None and self._sizes.get(url.key) != identity.size):
            return False
        return noted_of(self._store, url) == (identity.size, seconds_text(identity.modified_ns))


class BucketTree:
    """The copy of one source in an object store, whose URL is ``base``."""

    def __init__(self, base: urls.Url, state: TreeState) -> None:
        self._base = base
        self._state = state

    def enter(self, step: Step) -> bool:
        """Do nothing: object stores have no directories."""
        return True

    def file(self, step: Step) -> urls.Url | None:
        """Return the URL of the copy of a file, None if it is not copied."""
        url = self._base if step.parent is None else self._base.below(step.below)
        try:
            if step.parent is None and url.is_directory:
                raise OSError(errno.EISDIR, "a directory cannot be overwritten with a file")
            if not self._state.options.no_clobber or finding.stored(url) is None:
                return url  # with --update it is asked later, by several threads
            self._state.report.skipped()
        except OSError as error:
            self._state.report.failed(step.path, url.shown, error)
        return None

    def special(self, step: Step) -> None:
        """Refuse what is neither a file nor a directory."""
        assert step.status is not None
        what = "a symbolic link (-L copies its file)" if stat.S_ISLNK(step.status.st_mode) else "not a file"
        self._state.report.failed(step.path, None, OSError(errno.EINVAL, f"is {what}"))


def delete_other_objects(url: urls.Url, names: Names, selection: Selection, state: TreeState) -> None:
    """Remove all objects below a URL that are not among the names of the source.

    What --include and --exclude leave out of the copy stays.
    """
    options, report = state.options, state.report
    try:
        found = finding.below(url)
    except OSError as error:
        report.failed(url.shown, None, error)
        return
    steps = selection.of(walk_store(url.shown, found))
    with closing(steps):
        for step in steps:
            if step.kind != "file" or names.get(step.below) == "file" or state.cancel.cancelled:
                continue
            assert isinstance(step.source, StoreFile)
            try:
                if not options.dry_run:
                    step.source.delete()
                report.deleted(step.path)
            except OSError as error:
                report.failed(step.path, None, error)
