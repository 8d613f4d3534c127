"""One run of `gpufs cp`: its options, signals, the progress line, and what it prints."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from gpufs import mounting
from gpufs.cli._output import Failure, complain, json_text, printable
from gpufs.client import Cancellation, Copier, CopyError, CopyProgress, CopyResult
from gpufs.copying.entries import Entry, find_targets, kind_of
from gpufs.copying.loop import TreeCopy
from gpufs.copying.totals import Totals
from gpufs.copying.types import STREAM, CopyOptions, Fastpath, Outcome, TreeOptions, check_options
from gpufs.exceptions import text_of
from gpufs.units import bytes_text, rate_text

if TYPE_CHECKING:
    pass


class CpOptions(NamedTuple):
    """The options of the command. ``archive`` implies recursive and preserve. ``progress`` None: on a terminal.

    ``shell`` and ``remote_gpufs``: of the other machine, None for ssh and gpufs.
    """

    recursive: bool
    dereference: bool
    preserve: bool
    archive: bool
    no_clobber: bool
    partial: bool
    verify: bool
    fsync: bool
    jobs: int
    fastpath: Fastpath
    verbose: bool
    json: bool
    progress: bool | None
    exact: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    update: bool = False
    dry_run: bool = False
    shell: str | None = None
    remote_gpufs: str | None = None

    @property
    def of_each_copy(self) -> CopyOptions:
        """Those that concern single files."""
        return CopyOptions(self.fastpath, self.fsync, self.verify, self.preserve, self.partial)

    @property
    def of_trees(self) -> TreeOptions:
        """Those that concern which files are copied."""
        return TreeOptions(**{name: getattr(self, name) for name in TreeOptions._fields})


def run(names: list[str], directories: list[str], options: CpOptions) -> int:
    """Run the command and return its exit code. Raise Failure if no copy can start.

    ``directories``: where all names are copied to; without any, the last name is the destination.
    """
    if options.archive:
        options = options._replace(recursive=True, preserve=True)
    kind = kind_of([*names, *directories])
    if kind != "host" and (options.shell is not None or options.remote_gpufs is not None):
        raise Failure("cp: -e and --remote-gpufs need a name like HOST:PATH", 2)
    if STREAM in names and kind == "file":
        _check_stream(names, directories, options)
    if options.exact and (directories or len(names) > 2):
        raise Failure("cp: -T takes one SOURCE and its DEST, and no -t", 2)
    if len(directories) > 1 and kind != "host":
        _check_several(directories)
    sources, ends = (names, directories) if directories else (names[:-1], names[-1:])
    with ExitStack() as opened:
        copier = opened.enter_context(Copier(**options.of_each_copy._asdict(), notice=_complain))
        run = Run(copier, options)
        if kind == "url":
            run.copy_urls(sources, ends, in_directory=bool(directories))
        elif kind == "host":
            run.copy_hosts(sources, ends, in_directory=bool(directories))
        elif STREAM in names:
            run.copy_stream(*names)
        else:
            run.copy_files(sources, ends, in_directory=bool(directories))
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


@contextmanager
def _targets(
    sources: Sequence[str], ends: Sequence[str], *, follow: bool, in_directory: bool, exact: bool
) -> Iterator[list[list[tuple[str, Entry]]]]:
    """Find the copies of the sources at each destination, by the rules of cp(1). Failure if they allow none.

    Destination directories stay open until the context ends. ``follow``: write through a symbolic link.
    """
    if not all(sources) or not all(ends):
        raise Failure("cp: an empty name is given where a file belongs", 2)
    with ExitStack() as opened:
        named = []
        for end in ends:
            try:
                found = find_targets(sources, end, follow=follow, directory=in_directory, exact=exact)
                named.append(opened.enter_context(found))
            except OSError as error:
                raise Failure(f"cp: {end}: {text_of(error)}") from None
        yield named


def _check_stream(names: list[str], directories: list[str], options: CpOptions) -> None:
    """Raise Failure for names and options that a pipe does not allow."""
    if len(names) != 2 or names == [STREAM, STREAM] or directories:
        raise Failure("cp: - is standard input or output, and takes one other name (a file of that name is ./-)", 2)
    unfit = ["recursive", "archive", "dereference", "preserve", "no_clobber", "verify"]
    unfit += ["include", "exclude", "update", "dry_run"]
    unfit += ["json"] if names[1] == STREAM else []
    for name in unfit:
        if getattr(options, name):
            raise Failure(f"cp: --{name.replace('_', '-')} cannot be used with a pipe", 2)
    if options.fastpath == "require":
        raise Failure("cp: --fastpath require cannot be used with a pipe, whose bytes pass through this process", 2)


def _check_several(directories: list[str]) -> None:
    """Raise Failure for directories that are one."""
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


class Run:
    """One run of the command, and what copies report to."""

    def __init__(self, copier: Copier, options: CpOptions) -> None:
        self._copier = copier
        self._options = options
        self._streaming = False  # this thread copies, and may wait for a pipe
        self._lines = sys.stderr if options.json else sys.stdout  # of --verbose: JSON is alone on standard output
        show_progress = sys.stderr.isatty() if options.progress is None else options.progress
        self._bar = ProgressLine() if show_progress else None
        self.cancel = Cancellation()
        self._loop = TreeCopy(copier, options.of_trees, self.cancel, self)
        self._totals = Totals()
        self.planned = self._totals.add
        self._current = ""  # for the progress line
        self._lock = threading.Lock()  # guards the next
        self._skipped = 0
        self._began = time.monotonic()
        self._seconds = 0.0
        self.signal: int | None = None
        self.results: list[CopyResult] = []
        self.errors: list[dict[str, Any]] = []
        self.output_error: OSError | None = None  # of standard output
        self._ending: OSError | None = None  # what ended the copy between machines

    def copy_files(self, sources: Sequence[str], ends: Sequence[str], *, in_directory: bool) -> None:
        """Copy files of this machine. Errors are printed and collected."""
        options, exact = self._options, self._options.exact
        with _targets(sources, ends, follow=not options.recursive, in_directory=in_directory, exact=exact) as named:
            self._run(partial(self._loop.find_files, named), many=options.recursive or len(sources) > 1)
        links = [] if self.cancel.cancelled else self._loop.state.links_without_files()
        if links:
            others = f" and {len(links) - 1} others" if len(links) > 1 else ""
            verb = "are links whose files were" if others else "is a link whose file was"
            self.warned(f"{links[0]}{others} {verb} not copied: -L copies files instead of links")

    def copy_urls(self, sources: Sequence[str], ends: Sequence[str], *, in_directory: bool) -> None:
        """Copy from or to URLs. Errors are printed and collected."""
        from gpufs.copying import store_copy  # other copies need none of it

        options, exact = self._options, self._options.exact
        with _misuse("--"):
            check_options(options.of_each_copy, "a URL")
        with _misuse():
            if STREAM in (*sources, *ends):
                text = "- is standard input or output, and the other name must be a file, not a URL"
                raise OSError(errno.EINVAL, text)
            urls, target = store_copy.plan(sources, ends)
        pattern = any(url.is_pattern for url in urls)
        if exact and pattern:
            raise Failure("cp: -T takes one SOURCE, and a pattern may name several ([*] stands for the character *)", 2)
        many = options.recursive or len(sources) > 1 or pattern
        if target is not None:
            into = not exact and (in_directory or target.is_directory or len(sources) > 1)
            self._run(partial(self._loop.find_uploads, sources, target, into=into), many=many)
            return
        names = [url.name for url in urls]
        with _targets(names, ends, follow=False, in_directory=in_directory or pattern, exact=exact) as named:
            bases = [[entry for _, entry in copies] for copies in named]
            self._run(partial(self._loop.find_urls, urls, bases), many=many)

    def copy_hosts(self, sources: Sequence[str], ends: Sequence[str], *, in_directory: bool) -> None:
        """Copy from or to another machine. Errors are printed and collected."""
        from gpufs.copying import host_copy

        options = self._options
        with _misuse("--"):
            check_options(options.of_each_copy, "HOST:PATH")
            if options.dry_run:
                raise OSError(errno.EINVAL, "dry-run cannot be used with HOST:PATH: the other machine decides")
        with _misuse():
            route = host_copy.Route(sources, ends, shell=options.shell or "", program=options.remote_gpufs or "")
        request = host_copy.new_request(options.of_each_copy, options.of_trees, in_directory=in_directory)
        try:
            # Before the progress line, which would overwrite a question of ssh.
            with route.connected(self.cancel, complain) as copy:
                between = partial(self._copy_between, partial(copy, self._copier.context, request, self))
                self._run(partial(self._loop.put, between), many=False)
                if self._ending is not None:
                    raise self._ending
        except OSError as error:
            if self.cancel.cancelled:
                text = "interrupted: nothing is left of the incomplete file"
                self.failed("", None, OSError(errno.ECANCELED, text))
            else:
                self.failed("", None, OSError(error.errno, f"{error.filename}: {text_of(error)}"))

    def _copy_between(self, copy: Callable[[], None]) -> None:
        try:
            copy()
        except OSError as error:
            self._ending = error
        except Exception as error:  # noqa: BLE001 - reported as of other threads
            self.failed("", None, OSError(errno.EIO, f"{type(error).__name__}: {error}"))

    def copy_stream(self, source: str, destination: str) -> None:
        """Copy standard input to a file, or a file to standard output, on this thread."""
        self._streaming = True
        if source == STREAM:
            copy = partial(self._copier.copy_from_stream, 0, Entry.of(destination))
        else:
            self._lines = sys.stderr
            copy = partial(self._copier.copy_to_stream, Entry.of(source), 1)
        with self._running():
            try:
                self.finished(source, [destination], [copy(progress=self.reporter(source), cancel=self.cancel)])
            except CopyError as error:
                self.finished(source, [destination], [error])
            except Exception as error:  # noqa: BLE001 - reported as of other copies
                self.failed(source, destination, OSError(errno.EIO, f"{type(error).__name__}: {error}"))

    def _run(self, find: Callable[[], None], *, many: bool) -> None:
        with self._running():
            try:
                self._loop.run(find, self._options.jobs if many else 1)
            except OSError as error:
                raise Failure(f"cp: {error.strerror}") from None

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
            self.tick()
        finally:
            if self._bar is not None:
                self._bar.end()
            self._seconds = time.monotonic() - self._began
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:  # the second signal ends the process at once
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = number
        self.cancel.cancel()
        if self._streaming:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))

    # ---- what copies report, from any thread ----

    def tick(self) -> None:
        """Draw the progress line."""
        if self._bar is not None:
            progress = self._totals.progress()
            self._bar.show(progress.moved, progress.total, self._current)

    def reporter(self, source: str) -> Callable[[CopyProgress], None] | None:
        """Return what takes the progress of a copy for the progress line."""
        if (bar := self._bar) is None:
            return None

        def report(progress: CopyProgress) -> None:
            self._current = source if progress.phase == "copy" else f"verifying {source}"
            self._totals.report(source, progress)
            if self._streaming:  # no other thread shows it
                bar.show(progress.moved, progress.total, self._current)

        return report

    def finished(self, source: str, destinations: Sequence[str], outcomes: Sequence[Outcome]) -> None:
        """Take what became of the copies of a file."""
        for destination, outcome in zip(destinations, outcomes, strict=True):
            if isinstance(outcome, CopyError):
                self._failed(source, destination, outcome)
            else:
                self._copied(outcome)
        self._current = source
        self._totals.end(source, outcomes)

    def failed(self, source: str, destination: str | None, error: OSError) -> None:
        """Print and collect a failure other than that of a copy."""
        self._report(source, destination, error.errno or errno.EIO, text_of(error))

    def skipped(self) -> None:
        """Count a file that exists already, with --no-clobber."""
        with self._lock:
            self._skipped += 1

    def warned(self, text: str) -> None:
        """Print a warning."""
        self._print(f"gpufs cp: warning: {text}", sys.stderr)

    # ---- the same, of a copy between machines ----

    def moved(self, source: str, count: int) -> None:
        """``count`` bytes of a source have been copied."""
        self._current = source
        self._totals.report(source, CopyProgress(count, 0, {}))

    def noticed(self, text: str) -> None:
        """Print a line."""
        self._print(f"gpufs cp: {text}", sys.stderr)

    def file_ended(self, source: str, outcome: Outcome | None, hop: int = 0) -> None:
        """Take what became of a file on a machine. None if it was skipped."""
        if hop == 0:  # the others are not counted
            self._totals.end(source, [outcome] if isinstance(outcome, CopyResult) else [])
        if outcome is None:
            self.skipped()
        elif isinstance(outcome, CopyResult):
            self._copied(outcome)
        else:
            self._failed(str(outcome.filename), outcome.filename2, outcome)

    def host_lost(self, hop: int, error: CopyError) -> None:
        """Take the failure of a machine of a chain."""
        if not self.cancel.cancelled:
            self._failed(str(error.filename), None, error)

    # ---- what is printed ----

    def _copied(self, result: CopyResult) -> None:
        self.results.append(result)
        if self._options.dry_run:
            self._print(f"{result.source} -> {result.destination}: {bytes_text(result.bytes)}", self._lines)
        elif self._options.verbose:
            served = ", ".join(f"{path} {bytes_text(count)}" for path, count in result.paths.items()) or "empty"
            rate = rate_text(result.bytes / max(result.seconds, 1e-9))
            text = f"{result.source} -> {result.destination}: {bytes_text(result.bytes)}, {rate} ({served})"
            self._print(text, self._lines)

    def _failed(self, source: str, destination: str | None, error: CopyError) -> None:
        if error.errno == errno.EPIPE and destination == STREAM:
            self._report(source, destination, errno.EPIPE, "", error)  # as other programs, silently
        elif error.errno == errno.ECANCELED and self.cancel.cancelled:
            text = f"interrupted: {error.left or 'nothing is left of the copy (--partial keeps it)'}"
            self._report(source, destination, errno.ECANCELED, text, error)
        else:
            self._report(source, destination, error.errno or errno.EIO, str(error), error, names_files=True)

    def _report(
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
            "skipped": self._skipped,
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
