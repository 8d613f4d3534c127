"""What `gpufs cp` does: walks the sources, has threads copy the files, and reports."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from gpufs.cli._cp_walk import Item, Walk, targets
from gpufs.cli._errors import Failure, complain, printable
from gpufs.client import Cancellation, Copier, CopyError, CopyProgress, CopyResult
from gpufs.client._ends import Entry
from gpufs.client._outcome import size_text

if TYPE_CHECKING:
    from gpufs.cli._cp_progress import Bar

_QUEUED_FILES: Final = 64  # their directories are open
_REFRESH: Final = 0.1
# How long an interrupted copy may take to leave a consistent destination: more than a connection waits for a daemon.
_INTERRUPT_SECONDS: Final = 10.0


def copy(names: list[str], options: dict[str, Any]) -> int:
    """Runs the command with its options; returns the exit code. Failure when nothing can be done."""
    recursive = options["recursive"] or options["archive"]
    preserve = options["preserve"] or options["archive"]
    show = sys.stderr.isatty() if options["progress"] is None else options["progress"]
    chosen = {name: options[name] for name in ("fastpath", "fsync", "verify", "partial")}
    with Copier(**chosen, preserve=preserve, notice=_complain) as copier:
        run = _Run(copier, options, recursive=recursive, preserve=preserve, show=show)
        with targets(names[:-1], names[-1], follow=not recursive) as named:
            run.copy(named, 1 if len(named) == 1 and not recursive else options["jobs"])
    if options["json"]:
        from gpufs.cli._output import json_text

        print(json_text(run.summary()))
        sys.stdout.flush()
    if run.signal is not None:
        # As cp: a program that waits for this one sees that a signal ended it.
        signal.signal(run.signal, signal.SIG_DFL)
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
        self.lock = threading.Lock()
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


class _Run:
    """One run of the command: walks the sources, has files copied by threads, and keeps the books."""

    def __init__(self, copier: Copier, options: dict[str, Any], *, recursive: bool, preserve: bool, show: bool) -> None:
        self._copier = copier
        self._verbose: bool = options["verbose"]
        self._lines = sys.stderr if options["json"] else sys.stdout  # of --verbose: standard output is JSON alone
        self._show = show
        self._cancel = Cancellation()
        self._queue: SimpleQueue[Item | None] = SimpleQueue()
        self._tally = _Tally()
        self._bar: Bar | None = None
        self._walk = Walk(
            self._cancel,
            recursive=recursive,
            preserve=preserve,
            keep_existing=options["no_clobber"],
            found=self._found,
            warn=lambda text: self._print(f"gpufs cp: warning: {text}", sys.stderr),
            report=self._error,
        )
        self._began = time.monotonic()
        self._seconds = 0.0
        self.signal: int | None = None
        self.results: list[CopyResult] = []
        self.errors: list[dict[str, Any]] = []
        self.output_error: OSError | None = None  # of standard output

    def copy(self, named: list[tuple[str, Entry]], jobs: int) -> None:
        """Copies everything; errors are printed and kept."""
        previous = {
            number: signal.signal(number, self._interrupt)
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) != signal.SIG_IGN  # as shells have what runs in the background ignore SIGINT
        }
        try:
            if self._show:
                from gpufs.cli._cp_progress import Bar

                with Bar() as self._bar:
                    self._copy_all(named, jobs)
            else:
                self._copy_all(named, jobs)
        finally:
            self._seconds = time.monotonic() - self._began
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _copy_all(self, named: list[tuple[str, Entry]], jobs: int) -> None:
        workers: list[threading.Thread] = []
        for number in range(jobs):
            worker = threading.Thread(target=self._work, args=(number,), daemon=True)
            try:
                worker.start()
            except RuntimeError:
                if not workers:
                    raise Failure("cp: no thread can be started (ulimit -u)") from None
                break  # fewer will do
            workers.append(worker)
        for source, destination in named:
            self._walk.find(source, destination)
        for _ in workers:
            self._put(None)
        self._wait(workers)
        self._refresh()  # as it has become

    def _found(self, item: Item) -> None:
        with self._tally.lock:
            self._tally.total += item.size
        self._put(item)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:  # the second one: now
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = number
        self._cancel.cancel()

    def _wait(self, workers: list[threading.Thread]) -> None:
        deadline = float("inf")
        for worker in workers:
            while worker.is_alive():
                worker.join(_REFRESH)
                self._refresh()
                if self._cancel.cancelled:
                    deadline = min(deadline, time.monotonic() + _INTERRUPT_SECONDS)
                if time.monotonic() > deadline:
                    # They hang in a file system; they end with the process, as far as that can be.
                    self._error("", None, errno.ETIMEDOUT, "a copy does not end: its file system does not answer")
                    return

    def _put(self, item: Item | None) -> None:
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
        while (item := self._queue.get()) is not None:
            try:
                if not self._cancel.cancelled:
                    self._copy_one(number, item)
            finally:
                self._walk.release(item.folder)

    def _copy_one(self, number: int, item: Item) -> None:
        tally = self._tally
        name = os.path.basename(item.source.path)

        def report(progress: CopyProgress) -> None:
            with tally.lock:
                if progress.phase == "copy":
                    tally.moved[number], tally.paths[number] = progress.moved, progress.paths
                else:
                    tally.name = f"verifying {name}"

        with tally.lock:
            tally.name = name
        done, paths = 0, {}
        try:
            progress = report if self._show else None
            result = self._copier.copy_entry(item.source, item.destination, progress=progress, cancel=self._cancel)
            done, paths = result.bytes, result.paths
            self._copied(result)
        except CopyError as error:
            done = error.bytes_done
            self._failed(item.source.path, item.destination.path, error)
        except Exception as error:  # noqa: BLE001 - the other files are copied all the same
            text = f"{type(error).__name__}: {error}"
            self._error(item.source.path, item.destination.path, errno.EIO, text)
        with tally.lock:
            tally.moved.pop(number, None)
            tally.paths.pop(number, None)
            tally.done += done
            _add(tally.done_paths, paths)

    def _copied(self, result: CopyResult) -> None:
        self.results.append(result)
        if self._verbose:
            served = ", ".join(f"{path} {size_text(count)}" for path, count in result.paths.items()) or "empty"
            rate = f"{size_text(result.bytes / max(result.seconds, 1e-9))}/s"
            self._print(
                f"{result.source} -> {result.destination}: {size_text(result.bytes)}, {rate} ({served})", self._lines
            )

    def _failed(self, source: str, destination: str, error: CopyError) -> None:
        if error.errno == errno.ECANCELED and self._cancel.cancelled:
            text = f"interrupted: {error.left or 'nothing is left of the copy (--partial keeps it)'}"
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
