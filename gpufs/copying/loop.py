"""The loop of `gpufs cp`: several threads copy the files that walks find, with a bound on those that wait."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Final, Protocol

from gpufs.client._cancellation import Cancellation
from gpufs.copying.copier import Copier
from gpufs.copying.entries import Entry
from gpufs.copying.space import data_bytes
from gpufs.copying.tree import FileTree, TreeState
from gpufs.copying.types import TreeOptions
from gpufs.copying.walk import Fail, Step, Steps, walk_files, walk_store

if TYPE_CHECKING:
    from gpufs.copying.reports import TreeReport
    from gpufs.stores.files import StoreFile
    from gpufs.stores.urls import Url

_QUEUED_FILES: Final = 64  # the directories of queued files are open
_REFRESH: Final = 0.1
# Time for an interrupted copy to leave a consistent destination. Longer than a connection waits for a daemon.
_INTERRUPT_SECONDS: Final = 10.0


class Tree(Protocol):
    """The copy of one source at one destination."""

    def enter(self, step: Step) -> bool:
        """Create a directory. Return whether it can be filled."""

    def file(self, step: Step) -> Entry | Url | None:
        """Return the name of the copy of a file, None if it is not copied."""

    def special(self, step: Step) -> None:
        """Create what is neither a file nor a directory."""


class TreeCopy:
    """One run of the loop.

    Parameters
    ----------
    copier : Copier
        Copies each file.
    options : TreeOptions
        What is copied.
    cancel : Cancellation
        Ends all copies.
    report : TreeReport
        What it reports to, from any thread.
    """

    def __init__(self, copier: Copier, options: TreeOptions, cancel: Cancellation, report: TreeReport) -> None:
        self.state = TreeState(options, cancel, report)
        self._copier = copier
        self._options = options
        self._cancel = cancel
        self._report = report
        self._queue: Queue[Callable[[], None] | None] = Queue(_QUEUED_FILES)

    def run(self, find: Callable[[], None], jobs: int) -> None:
        """Copy what ``find`` adds, by up to ``jobs`` threads. OSError EAGAIN if no thread can be started.

        ``find`` runs on a thread of its own, for a store or a disk may be slow to answer.
        """
        workers: list[threading.Thread] = []
        try:
            for _ in range(jobs):
                workers.append(_started(self._work))
        except RuntimeError:
            pass  # fewer are enough
        try:
            finder = _started(self._find, find, len(workers))
        except RuntimeError:
            finder = None
        if finder is None or not workers:
            self._cancel.cancel()
            raise OSError(errno.EAGAIN, "no thread can be started (ulimit -u)")
        while finder.is_alive() and not self._cancel.cancelled:
            self._wait(finder)
        deadline = float("inf")
        for worker in workers:
            while worker.is_alive():
                self._wait(worker)
                if self._cancel.cancelled:
                    deadline = min(deadline, time.monotonic() + _INTERRUPT_SECONDS)
                if time.monotonic() > deadline:
                    text = "a copy does not end: its file system or store does not answer"
                    self._report.failed("", None, OSError(errno.ETIMEDOUT, text))
                    return

    def _wait(self, thread: threading.Thread) -> None:
        thread.join(_REFRESH)
        self._report.tick()

    # ---- what is copied ----

    def find_files(self, named: Sequence[Sequence[tuple[str, Entry]]]) -> None:
        """Walk over files and directories of this machine. ``named``: for each destination the sources and copies."""
        many = self._options.recursive or len(named[0]) > 1 or len(named) > 1
        fits = [self._fits(copies[0][1], self._sizes(copies)) for copies in named] if many else []
        if not all(fits):
            return
        for ends in zip(*named, strict=True):
            created: set[tuple[int, int]] = set()
            trees = [FileTree(base, self.state, created) for _, base in ends]
            self._add(self._walk(ends[0][0], self._fail, "-r copies it, -t copies into it"), trees)

    def find_urls(self, urls: Sequence[Url], named: Sequence[Sequence[Entry]]) -> None:
        """Ask stores for the files of URLs. ``named``: for each destination the copies of the URLs."""
        from gpufs.stores import finding

        found: list[tuple[Url, list[StoreFile], Sequence[Entry]]] = []
        for url, bases in zip(urls, zip(*named, strict=True), strict=True):
            try:
                found.append((url, finding.find(url, recursive=self._options.recursive), bases))
            except OSError as error:
                self._fail(url.shown, error)
        several = len(named) > 1 or sum(len(files) for _, files, _ in found) > 1
        for end in range(len(named) if several else 0):
            copies = [_store_copies(url, files, bases[end]) for url, files, bases in found]
            sizes = {path: file.size for of_url in copies for path, file in of_url}
            if not self._fits(named[end][0], sizes, replaces=False):
                return
        for url, files, entries in found:
            if not url.is_pattern:
                directory = url.shown if files[0].url.key != url.key else None
                self._add_store(directory, files, entries)
                continue
            for file in files:  # the copies have the pattern's name
                beside = [
                    entry._replace(path=os.path.join(os.path.dirname(entry.path), file.path), name=file.path)
                    for entry in entries
                ]
                self._add_store(None, [file], beside)

    def find_uploads(self, sources: Sequence[str], url: Url, *, into: bool) -> None:
        """Walk over what is stored at a URL, or below it with ``into``."""
        from gpufs.copying.store_copy import BucketTree

        for source in sources:
            target = url.below(os.path.basename(os.path.normpath(source))) if into else url
            self._add(self._walk(source, self._fail, follow=True), [BucketTree(target, self.state)])

    def _walk(self, source: str, fail: Fail, hint: str = "-r copies it", *, follow: bool = False) -> Steps:
        recursive, dereference = self._options.recursive, self._options.dereference
        entry = Entry.of(source, follow=follow or dereference or not recursive)
        return walk_files(entry, fail, recursive=recursive, dereference=dereference, hint=hint)

    def _add_store(self, directory: str | None, files: Sequence[StoreFile], bases: Sequence[Entry]) -> None:
        trees = [FileTree(base, self.state, set(), follow=True) for base in bases]
        self._add(walk_store(directory, files), trees)

    def _add(self, steps: Steps, trees: Sequence[Tree]) -> None:
        """Create directories and links, and queue files."""
        with closing(steps):
            for step in steps:
                if self._cancel.cancelled:
                    return
                folder = step.folder
                if step.kind == "enter":
                    assert folder is not None
                    entered = [tree.enter(step) for tree in trees]
                    folder.wanted = any(entered)
                elif step.kind == "file" and not step.has_content:
                    for tree in trees:
                        tree.special(step)
                elif step.kind == "file" and (ends := [end for tree in trees if (end := tree.file(step)) is not None]):
                    if folder is not None:
                        folder.use()
                    self._report.planned(step.size * len(ends))
                    self.put(partial(self._copy, step, ends))

    def _fail(self, path: str, error: OSError) -> None:
        self._report.failed(path, None, error)

    # ---- space ----

    def _sizes(self, copies: Sequence[tuple[str, Entry]]) -> dict[str, int]:
        """Return the bytes that files of this machine need, by the names of their copies."""
        sizes: dict[str, int] = {}
        for source, base in copies:
            for step in self._walk(source, _ignore):
                if step.kind == "file" and step.status is not None and stat.S_ISREG(step.status.st_mode):
                    below = step.path.removeprefix(source).lstrip("/")
                    path = os.path.join(base.path, below) if below else base.path
                    sizes[path] = data_bytes(step.status, step.size)
        return sizes

    def _fits(self, base: Entry, sizes: Mapping[str, int], *, replaces: bool = True) -> bool:
        """Return whether files fit where ``base`` is, and report if not. ``replaces``: existing files make space."""
        if self._options.partial:
            return True
        needed = 0
        for path, size in sizes.items():
            held = _held_bytes(path)
            if held is None or not self._options.no_clobber:
                needed += size - (held or 0) * replaces
        try:
            with suppress(FileNotFoundError, NotADirectoryError), base.as_directory().located() as located:
                assert located.directory is not None
                self._copier.context.check_space(located.directory, needed, self._cancel)
        except OSError as error:
            if not self._cancel.cancelled:
                self._report.failed("", os.path.dirname(base.path) or ".", error)
            return False
        return True

    # ---- threads ----

    def put(self, work: Callable[[], None] | None) -> None:
        """Queue a call for one of the threads, and wait for space. Does nothing once cancelled."""
        while not self._cancel.cancelled:
            with suppress(Full):
                self._queue.put(work, timeout=_REFRESH)
                return

    def _find(self, find: Callable[[], None], workers: int) -> None:
        try:
            find()
        except Exception as error:  # noqa: BLE001 - the workers must end
            self._report.failed("", None, OSError(errno.EIO, f"{type(error).__name__}: {error}"))
        finally:
            for _ in range(workers):
                self.put(None)

    def _work(self) -> None:
        while not self._cancel.cancelled:  # what is queued then is not begun
            try:
                work = self._queue.get(timeout=_REFRESH)
            except Empty:
                continue
            if work is None:
                return
            work()

    def _copy(self, step: Step, ends: list[Entry | Url]) -> None:
        names = [end.path if isinstance(end, Entry) else end.shown for end in ends]
        assert step.source is not None
        try:
            progress = self._report.reporter(step.path)
            outcomes = self._copier.copy_each(step.source, ends, progress=progress, cancel=self._cancel)
            self._report.finished(step.path, names, outcomes)
        except Exception as error:  # noqa: BLE001 - the other files are still copied
            self._report.failed(step.path, ", ".join(names), OSError(errno.EIO, f"{type(error).__name__}: {error}"))
        finally:
            if step.folder is not None:
                step.folder.release()


def _started(call: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    return thread


def _ignore(path: str, error: OSError) -> None:
    """Leave a failure to the copies, which report it."""


def _store_copies(url: Url, files: Sequence[StoreFile], base: Entry) -> Iterator[tuple[str, StoreFile]]:
    """Yield the names of copies of a store's files."""
    for file in files:
        if url.is_pattern:
            yield os.path.join(os.path.dirname(base.path), file.path), file
        else:
            yield base.path if file.url.key == url.key else os.path.join(base.path, file.path), file


def _held_bytes(path: str) -> int | None:
    """Return the bytes that overwriting a file frees; None if nothing has the name."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
