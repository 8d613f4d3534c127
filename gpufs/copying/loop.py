"""The loop of `gpufs cp`: several threads copy the files that walks find, with a bound on those that wait."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from gpufs.client._cancellation import Cancellation
from gpufs.copying.deletion import Names, check_apart, delete_others, names_of
from gpufs.copying.entries import Entry, data_bytes
from gpufs.copying.job import CopyContext
from gpufs.copying.tree import FileTree, TreeState, file_is_current
from gpufs.copying.types import CopyResult, Outcome, Progress, TreeOptions, TreeReport
from gpufs.copying.walk import Fail, Step, Steps, selected, walk_files, walk_store
from gpufs.syscalls import start_thread

if TYPE_CHECKING:
    from gpufs.stores.files import StoreFile
    from gpufs.stores.urls import Url

_QUEUED_FILES: Final = 64  # the directories of queued files are open
_REFRESH: Final = 0.1
# Time for an interrupted copy to leave a consistent destination. Longer than a connection waits for a daemon.
_INTERRUPT_SECONDS: Final = 10.0
_END_SECONDS: Final = 0.5


class Source(NamedTuple):
    """A name to copy from: its walk, and its copies, one for each destination."""

    walk: Callable[[Fail], Steps]
    copies: Sequence[Entry]


class Tree(Protocol):
    """The copy of one source at one destination."""

    def enter(self, step: Step) -> bool:
        """Create a directory. Return whether it can be filled."""

    def file(self, step: Step) -> Entry | Url | None:
        """Return the name of the copy of a file, None if it is not copied."""

    def special(self, step: Step) -> None:
        """Create what is neither a file nor a directory."""


class FileCopier(Protocol):
    """Copies single files: Copier, or what saves them."""

    context: CopyContext

    def copy_each(
        self,
        source: Entry | StoreFile,
        ends: Sequence[Entry | Url],
        *,
        progress: Progress,
        cancel: Cancellation,
    ) -> list[Outcome]:
        """Copy a file to each of its destinations."""


class CopyThreads:
    """Threads that carry out calls, with a bound on those that wait."""

    def __init__(self, cancel: Cancellation, report: TreeReport) -> None:
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
                workers.append(start_thread(self._work))
        except OSError:
            if not workers:
                raise
        try:
            finder = start_thread(self._find, find, len(workers))
        except OSError:
            self._cancel.cancel()
            raise
        try:
            while finder.is_alive() and not self._cancel.cancelled:
                self._wait(finder)
            finder.join(_END_SECONDS)  # the walk ends with its present step, unless it waits for a store
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
        except BaseException:  # KeyboardInterrupt, or of a program that is shown the progress
            self._cancel.cancel()
            deadline = time.monotonic() + _INTERRUPT_SECONDS
            for thread in (finder, *workers):
                thread.join(max(deadline - time.monotonic(), 0))
            raise

    def run_one(self, call: Callable[[], None]) -> None:
        """Carry out one call by a thread, and raise what it raises. OSError EAGAIN as run()."""
        failures: list[Exception] = []

        def carry_out() -> None:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)

        self.run(partial(self.put, carry_out), 1)
        if failures:
            raise failures[0]

    def _wait(self, thread: threading.Thread) -> None:
        thread.join(_REFRESH)
        self._report.tick()

    def put(self, work: Callable[[], None] | None) -> None:
        """Queue a call for one of the threads, and wait for space. Does nothing once cancelled."""
        while not self._cancel.cancelled:
            with suppress(Full):
                self._queue.put(work, timeout=_REFRESH)
                return

    def _find(self, find: Callable[[], None], workers: int) -> None:
        try:
            find()
        except OSError as error:
            self._report.failed("", error.filename, error)
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


class TreeCopy(CopyThreads):
    def __init__(self, copier: FileCopier, options: TreeOptions, cancel: Cancellation, report: TreeReport) -> None:
        super().__init__(cancel, report)
        self.state = TreeState(options, cancel, report)
        self._copier = copier
        self._options = options

    # ---- what is copied ----

    def find_files(self, named: Sequence[Sequence[tuple[str, Entry]]]) -> None:
        """Walk over files and directories of this machine. ``named``: for each destination the sources and copies."""
        found = []
        for copies in zip(*named, strict=True):
            walk = partial(self._walk, copies[0][0], hint="-r copies it, -t copies into it")
            found.append(Source(walk, [copy for _, copy in copies]))
            if self._options.delete:
                check_apart(copies[0][0], copies[0][1].path)
        self._delete_others(found)
        many = self._options.recursive or len(found) > 1 or len(named) > 1
        if not many or self._all_fit(found, replaces=True):
            for source in found:
                created: set[tuple[int, int]] = set()
                self.add(source.walk(self._fail), [FileTree(copy, self.state, created) for copy in source.copies])

    def find_urls(self, urls: Sequence[Url], named: Sequence[Sequence[Entry]]) -> None:
        """Ask stores for the files of URLs. ``named``: for each destination the copies of the URLs."""
        from gpufs.stores import finding

        found = []
        for place, url in enumerate(urls):
            try:
                files = finding.find(url, recursive=self._options.recursive)
            except OSError as error:
                self._fail(url.shown, error)
                continue
            copies = [of_end[place] for of_end in named]
            if not url.is_pattern:
                directory = None if files[0].url.key == url.key else url.shown
                found.append(Source(partial(walk_store, directory, files), copies))
                continue
            for file in files:  # the copies have the pattern's name
                beside = [copy.beside(file.path) for copy in copies]
                found.append(Source(partial(walk_store, None, [file]), beside))
        self._delete_others(found)
        many = self._options.recursive or len(found) > 1 or len(named) > 1
        if not many or self._all_fit(found, replaces=False):
            for source in found:
                trees = [FileTree(copy, self.state, set(), follow=True) for copy in source.copies]
                self.add(source.walk(self._fail), trees)

    def find_uploads(self, sources: Sequence[str], url: Url, *, into: bool) -> None:
        """Walk over what is stored at a URL, or below it with ``into``."""
        from gpufs.copying.store_copy import BucketTree, delete_other_objects

        for source in sources:
            target = url.below(os.path.basename(os.path.normpath(source))) if into else url
            names = self._names(partial(self._walk, source, follow=True)) if self._options.delete else None
            if names is not None:
                delete_other_objects(target, names, self.state)
            self.add(self._walk(source, self._fail, follow=True), [BucketTree(target, self.state)])

    def _walk(self, source: str, fail: Fail, *, hint: str = "-r copies it", follow: bool = False) -> Steps:
        recursive, dereference = self._options.recursive, self._options.dereference
        entry = Entry.of(source, follow=follow or dereference or not recursive)
        return walk_files(entry, fail, recursive=recursive, dereference=dereference, hint=hint)

    def add(self, steps: Steps, trees: Sequence[Tree]) -> None:
        """Create directories and links, and queue files."""
        with closing(self._selected(steps)) as steps:
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

    def _selected(self, steps: Steps) -> Steps:
        options = self._options
        return selected(steps, options.include, options.exclude) if options.include or options.exclude else steps

    def _fail(self, path: str, error: OSError) -> None:
        self._report.failed(path, None, error)

    def _delete_others(self, found: Sequence[Source]) -> None:
        """Remove from the copies what their sources do not have. It comes first, for the space that it frees."""
        for source in found if self._options.delete else ():
            names = self._names(source.walk)
            if names is not None:
                for copy in source.copies:
                    delete_others(copy, names, self._options, self._cancel, self._report)

    def _names(self, walk: Callable[[Fail], Steps]) -> Names | None:
        """Return what a source has; None if that is not a directory, or if not all of it can be read."""
        errors: list[OSError] = []
        names = names_of(self._selected(walk(lambda path, error: errors.append(error))))
        if errors:
            self._report.warned("nothing is deleted, for not all of the source can be read")
        return None if errors or names.get("") != "directory" else names

    # ---- space ----

    def _all_fit(self, found: Sequence[Source], *, replaces: bool) -> bool:
        """Return whether all files fit at each destination, and report where not.

        ``replaces``: they are written into the space of existing ones.
        """
        if self._options.partial or not found:
            return True
        sizes: list[dict[str, int]] = [{} for _ in found[0].copies]  # by the names of the copies
        for source in found:
            for step in self._selected(source.walk(_ignore)):
                if step.kind == "file" and step.size:
                    size = step.size if step.status is None else data_bytes(step.status, step.size)
                    for copy, of_end in zip(source.copies, sizes, strict=True):
                        path = os.path.join(copy.path, step.below) if step.below else copy.path
                        if not self._may_be_current(path, step):
                            of_end[path] = size
        ends = zip(found[0].copies, sizes, strict=True)
        fits = [self._fit(copy, of_end, replaces=replaces) for copy, of_end in ends]
        return all(fits)

    def _may_be_current(self, path: str, step: Step) -> bool:
        """Return whether --update may skip a file. With --checksum that is known once it is read."""
        modified = 0 if self._options.checksum else step.modified_ns
        return self._options.update and file_is_current(Entry.of(path), step.size, modified)

    def _fit(self, base: Entry, sizes: Mapping[str, int], *, replaces: bool) -> bool:
        needed = 0
        for path, size in sizes.items():
            held = _held_bytes(path)
            if held is None or not self._options.no_clobber:
                needed += size - (held or 0) * replaces
        place = base.path
        try:
            with suppress(FileNotFoundError, NotADirectoryError), base.filled() as (directory, place):
                largest = max(sizes.values()) if len(sizes) > 1 else None
                self._copier.context.check_space(directory, needed, self._cancel, largest=largest)
        except OSError as error:
            if not self._cancel.cancelled:
                self._report.failed("", place, error)
            return False
        return True

    def _copy(self, step: Step, ends: list[Entry | Url]) -> None:
        assert step.source is not None
        try:
            if self._options.checksum:
                ends = self._different(step, ends)
            names = [end.path if isinstance(end, Entry) else end.shown for end in ends]
            if not ends:
                return
            progress = self._report.reporter(step.path)
            if self._options.dry_run:
                outcomes: list[Outcome] = [CopyResult(step.path, name, step.size, 0.0, "dry-run", {}) for name in names]
            else:
                outcomes = self._copier.copy_each(step.source, ends, progress=progress, cancel=self._cancel)
            self._report.finished(step.path, names, outcomes)
        except Exception as error:  # noqa: BLE001 - the other files are still copied
            self._report.failed(step.path, None, OSError(errno.EIO, f"{type(error).__name__}: {error}"))
        finally:
            if step.folder is not None:
                step.folder.release()

    def _different(self, step: Step, ends: list[Entry | Url]) -> list[Entry | Url]:
        """Return those of the copies that do not have the content of the file, and count the others."""
        from gpufs.copying.checksums import same_content  # with hashlib, which other copies do without

        assert step.source is not None
        different = []
        for end in ends:
            try:
                same = same_content(step.source, step.size, end, self._cancel)
            except OSError:
                same = False  # copying it will show what is wrong
            if same:
                self._report.planned(-step.size)
                self._report.skipped()
            else:
                different.append(end)
        return different


def _ignore(path: str, error: OSError) -> None:
    """Leave a failure to the copies, which report it."""


def _held_bytes(path: str) -> int | None:
    """Return the bytes that overwriting a file frees; None if nothing has the name."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
