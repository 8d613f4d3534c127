"""What `gpufs cp` does.

Its start counts: 16 GiB move in a third of a second. So nothing here needs click, and modules that not every copy needs
are imported where they are used.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from _queue import SimpleQueue
from _thread import allocate_lock, start_new_thread

from gpufs.cli._cp_options import OPTIONS
from gpufs.cli._cp_walk import Walk, targets
from gpufs.cli._errors import Failure, complain, printable
from gpufs.client import Cancellation, Copier, CopyError
from gpufs.client._handed import take

# signal, threading and queue are on top of these, and take longer to import than the copy of a gigabyte takes.
TYPE_CHECKING = False
if not TYPE_CHECKING:
    import _signal
else:
    import signal as _signal
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, Final

    from gpufs.cli._cp_progress import Bar
    from gpufs.client import CopyProgress, CopyResult
    from gpufs.client._handed import Handed

_QUEUED_FILES: Final = 1024
_REFRESH: Final = 0.1
# How long an interrupted copy may take to leave a consistent destination: more than a connection waits for a daemon.
_INTERRUPT_SECONDS: Final = 10.0


def copy(options: dict[str, Any]) -> int:
    """Runs the command with its options, and "names"; returns the exit code. Failure when nothing can be done."""
    handed = take()
    if options["archive"]:
        options = {**options, "recursive": True, "preserve": True}
    for option in OPTIONS:
        if option.refused and options[option.name]:
            raise Failure(f"cp: {option.names[0]} {option.refused}", 2)
    sources, destination = options["names"], options["target_directory"]
    if destination is None:
        *sources, destination = sources
    # A question would be lost in a bar.
    show = not options["no_progress"] and options["existing"] != "ask" and (options["progress"] or sys.stderr.isatty())
    chosen = {name: options[name] for name in ("fastpath", "fsync", "verify", "preserve", "force")}
    chosen["remove_destination"] = options["remove_destination"]
    with Copier(**chosen, notice=_complain) as copier:
        run = _Run(copier, options, handed, show=show)
        rules = {name: bool(options[name]) for name in ("no_target_directory", "target_directory")}
        named = [(sources[0], handed.destination)] if handed else list(targets(sources, destination, **rules))
        run.copy(named, int(options["jobs"]))
    if options["json"]:
        from gpufs.cli._output import json_text

        print(json_text(run.summary()))
        sys.stdout.flush()
    if run.signal is not None:
        # As cp: whoever waits for us sees that a signal ended us.
        _signal.signal(run.signal, _signal.SIG_DFL)
        os.kill(os.getpid(), run.signal)
    if run.output_error is not None:
        raise run.output_error
    return 1 if run.errors else 0


def _complain(text: str) -> None:
    complain(f"cp: {text}")


def _add(counts: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count


class _Tally:
    """What all threads have done. The lock guards everything in it."""

    def __init__(self) -> None:
        self.lock = allocate_lock()
        self.total = 0  # bytes of the files found so far
        self.moved: dict[int, int] = {}  # bytes of the files under way, by thread
        self.paths: dict[int, dict[str, int]] = {}  # of these, by thread
        self.done = 0  # bytes of the files that have ended
        self.done_paths: dict[str, int] = {}
        self.name = ""

    def now(self) -> tuple[int, int, dict[str, int], str]:
        """Bytes moved and found, bytes by path, and what is going on."""
        with self.lock:
            paths = dict(self.done_paths)
            for part in self.paths.values():
                _add(paths, part)
            return self.done + sum(self.moved.values()), self.total, paths, self.name


class _Worker:
    """A thread that ends with the process at the latest."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._busy = allocate_lock()  # held by the thread

    def start(self) -> None:
        self._busy.acquire()
        start_new_thread(self._run, ())

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._busy.release()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, at the latest after so long."""
        if not self._busy.acquire(timeout=seconds):
            return False
        self._busy.release()
        return True


class _Run:
    """One run of the command: walks the sources, has files copied by threads, and keeps the books.

    ``handed``: the only copy of the run, if it is under way already.
    """

    def __init__(self, copier: Copier, options: dict[str, Any], handed: Handed | None, *, show: bool) -> None:
        self._copier = copier
        self._handed = handed
        self._recursive: bool = options["recursive"]
        self._verbose: bool = options["verbose"]
        self._lines = sys.stderr if options["json"] else sys.stdout  # of --verbose: JSON stands alone
        self._show = show
        self._cancel = Cancellation()
        self._queue: SimpleQueue[tuple[str, str] | None] = SimpleQueue()
        self._tally = _Tally()
        self._bar: Bar | None = None
        self._walk = Walk(
            copier,
            self._cancel,
            options,
            found=self._found,
            ask=self._ask,
            warn=lambda text: self._print(f"gpufs cp: warning: {text}", sys.stderr),
            report=self._error,
        )
        self._began = time.monotonic()
        self._seconds = 0.0
        self.signal: int | None = None
        self.results: list[CopyResult] = []
        self.errors: list[dict[str, Any]] = []
        self.output_error: OSError | None = None  # of standard output

    def copy(self, named: list[tuple[str, str]], jobs: int) -> None:
        """Copies everything; errors are printed and kept."""
        previous = {
            number: _signal.signal(number, self._interrupt)
            for number in (_signal.SIGINT, _signal.SIGTERM)
            if _signal.getsignal(number) != _signal.SIG_IGN  # as shells have what runs in the background ignore SIGINT
        }
        if self._handed is not None:
            _signal.pthread_sigmask(_signal.SIG_UNBLOCK, self._handed.signals)
        if len(named) == 1 and not self._recursive:
            jobs = 1
        workers = [_Worker(lambda number=number: self._work(number)) for number in range(jobs)]  # type: ignore[misc]
        try:
            if self._show:
                from gpufs.cli._cp_progress import Bar

                with Bar() as self._bar:
                    self._copy_all(named, workers)
            else:
                self._copy_all(named, workers)
        finally:
            self._seconds = time.monotonic() - self._began
            for number, handler in previous.items():
                _signal.signal(number, handler)

    def _copy_all(self, named: list[tuple[str, str]], workers: list[_Worker]) -> None:
        started: list[_Worker] = []
        for worker in workers:
            try:
                worker.start()
            except RuntimeError:
                if not started:
                    raise Failure("cp: no thread can be started (ulimit -u)") from None
                break  # fewer will do
            started.append(worker)
        workers = started
        for source, destination in named:
            if self._handed is None:
                self._walk.find(source, destination)
            else:
                self._found(source, destination, self._handed.size)
        for _ in workers:
            self._put(None)
        self._wait(workers)
        self._refresh()  # as it has become
        if not self._cancel.cancelled:
            self._walk.finish()

    def _found(self, source: str, destination: str, size: int) -> None:
        with self._tally.lock:
            self._tally.total += size
        self._put((source, destination))

    def _ask(self, destination: str) -> bool:
        """Asks on standard error, and reads a line of standard input. Who cannot or does not answer means no."""
        import select

        print(f"gpufs cp: overwrite {printable(destination)}? ", end="", file=sys.stderr, flush=True)
        answer = b""
        try:
            poll = select.poll()
            poll.register(0, select.POLLIN)
            while not self._cancel.cancelled:
                # Not all at once: what follows answers the next question. And a signal must end the waiting.
                if not poll.poll(_REFRESH * 1000):
                    continue
                letter = os.read(0, 1)
                if letter in (b"", b"\n"):
                    break
                answer += letter
        except OSError:
            return False
        return not self._cancel.cancelled and answer[:1] in (b"y", b"Y")

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:  # the second one: now
            _signal.signal(number, _signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = number
        self._cancel.cancel()

    def _wait(self, workers: list[_Worker]) -> None:
        deadline = float("inf")
        while not all(worker.wait(_REFRESH) for worker in workers):
            self._refresh()
            if self._cancel.cancelled:
                deadline = min(deadline, time.monotonic() + _INTERRUPT_SECONDS)
                if time.monotonic() > deadline:
                    # They hang in a file system; they end with the process, as far as that can be.
                    self._error("", None, errno.ETIMEDOUT, "a copy does not end: its file system does not answer")
                    return

    def _put(self, item: tuple[str, str] | None) -> None:
        # Once it is cancelled nobody may take anything from there any more, for all hang.
        while self._queue.qsize() >= _QUEUED_FILES and not self._cancel.cancelled:
            time.sleep(_REFRESH)
            self._refresh()
        self._queue.put(item)

    def _refresh(self) -> None:
        if self._bar is not None:
            self._bar.show(*self._tally.now())

    # ---- threads ----

    def _work(self, number: int) -> None:
        tally = self._tally

        def tell(progress: CopyProgress) -> None:
            if progress.phase == "copy":
                with tally.lock:
                    tally.moved[number], tally.paths[number] = progress.moved, progress.paths
            else:
                with tally.lock:
                    tally.name = f"verifying {name}"

        while (item := self._queue.get()) is not None:
            source, destination = item
            if self._cancel.cancelled and self._handed is None:
                continue
            name = os.path.basename(source)
            with tally.lock:
                tally.name = name
            done, paths = 0, {}
            try:
                progress = tell if self._show else None
                if self._handed is None:
                    result = self._copier.copy_file(source, destination, progress=progress, cancel=self._cancel)
                else:
                    result = self._copier.take_over(self._handed, source, progress=progress, cancel=self._cancel)
                done, paths = result.bytes, result.paths
                self._copied(result)
            except CopyError as error:
                done = error.bytes_done
                self._failed(source, destination, error)
            except Exception as error:  # noqa: BLE001 - the other files are copied all the same
                self._error(source, destination, errno.EIO, f"{type(error).__name__}: {error}")
            with tally.lock:
                tally.moved.pop(number, None)
                tally.paths.pop(number, None)
                tally.done += done
                _add(tally.done_paths, paths)

    def _copied(self, result: CopyResult) -> None:
        self.results.append(result)
        if self._verbose:
            from gpufs.cli._output import bytes_text

            served = ", ".join(f"{path} {bytes_text(count)}" for path, count in result.paths.items()) or "empty"
            rate = f"{bytes_text(int(result.bytes / max(result.seconds, 1e-9)))}/s"
            self._print(
                f"{result.source} -> {result.destination}: {bytes_text(result.bytes)}, {rate} ({served})", self._lines
            )

    def _failed(self, source: str, destination: str, error: CopyError) -> None:
        if error.errno == errno.ECANCELED and self._cancel.cancelled:
            of = f" of {error.bytes_total}" if error.bytes_total else ""
            text = f"interrupted: the copy has {error.bytes_done}{of} bytes"
            self._error(source, destination, errno.ECANCELED, text, error)
            return
        self._error(source, destination, error.errno or errno.EIO, str(error), error, whole=True)

    def _error(
        self,
        source: str,
        destination: str | None,
        number: int,
        text: str,
        error: CopyError | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """Prints one line and keeps it; ``whole``: the text names the files itself."""
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
        where = " -> ".join(name for name in (source, destination) if name)
        self._print(f"gpufs cp: {text}" if whole or not where else f"gpufs cp: {where}: {text}", sys.stderr)

    def _print(self, line: str, stream: Any) -> None:
        line = printable(line)
        try:
            if self._bar is not None:
                self._bar.print(line, stream)
            else:
                print(line, file=stream, flush=True)
        except OSError as error:
            if stream is sys.stdout:
                self.output_error = error  # the copies are worth having without it

    def summary(self) -> dict[str, Any]:
        """What --json prints. Sizes in bytes, times in seconds."""
        total = sum(result.bytes for result in self.results) + sum(error["bytes_done"] for error in self.errors)
        methods: dict[str, int] = {}
        paths: dict[str, int] = {}
        refusals: set[str] = set()
        for result in self.results:
            _add(methods, {result.method: 1})
            _add(paths, result.paths)
            refusals.update(result.refusals)
        return {
            "files": len(self.results),
            "skipped": self._walk.skipped,
            "bytes": total,
            "seconds": self._seconds,
            "bytes_per_second": total / self._seconds if self._seconds else 0.0,
            "methods": methods,
            "paths": paths,
            "refusals": sorted(refusals),
            "interrupted": self.signal is not None,
            "copies": [
                {
                    "source": result.source,
                    "destination": result.destination,
                    "bytes": result.bytes,
                    "seconds": result.seconds,
                    "method": result.method,
                    "paths": result.paths,
                    "refusals": list(result.refusals),
                    "sha256": result.sha256,
                }
                for result in self.results
            ],
            "errors": self.errors,
        }
