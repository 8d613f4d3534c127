"""The loop of `gpufs cp`: several threads copy the files that walks find, with a bound on those that wait."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

from gpufs.client._cancellation import Cancellation
from gpufs.copying.deletion import Names, add_name, check_apart, delete_others
from gpufs.copying.entries import Entry, data_bytes, find_targets, kind_of
from gpufs.copying.patterns import Selection
from gpufs.copying.tree import FileTree, TreeState, adopt, has_attributes
from gpufs.copying.types import STREAM, CopyResult, Outcome, Report, as_os_error, check_options
from gpufs.copying.walk import HINT, End, Folder, Step, Steps, replay, walk_files, walk_store
from gpufs.exceptions import text_of
from gpufs.syscalls import start_thread

if TYPE_CHECKING:
    from gpufs.copying.copier import FileCopier
    from gpufs.copying.store_copy import StoredCopies
    from gpufs.stores.files import StoreFile
    from gpufs.stores.urls import Url

_QUEUED_FILES: Final = 64  # the directories of queued files are open
_REFRESH: Final = 0.1
# Time for an interrupted copy to leave a consistent destination. Longer than a connection waits for a daemon.
_INTERRUPT_SECONDS: Final = 10.0
_END_SECONDS: Final = 0.5
_IN_PLACE: Final = "for both versions of files that it replaces (--inplace or inplace=True overwrites them)"


class Source(NamedTuple):
    """What a name to copy from has, and its copies, one for each destination."""

    steps: Steps
    trees: Sequence[FileTree]


class _Need(NamedTuple):
    """The bytes that a copy needs, and those that it frees. ``is_done``: it is there, and has all attributes."""

    size: int = 0
    freed: int = 0
    is_done: bool = False


class Tree(Protocol):
    """The copy of one source at one destination."""

    def enter(self, step: Step) -> bool:
        """Create a directory. Return whether it can be filled."""

    def file(self, step: Step) -> End | None:
        """Return the name of the copy of a file, None if it is not copied."""

    def special(self, step: Step) -> None:
        """Create what is neither a file nor a directory."""


class _Thread:
    """A thread. Waits for ``ended``, unlike those of join(), can be interrupted by an exception of a signal handler."""

    def __init__(self, call: Callable[..., None], *arguments: object) -> None:
        self.ended = threading.Event()
        self.join = start_thread(self._run, call, arguments).join

    def _run(self, call: Callable[..., None], arguments: Sequence[object]) -> None:
        try:
            call(*arguments)
        finally:
            self.ended.set()


class TreeCopy:
    """One copy of files and directories, with the options of the copier, by several threads."""

    def __init__(self, copier: FileCopier, cancel: Cancellation, report: Report) -> None:
        self._cancel = cancel
        self._report = report
        # A call, and what to do in its place once cancelled; None for each thread at the end. It has a bound.
        self._queue: Queue[tuple[Callable[[], None], Callable[[], None]] | None] = Queue(_QUEUED_FILES)
        self.state = TreeState(copier.context, cancel, report)
        self._copier = copier
        self._options = options = copier.context.options
        self.selection = Selection(options.include, options.exclude)
        self._made: dict[str, str] | None = None  # of several sources: what is copied, by the names of the copies
        self.is_incomplete = False  # not all of the sources can be read
        self._stored: StoredCopies | None = None  # of uploads with --update
        self._may_overwrite = False  # by --inplace
        self._jobs = 1
        self._many = True  # several files, perhaps
        # A lock if there is space for one copy at a time.
        self._turn: AbstractContextManager[object] = nullcontext()

    # ---- the threads ----

    def run(self, find: Callable[[], None], jobs: int) -> None:
        """Copy what ``find`` adds, by up to ``jobs`` threads. OSError EAGAIN if no thread can be started.

        ``find`` runs on a thread of its own, for a store or a disk may be slow to answer.
        """
        self._jobs = jobs if self._many else 1
        workers: list[_Thread] = []
        try:
            for _ in range(self._jobs):
                workers.append(_Thread(self._work))
        except OSError:
            if not workers:
                raise
        try:
            finder = _Thread(self._find, find, len(workers))
        except OSError:
            self._cancel.cancel()
            raise
        try:
            while not finder.ended.is_set() and not self._cancel.cancelled:
                self._wait(finder)
            finder.ended.wait(_END_SECONDS)  # the walk ends with its present step, unless it waits for a store
            deadline = float("inf")
            for worker in workers:
                while not worker.ended.is_set():
                    self._wait(worker)
                    if self._cancel.cancelled:
                        deadline = min(deadline, time.monotonic() + _INTERRUPT_SECONDS)
                    if time.monotonic() > deadline:
                        text = "a copy does not end: its file system or store does not answer"
                        self._report.failed("", None, OSError(errno.ETIMEDOUT, text))
                        return
        except BaseException:  # KeyboardInterrupt, or of a program that is shown the progress
            self._cancel.cancel()
            finder.ended.wait(_END_SECONDS)
            deadline = time.monotonic() + _INTERRUPT_SECONDS
            for worker in workers:
                worker.ended.wait(max(deadline - time.monotonic(), 0))
            raise
        finally:
            for thread in (finder, *workers):
                if thread.ended.is_set():
                    thread.join()
            with suppress(Empty):  # nothing is queued, unless it was cancelled
                while True:
                    if (queued := self._queue.get_nowait()) is not None:
                        queued[True]()

    def _wait(self, thread: _Thread) -> None:
        thread.ended.wait(_REFRESH)
        self._report.tick()

    def _put(self, work: Callable[[], None], drop: Callable[[], None] = lambda: None) -> None:
        """Queue a call for one of the threads, and wait for space. Once cancelled ``drop`` is called instead."""
        while not self._cancel.cancelled:
            with suppress(Full):
                self._queue.put((work, drop), timeout=_REFRESH)
                return
        drop()

    def _find(self, find: Callable[[], None], workers: int) -> None:
        try:
            find()
        except Exception as error:  # noqa: BLE001 - the workers must end
            failure = as_os_error(error)
            self._report.failed("", failure.filename, failure)
        finally:
            for _ in range(workers):
                while not self._cancel.cancelled:
                    with suppress(Full):
                        self._queue.put(None, timeout=_REFRESH)
                        break

    def _work(self) -> None:
        while True:
            try:
                queued = self._queue.get(timeout=0 if self._cancel.cancelled else _REFRESH)
            except Empty:
                if self._cancel.cancelled:
                    return
                continue
            if queued is None:
                return
            queued[self._cancel.cancelled]()

    # ---- what is copied ----

    @contextmanager
    def opened(
        self,
        sources: Sequence[str],
        ends: Sequence[str],
        *,
        in_directory: bool = False,
        is_one: bool = False,
        shell: str = "",
        program: str = "",
    ) -> Iterator[Callable[[], None]]:
        """Find out what names mean, and yield what finds their files, for run(). OSError if they cannot be used.

        ``ends``: the destination, or several. They are what cp(1) takes them for: ``in_directory`` as -t. ``is_one``:
        no pattern may name several files. This connects to other machines, which may ask for a password; ``shell``,
        ``program``: as of Route.
        """
        options, kind = self._options, kind_of((*sources, *ends))
        if not all(sources) or not all(ends):
            raise OSError(errno.ENOENT, "an empty name is given where a file belongs")
        if kind != "file" and STREAM in (*sources, *ends):
            raise OSError(errno.EINVAL, "- is standard input or output, and the other name must be on this machine")
        self._many = options.recursive or len(sources) > 1
        if kind == "host":
            check_options(options, "HOST:PATH")
            with self._connected(sources, ends, in_directory, shell, program) as find:
                yield find
            return
        names, follow = sources, not options.recursive
        urls: list[Url] = []
        if kind == "url":
            from gpufs.copying import store_copy  # other copies need none of it

            check_options(options, "a URL")
            urls, target = store_copy.plan(sources, ends)
            if target is not None:
                into = not options.exact and (in_directory or target.is_directory or len(sources) > 1)
                yield partial(self._find_uploads, sources, target, into=into)
                return
            names, follow = [url.name for url in urls], False
            if any(url.is_pattern for url in urls):
                if options.exact or is_one:
                    text = "a pattern names several files, and -T takes one SOURCE ([*] stands for the character *)"
                    raise OSError(errno.EINVAL, text, sources[0])
                self._many = in_directory = True
        with ExitStack() as opened:
            named = []
            for end in ends:
                found = find_targets(names, end, follow=follow, directory=in_directory, exact=options.exact)
                try:
                    named.append(opened.enter_context(found))
                except OSError as error:
                    raise OSError(error.errno, text_of(error), end) from None
            yield partial(self._find_urls, urls, named) if urls else partial(self._find_files, named)

    @contextmanager
    def _connected(
        self, sources: Sequence[str], ends: Sequence[str], in_directory: bool, shell: str, program: str
    ) -> Iterator[Callable[[], None]]:
        from gpufs.copying import host_copy

        failures: list[Exception] = []
        try:
            route = host_copy.Route(sources, ends, shell=shell, program=program)
        except OSError as error:  # not of the other machine
            named = f"{error.filename}: " if error.filename else ""
            raise OSError(error.errno, f"{named}{error.strerror}") from None
        request = host_copy.new_request(self._options, in_directory=in_directory)
        with route.connected(self.state.context, request, self._report, self._cancel) as copy:

            def carry_out() -> None:
                try:
                    copy()
                except Exception as error:  # noqa: BLE001 - raised below, where the connection explains it
                    failures.append(error)

            yield partial(self._put, carry_out)
            if failures:
                raise failures[0]

    def _find_files(self, named: Sequence[Sequence[tuple[str, Entry]]]) -> None:
        """Walk over files and directories of this machine. ``named``: for each destination the sources and copies."""
        found = []
        for copies in zip(*named, strict=True):
            source = copies[0][0]
            if self._options.delete:
                check_apart(source, copies[0][1].path)
            steps = self._walk(source, hint=f"{HINT}, -t copies into it")
            found.append(Source(steps, [FileTree(copy, self.state) for _, copy in copies]))
        self._may_overwrite = self._options.replace
        self._copy_all(found, replaces=self._options.replace)

    def _find_urls(self, urls: Sequence[Url], named: Sequence[Sequence[tuple[str, Entry]]]) -> None:
        """Ask stores for the files of URLs. ``named``: for each destination the names and copies of the URLs."""
        from gpufs.stores import finding

        found = []
        for place, url in enumerate(urls):
            try:
                files = finding.find(url, recursive=self._options.recursive)
            except OSError as error:
                self.fail(url.shown, error)
                continue
            copies = [of_end[place][1] for of_end in named]
            each: list[tuple[str | None, list[StoreFile], list[Entry]]]
            if url.is_pattern:  # the copies have the pattern's name
                each = [(None, [file], [copy.beside(file.path) for copy in copies]) for file in files]
            else:
                each = [(None if files[0].url.key == url.key else url.shown, files, copies)]
            for directory, below, ends in each:
                trees = [FileTree(end, self.state, follow=True) for end in ends]
                found.append(Source(self.selection.of(walk_store(directory, below)), trees))
        self._copy_all(found, replaces=True)

    def _find_uploads(self, sources: Sequence[str], url: Url, *, into: bool) -> None:
        from gpufs.copying.store_copy import BucketTree, StoredCopies, delete_other_objects

        for source in sources:
            target = url.below(os.path.basename(os.path.normpath(source))) if into else url
            steps = self._walk(source, follow=True)
            if self._options.update and not self._options.checksum:
                self._stored = StoredCopies(target, recursive=self._options.recursive)
            if self._options.delete:
                listed, names = self.listed(steps), dict[str, Literal["file", "directory"]]()
                for step in listed:
                    add_name(names, step)
                if self._may_delete(names):
                    delete_other_objects(target, names, self.selection, self.state)
                    self._report_unmatched()
                steps = replay(listed, self.fail)
            self.add(steps, [BucketTree(target, self.state)])

    def _walk(self, source: str, *, hint: str = HINT, follow: bool = False) -> Steps:
        recursive, dereference = self._options.recursive, self._options.dereference
        entry = Entry.of(source, follow=follow or dereference or not recursive)
        steps = walk_files(entry, self.fail, recursive=recursive, dereference=dereference, hint=hint)
        return self.selection.of(steps)

    def _copy_all(self, found: Sequence[Source], *, replaces: bool) -> None:
        """Copy sources. If they may have several files, each is walked over to its end before anything is changed."""
        if self._many or any(len(source.trees) > 1 for source in found):
            found = self.planned(found, replaces=replaces)
        for source in found:
            self.add(source.steps, source.trees)

    def planned(self, found: Sequence[Source], *, replaces: bool) -> list[Source]:
        """Walk over sources to their ends, and return them for add(), none if not all files fit.

        ``replaces``: existing files keep their memory until their new versions are complete.
        """
        self._made = {} if len(found) > 1 else None
        needs = [list[_Need]() for _ in found[0].trees] if found else []
        planned = [Source(replay(self._plan(source, needs, replaces), self.fail), source.trees) for source in found]
        ends = zip(found[0].trees, needs, strict=True) if found and not self._options.partial else ()
        fits = [self._fit(tree.base, need, replaces=replaces) for tree, need in ends]  # each of them is reported
        return planned if all(fits) else []

    def add(self, steps: Steps, trees: Sequence[Tree]) -> None:
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
                    self._put(partial(self._copy, step, ends), partial(self._release, step))

    def fail(self, path: str, error: OSError) -> None:
        """Take what cannot be found in a source."""
        self.is_incomplete = True
        self._report.failed(path, None, error)

    # ---- before anything is changed ----

    def listed(self, steps: Steps) -> list[Step]:
        """Walk over a source to its end, or until this is cancelled."""
        with closing(steps):
            return list(itertools.takewhile(lambda step: not self._cancel.cancelled, steps))

    def _plan(self, source: Source, needs: Sequence[list[_Need]], replaces: bool) -> list[Step]:
        """Return what is to be done, and add to ``needs`` what it takes at each destination.

        With --delete, what the source does not have is then removed, which frees space.
        """
        bases = [(os.path.normpath(tree.base.path), True) for tree in source.trees]
        copies: dict[Folder | None, list[tuple[str, set[str] | None]]] = {}  # of directories: paths, and what they have
        names: dict[str, Literal["file", "directory"]] = {}
        planned = []
        with closing(source.steps) as steps:
            for step in steps:
                if self._cancel.cancelled:
                    break
                if self._options.delete:
                    add_name(names, step)
                if step.kind == "leave":
                    del copies[step.folder]
                    planned.append(step)
                    continue
                ends = bases  # with whether they may exist
                if step.parent is not None:
                    name, above = step.name, copies[step.parent]
                    ends = [(f"{path}/{name}", there is None or name in there) for path, there in above]
                for tree, (path, may_exist) in zip(source.trees, ends, strict=True):
                    if may_exist:
                        tree.check_name(path, step)
                if step.kind == "enter":
                    is_first = step.parent is None
                    copies[step.folder] = [
                        (path, _names_in(path, follow=is_first) if may_exist else set()) for path, may_exist in ends
                    ]
                elif self._made is not None and not self._is_first(self._made, step, [path for path, _ in ends]):
                    continue
                elif step.has_content:
                    found = [
                        self._need(path if may_exist else None, step, replaces=replaces) for path, may_exist in ends
                    ]
                    if all(need.is_done for need in found):
                        for _ in found:
                            self._report.skipped()
                        continue
                    for need, of_end in zip(found, needs, strict=True):
                        of_end.append(need)
                planned.append(step)
        if self._options.delete:
            if self._may_delete(names):
                for tree in source.trees:
                    dry_run = self._options.dry_run
                    delete_others(tree.base, names, self.selection, self._cancel, self._report, dry_run=dry_run)
            self._report_unmatched()
        return planned

    def _is_first(self, made: dict[str, str], step: Step, paths: Sequence[str]) -> bool:
        """Return whether the copies are the first of their names in this command."""
        before = next((made[path] for path in paths if path in made), None)
        if before is None:
            made.update(dict.fromkeys(paths, step.path))
        elif os.path.normpath(before) == os.path.normpath(step.path):
            self._report.noticed(f"warning: {step.path}: is given more than once")
        else:
            text = "another source of this command has been copied there"
            self._report.failed(step.path, paths[0], OSError(errno.EEXIST, text))
        return before is None

    def _report_unmatched(self) -> None:
        for text in self.selection.unmatched():
            self._report.noticed(f"warning: the pattern {text} matches nothing, neither in the source nor in the copy")

    def _may_delete(self, names: Names) -> bool:
        """Return whether a source is a directory, and all of it could be read."""
        if self.is_incomplete:
            self._report.noticed("warning: nothing is deleted, for not all of the source can be read")
        return not self.is_incomplete and not self._cancel.cancelled and names.get("") == "directory"

    def _need(self, path: str | None, step: Step, *, replaces: bool) -> _Need:
        """``path``: of the copy; None if it does not exist."""
        options, context = self._options, self.state.context
        size = step.size if step.status is None else data_bytes(step.status, step.size)
        if path is None:
            return _Need(size)
        entry = Entry.of(path, follow=False)
        try:
            status = entry.status()
        except OSError:
            return _Need(size)
        if options.no_clobber:
            return _Need()
        if options.checksum:  # whether it is a copy is known once it is read
            is_copy = status.st_size == step.size
        else:
            is_copy = self.state.identity(step).is_of(entry, status) and not context.is_written(status)
        if options.update and is_copy:
            has_all = not options.preserve or step.status is None or has_attributes(status, step.status)
            return _Need(is_done=has_all and not options.checksum)
        frees = stat.S_ISREG(status.st_mode) and not (replaces and context.is_held(status))
        return _Need(size, status.st_blocks * 512 if frees else 0)

    def _fit(self, base: Entry, needs: Sequence[_Need], *, replaces: bool) -> bool:
        """Return whether files fit. ``replaces``: two versions of one exist until the new one is complete."""
        context, place = self._copier.context, base.path
        try:
            with suppress(FileNotFoundError, NotADirectoryError), base.filled() as (directory, place):
                granules = context.granules_of(directory)
                sizes = [(granules.held(need.size), need.freed) for need in needs]
                grown = sum(max(size - freed, 0) if replaces else size - freed for size, freed in sizes)
                twice = sorted((min(need) for need in sizes), reverse=True) if replaces else []
                if any(twice) and not context.has_space(directory, grown + sum(twice[: self._jobs])):
                    self._turn = threading.Lock()
                    del twice[1:]
                largest = max(need.size for need in needs) if len(needs) > 1 else None
                needed = grown + sum(twice[: self._jobs])
                try:
                    context.check_space(directory, needed, self._cancel, largest=largest)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    why = f": {granules}" if needed > 2 * sum(need.size for need in needs) else ""
                    remedy = f" {_IN_PLACE}" if needed != grown and self._may_overwrite else ""
                    raise OSError(error.errno, f"{error.strerror}{why}{remedy}") from None
        except OSError as error:
            if not self._cancel.cancelled:
                self._report.failed("", place, error)
            return False
        return True

    # ---- one file ----

    def _copy(self, step: Step, ends: list[End]) -> None:
        assert step.source is not None
        try:
            if self._options.update:
                ends = self._different(step, ends)
            names = [end.path if isinstance(end, Entry) else end.shown for end in ends]
            if not ends:
                return
            progress = self._report.reporter(step.path)
            if self._options.dry_run:
                outcomes: list[Outcome] = [CopyResult(step.path, name, step.size, 0.0, "dry-run", {}) for name in names]
            else:
                with self._turn:
                    outcomes = self._copier.copy_each(step, ends, progress, self._cancel)
            self._report.finished(step.path, names, outcomes)
        except Exception as error:  # noqa: BLE001 - the other files are still copied
            self._report.failed(step.path, None, as_os_error(error))
        finally:
            self._release(step)

    def _release(self, step: Step) -> None:
        if step.folder is not None:
            step.folder.release()

    def _different(self, step: Step, ends: list[End]) -> list[End]:
        """Return those of the copies that are to be made, and count the others. It asks stores, and reads contents."""
        different = []
        for end in ends:
            try:
                same = self._has_content(step, end)
            except OSError:
                same = False  # copying it will show what is wrong
            if same:
                self._report.planned(-step.size)
                self._report.skipped()
            else:
                different.append(end)
        return different

    def _has_content(self, step: Step, end: End) -> bool:
        options, source = self._options, step.source
        assert source is not None
        if not options.checksum:
            if isinstance(end, Entry):
                return False  # compared before
            return self._stored is not None and self._stored.has(end, self.state.identity(step))
        from gpufs.copying.checksums import same_content  # with hashlib, which other copies do without

        before = end.status() if isinstance(end, Entry) else None
        if not same_content(source, step.size, end, self._cancel):
            return False
        if before is not None and isinstance(end, Entry) and not options.dry_run:
            adopt(end, before, step, self.state)
        return True


def _names_in(path: str, *, follow: bool) -> set[str] | None:
    """Return what a directory has; nothing if it is not one, None if it cannot be read.

    The kernel reads the attributes of its files at the same time, so asking for them is fast then.
    """
    try:
        return set(os.listdir(path)) if stat.S_ISDIR(os.stat(path, follow_symlinks=follow).st_mode) else set()
    except PermissionError:
        return None
    except OSError:
        return set()
