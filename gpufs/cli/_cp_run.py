"""One run of `gpufs cp`: threads copy the files that the walk finds; results are printed and collected."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from gpufs import mounting
from gpufs.cli._cp_options import CpOptions
from gpufs.cli._cp_walk import Item, Walk, check_space, targets
from gpufs.cli._output import Failure, complain, json_text, printable
from gpufs.client import Cancellation, Copier, CopyError, CopyProgress, CopyResult
from gpufs.copying.entries import Entry, kind_of
from gpufs.copying.types import STREAM, Outcome, check_options
from gpufs.exceptions import text_of
from gpufs.units import bytes_text, rate_text

if TYPE_CHECKING:
    from gpufs.cli._cp_nodes import NodeNames
    from gpufs.cli._cp_remote import RemoteNames, Task
    from gpufs.copying.reports import Sink

_QUEUED_FILES: Final = 64  # the directories of queued files are open
_REFRESH: Final = 0.1
# Time for an interrupted copy to leave a consistent destination. Longer than a connection waits for a daemon.
_INTERRUPT_SECONDS: Final = 10.0


def copy(names: list[str], directories: list[str], options: CpOptions) -> int:
    """Run the command and return its exit code. Raise Failure if no copy can start.

    ``directories``: where all names are copied to; without any, the last name is the destination.
    """
    remote = nodes = None
    given = [*names, *directories]
    if options.archive:
        options = options._replace(recursive=True, preserve=True)
    kind = kind_of(given)
    if kind == "url":
        from gpufs.cli import _cp_remote  # other copies need none of it

        with _misuse("--"):
            check_options(options.of_each_copy, "a URL")
        with _misuse():
            remote = _cp_remote.RemoteNames(names, directories, options)
    elif kind == "host":
        from gpufs.cli import _cp_nodes

        with _misuse("--"):
            check_options(options.of_each_copy, "HOST:PATH")
        with _misuse():
            nodes = _cp_nodes.NodeNames(names, directories, options)
    if nodes is None and (options.shell is not None or options.remote_gpufs is not None):
        raise Failure("cp: -e and --remote-gpufs need a name like HOST:PATH", 2)
    if STREAM in names:
        _check_stream(names, directories, options)
    if len(directories) > 1 and nodes is None:
        _check_several(directories, options)
    with Copier(
        fastpath=options.fastpath,
        fsync=options.fsync,
        verify=options.verify,
        preserve=options.preserve,
        partial=options.partial,
        notice=_complain,
    ) as copier:
        run = Run(copier, options)
        if remote is not None:
            run.copy_remote(remote, options.jobs if remote.many else 1)
        elif nodes is not None:
            run.copy_nodes(nodes)
        elif STREAM in names:
            run.copy_stream(*names)
        else:
            sources, ends = (names, directories) if directories else (names[:-1], names[-1:])
            with ExitStack() as opened:
                named = [
                    opened.enter_context(
                        targets(sources, end, follow=not options.recursive, directory=bool(directories))
                    )
                    for end in ends
                ]
                many = options.recursive or len(sources) > 1 or len(ends) > 1
                if many and not options.partial:
                    for of_directory in named:
                        try:
                            check_space(copier, of_directory, run.cancel, options)
                        except OSError as error:
                            place = os.path.dirname(of_directory[0][1].path) or "."
                            run.report("", place, error.errno or errno.EIO, text_of(error))
                if not run.errors:
                    run.copy(named, options.jobs if options.recursive or len(sources) > 1 else 1)
    if options.json:
        print(json_text(run.summary()))
        sys.stdout.flush()
    if run.signal is not None:
        # As with cp, the parent sees that a signal ended this process.
        signal.signal(run.signal, signal.SIG_DFL)
        os.kill(os.getpid(), run.signal)
    if run.output_error is not None:
        raise run.output_error
    return 1 if run.errors else 0


@contextmanager
def _misuse(prefix: str = "") -> Iterator[None]:
    """Raise Failure for names and options that cannot be used."""
    try:
        yield
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        raise Failure(f"cp: {named}{prefix}{error.strerror}", 2) from None


def _check_stream(names: list[str], directories: list[str], options: CpOptions) -> None:
    """Raise Failure for names and options that a pipe does not allow."""
    if len(names) != 2 or names == [STREAM, STREAM] or directories:
        raise Failure("cp: - is standard input or output, and takes one other name (a file of that name is ./-)", 2)
    unfit = ["recursive", "archive", "dereference", "preserve", "no_clobber", "verify"]
    unfit += ["json"] if names[1] == STREAM else []
    for name in unfit:
        if getattr(options, name):
            raise Failure(f"cp: --{name.replace('_', '-')} cannot be used with a pipe", 2)
    if options.fastpath == "require":
        raise Failure("cp: --fastpath require cannot be used with a pipe, whose bytes pass through this process", 2)


def _check_several(directories: list[str], options: CpOptions) -> None:
    """Raise Failure for what cannot be copied to several directories."""
    if options.recursive:
        text = "-r copies to one directory: copy its files to several (DIR/*), or copy the directory from GPU to GPU"
        raise Failure(f"cp: {text} afterwards", 2)
    paths = [os.path.realpath(directory) for directory in directories]
    twice = [directory for place, directory in enumerate(directories) if paths[place] in paths[:place]]
    if twice:
        raise Failure(f"cp: {twice[0]}: is given more than once with -t", 2)


def _complain(text: str) -> None:
    complain(f"cp: {text}")


class ProgressLine:
    """A progress line on standard error. Lines are printed above it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def show(self, moved: int, total: int, name: str) -> None:
        """Draw the line again."""
        import shutil  # most copies draw nothing

        rate = rate_text(moved / max(time.monotonic() - self._began, 1e-9))
        line = f"{bytes_text(moved)} of {bytes_text(total)}  {rate}  {printable(name)}"
        self._write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")

    def print(self, line: str, stream: Any) -> None:
        """Print a line above the progress."""
        self._write("\r\x1b[K")
        with self._lock:
            print(line, file=stream, flush=True)

    def end(self) -> None:
        """Leave the line as it is and start the next one."""
        self._write("\n")

    def _write(self, text: str) -> None:
        try:
            with self._lock:
                print(text, end="", file=sys.stderr, flush=True)
        except OSError:
            pass  # nobody watches


def _is_mount_root(path: str) -> bool:
    path = os.path.realpath(path)
    return any(entry.mountpoint == path for entries in mounting.by_device().values() for entry in entries)


def _outcomes(copy: Callable[..., CopyResult]) -> Callable[..., list[Outcome]]:
    """Return a copy whose outcome is a list, as that of a copy to several destinations."""

    def work(**options: Any) -> list[Outcome]:
        try:
            return [copy(**options)]
        except CopyError as error:
            return [error]

    return work


class Run:
    """One run of the command."""

    def __init__(self, copier: Copier, options: CpOptions) -> None:
        self._copier = copier
        self._verbose = options.verbose
        self._streaming = False  # this thread copies, and may wait for a pipe
        self._lines = sys.stderr if options.json else sys.stdout  # of --verbose: JSON is alone on standard output
        show_progress = sys.stderr.isatty() if options.progress is None else options.progress
        self._bar = ProgressLine() if show_progress else None
        self.cancel = Cancellation()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._items: list[Item] = []  # of the source that the walk is at
        self._destinations = 1
        self._lock = threading.Lock()  # guards the next four
        self._total = 0  # bytes of the files found so far
        self._done = 0  # bytes of the files that have ended
        self._moved: dict[str, int] = {}  # bytes of the files in progress, by source
        self._current = ""  # for the progress line
        self._walk = Walk(
            self.cancel,
            options,
            found=self._found,
            warn=lambda text: self._print(f"gpufs cp: warning: {text}", sys.stderr),
            report=self.report,
        )
        self._began = time.monotonic()
        self._seconds = 0.0
        self.signal: int | None = None
        self.results: list[CopyResult] = []
        self.errors: list[dict[str, Any]] = []
        self.output_error: OSError | None = None  # of standard output
        self._ending: OSError | None = None  # what ended the copy between machines

    def copy(self, named: list[list[tuple[str, Entry]]], jobs: int) -> None:
        """Copy everything. Errors are printed and collected. ``named``: the sources for each destination."""
        self._destinations = len(named)
        with self._running():
            workers = self._start(jobs)
            for ends in zip(*named, strict=True):
                before = len(self.errors)
                for source, destination in ends:
                    self._walk.find(source, destination)
                    if len(self.errors) > before and not self._items and len(ends) > 1:
                        break  # the others would fail alike
                if self._items:
                    self._put(partial(self._copy_items, self._items))
                    self._items = []
            for _ in workers:
                self._put(None)
            self._wait(workers)
        self._warn_of_links()

    def _warn_of_links(self) -> None:
        """Report which links were copied without the files that they lead to."""
        links = [] if self.cancel.cancelled else self._walk.links_without_files()
        if links:
            others = f" and {len(links) - 1} others" if len(links) > 1 else ""
            verb = "are links whose files were" if others else "is a link whose file was"
            text = f"{links[0]}{others} {verb} not copied: -L copies files instead of links"
            self._print(f"gpufs cp: warning: {text}", sys.stderr)

    def copy_remote(self, names: RemoteNames, jobs: int) -> None:
        """Copy from or to URLs. Errors are printed and collected."""

        def find(plan: Callable[..., list[Task]]) -> None:
            try:
                tasks = plan(self.cancel, self.report, self._walk.skip)
                self._total = sum(task.size * len(task.destinations) for task in tasks)
                for task in tasks:
                    self._put(partial(self._copy, task.source, task.destinations, task.copy))
            except Exception as error:  # noqa: BLE001 - the workers must end
                self.report("", None, errno.EIO, f"{type(error).__name__}: {error}")
            finally:
                for _ in range(jobs):
                    self._put(None)

        with names.planned(self._copier) as plan, self._running():
            # A store may be slow to answer: this thread must see signals.
            finder = threading.Thread(target=find, args=(plan,), daemon=True)
            finder.start()
            workers = self._start(jobs)
            while finder.is_alive() and not self.cancel.cancelled:
                finder.join(_REFRESH)
                self._refresh()
            if self.cancel.cancelled:  # the finder may still wait for the store
                for _ in workers:
                    self._queue.put(None)
            self._wait(workers)

    def copy_nodes(self, names: NodeNames) -> None:
        """Copy from or to another machine. Errors are printed and collected."""
        try:
            # Before the progress line, which would overwrite a question of ssh.
            with names.connected(self._copier, self.cancel) as copy:
                with self._running():
                    self._put(partial(self._copy_between, copy))
                    self._put(None)
                    self._wait(self._start(1))
                if self._ending is not None:
                    raise self._ending
        except OSError as error:
            if self.cancel.cancelled:
                self.report("", None, errno.ECANCELED, "interrupted: nothing is left of the incomplete file")
            else:
                self.report("", None, error.errno or errno.EIO, f"{error.filename}: {text_of(error)}")

    def _copy_between(self, copy: Callable[[Sink], None]) -> None:
        try:
            copy(self)
        except OSError as error:
            self._ending = error
        except Exception as error:  # noqa: BLE001 - reported as of other threads
            self.report("", None, errno.EIO, f"{type(error).__name__}: {error}")

    def planned(self, size: int) -> None:
        """Of a copy between machines: how many bytes there are."""
        with self._lock:
            self._total += size

    def moved(self, source: str, count: int) -> None:
        """Of a copy between machines: how many bytes of a file have been copied."""
        with self._lock:
            self._current = source
            self._moved[source] = count

    def noticed(self, text: str) -> None:
        """Of a copy between machines: a line for the user."""
        self._print(f"gpufs cp: {text}", sys.stderr)

    def ended(self, source: str, outcome: Outcome | None, hop: int = 0) -> None:
        """Of a copy between machines: what became of a file. None if it was skipped."""
        with self._lock:
            if hop == 0:  # the others are not counted
                self._moved.pop(source, None)
                self._done += outcome.bytes if isinstance(outcome, CopyResult) else 0
        if outcome is None:
            self._walk.skip()
        elif isinstance(outcome, CopyResult):
            self._copied(outcome)
        else:
            self._failed(str(outcome.filename), outcome.filename2, outcome)

    def lost(self, hop: int, error: CopyError) -> None:
        """Of a copy between machines: one of a chain has failed."""
        if not self.cancel.cancelled:
            self._failed(str(error.filename), None, error)

    def copy_stream(self, source: str, destination: str) -> None:
        """Copy standard input to a file, or a file to standard output, on this thread."""
        self._streaming = True
        if source == STREAM:
            copy = partial(self._copier.copy_from_stream, 0, Entry.of(destination))
        else:
            self._lines = sys.stderr
            copy = partial(self._copier.copy_to_stream, Entry.of(source), 1)
        with self._running():
            self._copy(source, [destination], _outcomes(copy))

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Interrupt the copies on signals, and show the progress."""
        previous = {
            number: signal.signal(number, self._interrupt)
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) != signal.SIG_IGN  # shells ignore SIGINT for background jobs
        }
        try:
            yield
            self._refresh()
        finally:
            if self._bar is not None:
                self._bar.end()
            self._seconds = time.monotonic() - self._began
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self, jobs: int) -> list[threading.Thread]:
        workers: list[threading.Thread] = []
        for _ in range(jobs):
            worker = threading.Thread(target=self._work, daemon=True)
            try:
                worker.start()
            except RuntimeError:
                if not workers:
                    raise Failure("cp: no thread can be started (ulimit -u)") from None
                break  # fewer threads are enough
            workers.append(worker)
        return workers

    def _found(self, item: Item) -> None:
        with self._lock:
            self._total += item.size
        if self._destinations == 1:
            self._put(partial(self._copy_items, [item]))
        else:
            self._items.append(item)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:  # the second signal ends the process at once
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = number
        self.cancel.cancel()
        if self._streaming:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))

    def _wait(self, workers: list[threading.Thread]) -> None:
        deadline = float("inf")
        for worker in workers:
            while worker.is_alive():
                worker.join(_REFRESH)
                self._refresh()
                if self.cancel.cancelled:
                    deadline = min(deadline, time.monotonic() + _INTERRUPT_SECONDS)
                if time.monotonic() > deadline:
                    self.report(
                        "", None, errno.ETIMEDOUT, "a copy does not end: its file system or store does not answer"
                    )
                    return

    def _put(self, work: Callable[[], None] | None) -> None:
        # After a cancellation the queue may never shrink: all threads can be blocked in a file system.
        while self._queue.qsize() >= _QUEUED_FILES and not self.cancel.cancelled:
            time.sleep(_REFRESH)
            self._refresh()
        self._queue.put(work)

    def _refresh(self) -> None:
        if self._bar is not None:
            with self._lock:
                state = (self._done + sum(self._moved.values()), self._total, self._current)
            self._bar.show(*state)

    # ---- threads ----

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _copy_items(self, items: list[Item]) -> None:
        """Copy the items of one source."""
        source = items[0].source
        try:
            ends = [item.destination for item in items]
            if len(items) == 1:
                copy = _outcomes(partial(self._copier.copy_entry, source, ends[0]))
            else:
                copy = partial(self._copier.copy_to_each, source, ends)
            self._copy(source.path, [end.path for end in ends], copy)
        finally:
            for item in items:
                self._walk.release(item.folder)

    def _copy(self, source: str, destinations: list[str], copy: Callable[..., list[Outcome]]) -> None:
        done = 0
        if self.cancel.cancelled:
            return
        try:
            outcomes = copy(progress=self._reporter(source), cancel=self.cancel)
            for destination, outcome in zip(destinations, outcomes, strict=True):
                if isinstance(outcome, CopyError):
                    done += outcome.bytes_done
                    self._failed(source, destination, outcome)
                else:
                    done += outcome.bytes
                    self._copied(outcome)
        except Exception as error:  # noqa: BLE001 - the other files are still copied
            self.report(source, ", ".join(destinations), errno.EIO, f"{type(error).__name__}: {error}")
        with self._lock:
            self._current = source
            self._moved.pop(source, None)
            self._done += done

    def _reporter(self, source: str) -> Callable[[CopyProgress], None] | None:
        """Take the progress of a copy for the progress line."""
        if self._bar is None:
            return None

        def report(progress: CopyProgress) -> None:
            with self._lock:
                self._current = source if progress.phase == "copy" else f"verifying {source}"
                if progress.phase == "copy":
                    self._moved[source] = progress.moved
                if self._streaming:
                    self._total = progress.total
            if self._streaming:
                self._refresh()  # no other thread does

        return report

    def _copied(self, result: CopyResult) -> None:
        self.results.append(result)
        if self._verbose:
            served = ", ".join(f"{path} {bytes_text(count)}" for path, count in result.paths.items()) or "empty"
            rate = rate_text(result.bytes / max(result.seconds, 1e-9))
            text = f"{result.source} -> {result.destination}: {bytes_text(result.bytes)}, {rate} ({served})"
            self._print(text, self._lines)

    def _failed(self, source: str, destination: str | None, error: CopyError) -> None:
        if error.errno == errno.EPIPE and destination == STREAM:
            self.report(source, destination, errno.EPIPE, "", error)  # as other programs, silently
        elif error.errno == errno.ECANCELED and self.cancel.cancelled:
            text = f"interrupted: {error.left or 'nothing is left of the copy (--partial keeps it)'}"
            self.report(source, destination, errno.ECANCELED, text, error)
        else:
            self.report(source, destination, error.errno or errno.EIO, str(error), error, names_files=True)

    def report(
        self,
        source: str,
        destination: str | None,
        number: int,
        text: str,
        error: CopyError | None = None,
        *,
        names_files: bool = False,
    ) -> None:
        """Print and collect one error. ``names_files``: its text already names the files."""
        self.errors.append(
            {
                "source": source,
                "destination": destination,
                "errno": number,
                "name": errno.errorcode.get(number, str(number)),
                "message": text,
                "bytes_done": error.bytes_done if error else 0,
                "device_code": error.device_code if error else 0,
            }
        )
        if not text:
            return
        if number in (errno.EPERM, errno.EACCES) and _is_mount_root(os.path.dirname(destination or source)):
            text += " (README there lists the directories that take files)"
        where = "" if names_files else " -> ".join(name for name in (source, destination) if name)
        self._print(f"gpufs cp: {where}: {text}" if where else f"gpufs cp: {text}", sys.stderr)

    def _print(self, line: str, stream: Any) -> None:
        try:
            if self._bar is not None:
                self._bar.print(printable(line), stream)
            else:
                print(printable(line), file=stream, flush=True)
        except OSError as error:
            if stream is sys.stdout:
                self.output_error = error  # reported after the copies

    def summary(self) -> dict[str, Any]:
        """Return the output of --json. Sizes are in bytes, times in seconds."""
        total = sum(result.bytes for result in self.results) + sum(error["bytes_done"] for error in self.errors)
        paths: Counter[str] = Counter()
        for result in self.results:
            paths.update(result.paths)
        return {
            "files": len(self.results),
            "skipped": self._walk.skipped,
            "bytes": total,
            "seconds": self._seconds,
            "bytes_per_second": total / self._seconds if self._seconds else 0.0,
            "methods": Counter(result.method for result in self.results),
            "paths": paths,
            "refusals": sorted({refusal for result in self.results for refusal in result.refusals}),
            "interrupted": self.signal is not None,
            "copies": [result._asdict() for result in self.results],
            "errors": self.errors,
        }
