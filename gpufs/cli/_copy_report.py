"""Prints the report of a command that copies: the progress line, failures, JSON; handles signals that interrupt it."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from gpufs import mounting
from gpufs.cli._output import countdown_text, json_text, printable
from gpufs.client import Cancellation, CopyError, CopyProgress, CopyResult
from gpufs.copying.types import MOST_FAILURES, STREAM, CopyOptions, CountingReport, Outcome, check_memory
from gpufs.exceptions import text_of
from gpufs.syscalls import os_error
from gpufs.units import bytes_text, rate_text

# Of what --json lists. What is not listed any more is counted.
_MOST_LISTED: Final = 256 << 20
_ONE_SIGNAL_SECONDS: Final = 0.5  # a terminal or a service manager may send one to several processes


class ProgressLine:
    """A progress line on standard error. Lines are printed above it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def show(self, moved: int, total: int, name: str) -> None:
        """Draw the line again."""
        import shutil  # most copies draw nothing

        rate = moved / max(time.monotonic() - self._began, 1e-9)
        part = f"  {100 * moved // total}%" if total else ""
        left = f"  {countdown_text(max(total - moved, 0) / rate)} left" if moved else ""
        line = f"{bytes_text(moved)} of {bytes_text(total)}{part}  {rate_text(rate)}{left}  {printable(name)}"
        self._write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")

    def print(self, line: str, stream: Any) -> None:
        self._write("\r\x1b[K")
        with self._lock:
            print(line, file=stream, flush=True)

    def end(self) -> None:
        """Leave the line as it is and start the next one."""
        self._write("\n")

    def _write(self, text: str) -> None:
        with suppress(OSError):  # nobody watches
            with self._lock:
                print(text, end="", file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class CommandOptions(CopyOptions):
    """The options of a command that copies.

    ``command``: its name, for messages. ``progress`` None: on a terminal. ``quiet``: errors only.
    """

    jobs: int = 4
    verbose: bool = False
    json: bool = False
    progress: bool | None = None
    quiet: bool = False
    command: str


class CopyReport(CountingReport):
    """Collects the reports of one command's copies, from any thread."""

    def __init__(self, options: CommandOptions) -> None:
        super().__init__()
        self._options = options
        self.is_streaming = False  # this thread copies, and may wait for a pipe
        self.lines = sys.stderr if options.json else sys.stdout  # of --verbose: JSON is alone on standard output
        progress = sys.stderr.isatty() and not options.quiet if options.progress is None else options.progress
        self._bar = ProgressLine() if progress else None
        self.cancel = Cancellation()
        self._current = ""  # for the progress line
        # The lock guards these, too, and lines.
        self._skipped = 0
        self.failures = self._notices = 0
        self._bytes = 0
        self._paths: Counter[str] = Counter()
        self._methods: Counter[str] = Counter()
        self._refusals: set[str] = set()
        self._lists: dict[str, list[Any]] = {"copies": [], "deleted": [], "errors": []}  # for JSON alone
        self._listed = 0  # bytes of those, about
        self._began = time.monotonic()
        self._seconds = 0.0
        self.signal: int | None = None
        self._signalled = 0.0
        self.has_limit = False  # others decide how much memory it takes
        self.output_error: OSError | None = None  # of standard output

    def end(self) -> int:
        """Print the JSON, and return the exit code of the command."""
        if self.failures > MOST_FAILURES:
            self.noticed(f"{self.failures - MOST_FAILURES} more failures are not shown")
        if self._options.json:
            print(json_text(self.summary()))
            sys.stdout.flush()
        if self.signal is not None:
            # As with cp, the parent sees that a signal ended this process.
            signal.signal(self.signal, signal.SIG_DFL)
            os.kill(os.getpid(), self.signal)
        if self.output_error is not None:
            raise self.output_error
        return 1 if self.failures else 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Interrupt the copies on signals, and show the progress."""
        previous = {
            number: signal.signal(number, self._interrupt)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) != signal.SIG_IGN  # shells ignore SIGINT for background jobs, nohup SIGHUP
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
            if time.monotonic() - self._signalled < _ONE_SIGNAL_SECONDS:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal, self._signalled = number, time.monotonic()
        self.cancel.cancel()
        if self.is_streaming:
            raise os_error(errno.ECANCELED)

    # ---- what copies report, from any thread ----

    def tick(self) -> None:
        """Draw the progress line, and end copies for which a server makes this process too large."""
        try:
            if self.has_limit and not self.cancel.cancelled:
                check_memory()
        except OSError as error:
            self.failed("", None, error)
            self.cancel.cancel()
        if self._bar is not None:
            progress = self.progress()
            self._bar.show(progress.moved, progress.total, self._current)

    def reporter(self, source: str) -> Callable[[CopyProgress], None] | None:
        """Return what takes the progress of a copy for the progress line."""
        if (bar := self._bar) is None:
            return None

        def report(progress: CopyProgress) -> None:
            self._current = source if progress.phase == "copy" else f"verifying {source}"
            self.progressed(source, progress)
            if self.is_streaming:  # no other thread shows it
                bar.show(progress.moved, progress.total, self._current)

        return report

    def finished(self, source: str, destinations: Sequence[str], outcomes: Sequence[Outcome], hop: int = 0) -> None:
        """Take what became of the copies of a file."""
        for destination, outcome in zip(destinations, outcomes, strict=True):
            if isinstance(outcome, CopyError):
                self._failed(source, destination or None, outcome)
            else:
                self._copied(outcome)
        self._current = source
        if hop == 0:  # the progress shows the first machine
            self.count(source, outcomes)

    def failed(self, source: str, destination: str | None, error: OSError) -> None:
        """Print and collect a failure other than that of a copy."""
        self._report(source, destination, error.errno or errno.EIO, text_of(error))

    def skipped(self) -> None:
        with self._lock:
            self._skipped += 1

    def deleted(self, path: str) -> None:
        """Take what has been removed, or would be with --dry-run."""
        with self._lock:
            self._list("deleted", path)
        if self._options.dry_run or self._options.verbose:
            self._print(f"{'deletes' if self._options.dry_run else 'deleted'} {path}", self.lines)

    def noticed(self, text: str) -> None:
        with self._lock:
            self._notices += 1
        if not self._options.quiet and self._notices <= MOST_FAILURES:
            self._print(f"gpufs {self._options.command}: {text}", sys.stderr)

    def host_lost(self, hop: int, error: CopyError) -> None:
        if not self.cancel.cancelled:
            self._failed(str(error.filename), None, error)

    # ---- what is printed ----

    def _copied(self, result: CopyResult) -> None:
        with self._lock:
            self._bytes += result.bytes
            self._paths.update(result.paths)
            self._methods[result.method] += 1
            self._refusals.update(result.refusals)
            self._list("copies", result._asdict())
        if self._options.dry_run:
            self._print(f"{result.source} -> {result.destination}: {bytes_text(result.bytes)}", self.lines)
        elif self._options.verbose:
            served = ", ".join(f"{path} {bytes_text(count)}" for path, count in result.paths.items()) or "empty"
            rate = rate_text(result.bytes / max(result.seconds, 1e-9))
            text = f"{result.source} -> {result.destination}: {bytes_text(result.bytes)}, {rate} ({served})"
            self._print(text, self.lines)

    def _failed(self, source: str, destination: str | None, error: CopyError) -> None:
        if error.errno == errno.EPIPE and destination == STREAM:
            self._report(source, destination, errno.EPIPE, "", error)  # as other programs, silently
        elif error.errno == errno.ECANCELED and self.cancel.cancelled:
            hint = "" if self._options.partial else " (--partial keeps it)"
            text = f"interrupted: {error.left or f'nothing is left of the copy{hint}'}"
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
        listed = {
            "source": source,
            "destination": destination,
            "errno": number,
            "name": errno.errorcode.get(number, str(number)),
            "message": text,
            "bytes_done": error.bytes_done if error else 0,
            "device_code": error.device_code if error else 0,
        }
        with self._lock:
            self.failures += 1
            self._bytes += error.bytes_done if error else 0
            self._list("errors", listed)
        if not text or self.failures > MOST_FAILURES:
            return
        if number in (errno.EPERM, errno.EACCES) and mounting.is_root(os.path.dirname(destination or source)):
            text += " (README there lists the directories that take files)"
        where = "" if names_files else " -> ".join(name for name in (source, destination) if name)
        self._print(f"gpufs {self._options.command}: {f'{where}: ' if where else ''}{text}", sys.stderr)

    def _list(self, name: str, item: str | dict[str, Any]) -> None:
        """Keep what --json shows, up to a limit. Call it with the lock."""
        if self._options.json and self._listed < _MOST_LISTED:
            self._lists[name].append(item)
            self._listed += 500 + len(item if isinstance(item, str) else "".join(map(str, item.values())))

    def _print(self, line: str, stream: Any) -> None:
        try:
            if self._bar is not None:
                self._bar.print(printable(line), stream)
            else:
                with self._lock:  # print() writes the end of a line alone
                    print(printable(line), file=stream, flush=True)
        except OSError as error:
            if stream is sys.stdout:
                self.output_error = error  # reported after the copies

    def summary(self) -> dict[str, Any]:
        """Return the output of --json. Sizes are in bytes, times in seconds."""
        return {
            "files": self._methods.total(),
            "failures": self.failures,
            "skipped": self._skipped,
            "bytes": self._bytes,
            "seconds": self._seconds,
            "bytes_per_second": self._bytes / self._seconds if self._seconds else 0.0,
            "methods": self._methods,
            "paths": self._paths,
            "refusals": sorted(self._refusals),
            "interrupted": self.signal is not None,
            "truncated": self._listed >= _MOST_LISTED,
            **self._lists,
        }
