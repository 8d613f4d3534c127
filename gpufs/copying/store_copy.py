"""Copies between files of a mount and URLs: what gpufs.stores moves, under the names and rules of copies.

A file that is loaded has the name .NAME.gpufs-part until it is complete. Then it replaces what NAME was, in one step.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Final

from gpufs import waiting
from gpufs.client._cancellation import Cancellation
from gpufs.copying import entries
from gpufs.copying.checksums import blocks
from gpufs.copying.deletion import Names
from gpufs.copying.entries import Entry, OpenFile
from gpufs.copying.identity import Identity, settle
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
from gpufs.copying.walk import Folder, Step, walk_store
from gpufs.new_file import NewFile
from gpufs.stores import checksums, finding, urls
from gpufs.stores.checksums import Checksum
from gpufs.stores.download import PARTS_IN_FLIGHT, Download, Parts, sha256_of_stored
from gpufs.stores.errors import StoreError
from gpufs.stores.files import StoreFile, noted_of, open_store, upload
from gpufs.syscalls import close_all, os_error
from gpufs.waiting import Workers

_NOT_ON_MOUNT: Final = "neither of them is on a gpufs mount: use a program of the store"


def _close_after(parts: Sequence[Future[None]], descriptors: Sequence[int]) -> None:
    """Close files after their last write, so that a late one does not find another file behind the descriptor."""
    wait(parts)
    close_all(descriptors)


class _Destination:
    """The incomplete file of one destination, locked against other copies to the same name."""

    def __init__(self, context: CopyContext, file: StoreFile, entry: Entry, cancel: Cancellation) -> None:
        """``entry`` has its directory open. OSError if nothing can be copied there."""
        assert entry.directory is not None
        self.entry = entry
        self.kept = 0  # bytes that an earlier copy had stored
        if os.fstat(entry.directory).st_dev not in context.mounts():
            raise NotOnMountCopyError(errno.EXDEV, _NOT_ON_MOUNT, file.url.shown, entry.path)
        entry.check_replaceable()
        self._new = NewFile.part_of(entry.directory, entry.name)
        self.fd = self._new.fd
        try:
            self.parts = Parts(self.fd, file)
            if context.options.partial and self.parts.resume():
                self.kept = self.parts.bytes_done
            else:
                self.parts.end()  # first: a list of parts that are gone would make the next copy keep holes
                os.ftruncate(self.fd, 0)
            context.check_space(self.fd, file.size, cancel)
            # The writes allocate memory while others wait for the store. Allocating all of it first takes longer.
            os.ftruncate(self.fd, file.size)
        except BaseException:
            self.discard(keep=bool(self.kept))
            os.close(self.fd)
            raise

    def read_back(self, cancel: Cancellation) -> Iterator[memoryview]:
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return blocks(self.fd, lambda: cancel.cancelled)

    def complete(self, identity: Identity) -> None:
        """Give the file its name."""
        self.parts.end()
        self._new.keep_attributes_of(self.entry.name)
        identity.note(self.fd)
        self._new.complete(self.entry.name)

    def discard(self, *, keep: bool) -> str:
        """Remove the file, or keep it for the next copy; what became of it, in words."""
        done = self.parts.bytes_done
        if keep and done:
            return f"{done} bytes are kept in {self._new.temporary}: --partial goes on from there"
        self._new.discard()
        with suppress(OSError):
            os.ftruncate(self.fd, 0)  # the memory is free at once, also where a silent server keeps the file open
        return ""


class StoreCopies:
    """The copies from and to URLs of a Copier. Thread-safe."""

    def __init__(self, context: CopyContext) -> None:
        self._context = context
        # The threads start when they are needed, and all files share them.
        self._pool = Workers(PARTS_IN_FLIGHT)

    def close(self) -> None:
        self._pool.close()

    def download(
        self, file: StoreFile, destinations: Sequence[Entry], progress: Progress, cancel: Cancellation
    ) -> list[Outcome]:
        """Copy a file of a store to each destination, and request each of its bytes once."""
        began = time.monotonic()
        outcomes: dict[int, Outcome] = {}
        with ExitStack() as opened:
            ends: dict[int, _Destination] = {}
            for place, destination in enumerate(destinations):
                try:
                    located = opened.enter_context(destination.located())
                    ends[place] = _Destination(self._context, file, located, cancel)
                except OSError as error:
                    outcomes[place] = copy_error(error, destination.path)
            loading = Download(file, [end.parts for end in ends.values()], self._pool)
            try:
                failed = self._load(loading, file, list(ends.values()), progress, cancel)
                for place, end in ends.items():
                    ended = end.parts.error or failed
                    outcomes[place] = self._finish(file, loading, end, ended, began, progress, cancel)
            except BaseException:  # for example by progress()
                for end in ends.values():
                    end.discard(keep=self._context.options.partial)
                raise
            finally:
                descriptors = [end.fd for end in ends.values()]
                if loading.running:
                    waiting.start(_close_after, loading.running, descriptors)
                else:
                    close_all(descriptors)
        return [outcomes[place] for place in range(len(destinations))]

    def _load(
        self,
        loading: Download,
        file: StoreFile,
        ends: Sequence[_Destination],
        progress: Progress,
        cancel: Cancellation,
    ) -> OSError | None:
        """Load the parts; the error that ended it for all destinations."""
        resumed = min((end.kept for end in ends), default=0)

        def report(moved: int) -> None:
            if progress is not None:
                count = len(ends)  # the progress counts the bytes of all copies
                kept = 0 if loading.is_whole else resumed
                size = max(loading.size, moved)
                moved = min(kept + moved, size) * count
                progress(CopyProgress(moved, size * count, {"remote": moved - kept * count, "kept": kept * count}))

        def check_space(more: int) -> None:
            for end in ends:
                try:
                    self._context.check_space(end.fd, more, cancel)
                except OSError as error:
                    end.parts.error = error

        try:
            if ends:
                loading.run(report, lambda: cancel.cancelled, check_space)
                for end in ends:
                    end.kept = 0 if loading.is_whole else end.kept
        except OSError as error:
            return error
        return None

    def _finish(
        self,
        file: StoreFile,
        loading: Download,
        end: _Destination,
        error: OSError | None,
        began: float,
        progress: Progress,
        cancel: Cancellation,
    ) -> Outcome:
        """Verify one destination and give it its name, or clean up after a failure."""
        source, name, size = file.url.shown, end.entry.path, loading.size
        digest = None
        try:
            if error is not None:
                raise error
            if self._context.options.verify:
                content, again = end.read_back(cancel), partial(sha256_of_stored, file, lambda: cancel.cancelled)
                digest = self._verify(file.checksum, size, content, again, source, name, progress)
            end.complete(self._identity(file, loading, cancel))
        except OSError as failed:
            # What differs from the store's checksum is not continued.
            differs = error is None and failed.errno == errno.EIO
            left = end.discard(keep=self._context.options.partial and not differs)
            outcome = copy_error(failed, source, name)
            outcome.left, outcome.bytes_total = left, size
            return outcome
        paths = {"remote": size - end.kept, "kept": end.kept}
        moved = {path: count for path, count in paths.items() if count}
        return CopyResult(source, name, size, time.monotonic() - began, "remote", moved, sha256=digest)

    def _identity(self, file: StoreFile, loading: Download, cancel: Cancellation) -> Identity:
        """Return what a copy notes: the version that was asked for, if it is the one that has come."""
        identity = Identity.of_stored(file)
        if not identity.version or not file.url.is_web or (file.etag is not None and not loading.is_whole):
            return identity
        # The requests have not said which version they want.
        (now,) = waiting.result(
            waiting.start(partial(finding.find, file.url, recursive=False)), lambda: cancel.cancelled
        )
        return identity if Identity.of_stored(now) == identity else identity._replace(version="")

    def _verify(
        self,
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
        if expected is None and self._context.notice is not None:
            self._context.notice(f"{source}: the store has no checksum, so only the size was verified")
        if verification.matches():
            return verification.sha256
        assert expected is not None
        stored = again() if expected.kind in ("md5", "parts") else ""
        if stored != verification.sha256:
            kind = "SHA-256" if expected.kind == "sha256" else "ETag" if expected.kind != "git" else "Git object"
            text = f"the copy differs: the store's {kind} is {expected.value}, and its SHA-256 {verification.sha256}"
            raise CopyError(errno.EIO, text, source, destination, bytes_total=size)
        if self._context.notice is not None:
            self._context.notice(f"{source}: its ETag is not its checksum, so it was read again and compared")
        return verification.sha256

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
        modified = "" if written else _seconds_text(opened.status.st_mtime_ns)
        sending = waiting.start(upload, os.dup(opened.fd), size, modified, url, read)
        try:
            checksum = waiting.result(sending, lambda: cancel.cancelled, report)
        finally:
            stopped.set()
            wait([sending], waiting.END_SECONDS)  # an upload that ends early is removed from the store
        digest = None
        if self._context.options.verify:
            content = blocks(opened.fd, lambda: cancel.cancelled)

            def again() -> str:
                (stored,) = waiting.result(
                    waiting.start(partial(finding.find, url, recursive=False)), lambda: cancel.cancelled
                )
                return sha256_of_stored(stored, lambda: cancel.cancelled)

            digest = self._verify(checksum, size, content, again, url.shown, source, progress)
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
        return noted_of(self._store, url) == (identity.size, _seconds_text(identity.modified_ns))


def _seconds_text(time_ns: int) -> str:
    return f"{time_ns // 10**9}.{time_ns % 10**9:09}"


class BucketTree:
    """The copy of one source in an object store, whose URL is ``base``."""

    def __init__(self, base: urls.Url, state: TreeState) -> None:
        self._base = base
        self._state = state
        self._directories: dict[Folder, urls.Url] = {}

    def enter(self, step: Step) -> bool:
        """Take the name of a directory: object stores have none."""
        assert step.folder is not None
        self._directories[step.folder] = self._url(step)
        return True

    def file(self, step: Step) -> urls.Url | None:
        """Return the URL of the copy of a file, None if it is not copied."""
        url = self._url(step)
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

    def _url(self, step: Step) -> urls.Url:
        return self._base if step.parent is None else self._directories[step.parent].below(step.name)


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
