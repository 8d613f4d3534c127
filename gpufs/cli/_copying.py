"""What `gpufs cp` does.

Its start counts: 16 GiB move in a third of a second. So nothing here needs click, and modules that not every copy needs
are imported where they are used.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from _queue import SimpleQueue
from _thread import allocate_lock, start_new_thread

from gpufs.cli._errors import Failure, complain, printable
from gpufs.client import Cancellation, Copier, CopyError

# signal, threading and queue are on top of these, and take longer to import than the copy of a gigabyte takes.
TYPE_CHECKING = False
if not TYPE_CHECKING:
    import _signal
else:
    import signal as _signal
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType
    from typing import Any, Final

    from rich.progress import Progress

    from gpufs.client import CopyProgress, CopyResult

_QUEUED_FILES: Final = 1024
_REFRESH: Final = 0.1
# How long an interrupted copy may take to leave a consistent destination.
_INTERRUPT_SECONDS: Final = 4.0


class Option:
    """An option of the command; ``choices``: what its value may be, None where it is a flag."""

    def __init__(
        self, names: str, text: str, default: Any = False, choices: Sequence[str] | None = None, metavar: str = ""
    ) -> None:
        self.names = names.split()
        self.name = self.names[-1].removeprefix("--").replace("-", "_")
        self.text = text
        self.default = default
        self.choices = choices
        self.metavar = metavar


OPTIONS: Final = (
    Option("-r -R --recursive", "Copy directories with all that is in them."),
    Option("-p --preserve", "Keep mode, times and, where allowed, owner."),
    Option("-n --no-clobber", "Leave files alone that exist already."),
    Option("-T --no-target-directory", "DEST is the name of the copy, not a directory for it."),
    Option("-j --jobs", "Files copied at once, 1 to 16.", "4", tuple(map(str, range(1, 17))), "N"),
    Option("--verify", "Read both files again and compare them by SHA-256; with --fsync from the disk."),
    Option("--fsync", "Files of the host are on their disk before the end."),
    Option(
        "--fastpath",
        "Copies between file and device without the host's memory: auto is as the mount is configured.",
        "auto",
        ("auto", "off", "require"),
        "auto|off|require",
    ),
    Option("-v --verbose", "Print a line for each file copied."),
    Option("--json", "Print a JSON object that tells what was copied, and how."),
    Option("--progress", "Draw a progress bar, also where standard error is not a terminal."),
    Option("--no-progress", "Draw none."),
)


def parse(words: Sequence[str]) -> dict[str, Any] | None:
    """The options, and the names under "names"; None for what is not plainly right (then click tells the user)."""
    options = {name: option for option in OPTIONS for name in option.names}
    values: dict[str, Any] = {option.name: option.default for option in OPTIONS}
    names: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            names += rest
            break
        if not word.startswith("-") or word == "-":
            names.append(word)
            continue
        if word.startswith("--"):
            name, equals, value = word.partition("=")
        else:
            name, equals, value = word[:2], "", word[2:]
        option = options.get(name)
        if option is None:
            return None
        if option.choices is None:
            if equals:
                return None
            values[option.name] = True
            if value:  # -rp is -r -p
                rest.insert(0, "-" + value)
            continue
        if not equals and not value:
            if not rest:
                return None
            value = rest.pop(0)
        if value not in option.choices:
            return None
        values[option.name] = value
    if len(names) < 2:
        return None
    return values | {"names": names}


def copy(options: dict[str, Any]) -> int:
    """Runs the command with what parse() gave; returns the exit code. Failure when nothing can be done."""
    *sources, destination = options["names"]
    show = not options["no_progress"] and (options["progress"] or sys.stderr.isatty())
    chosen = {name: options[name] for name in ("fastpath", "fsync", "verify", "preserve")}
    with Copier(**chosen, notice=_complain) as copier:
        run = _Run(copier, options, show=show)
        targets = list(_targets(sources, destination, no_target_directory=options["no_target_directory"]))
        run.copy(targets, int(options["jobs"]))
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


def _targets(sources: Sequence[str], destination: str, *, no_target_directory: bool) -> Iterator[tuple[str, str]]:
    """The name that each source gets, by the rules of cp(1). Failure where they allow none."""
    try:
        is_directory = stat.S_ISDIR(os.stat(destination).st_mode)
    except FileNotFoundError:
        is_directory = False
    except OSError as error:
        raise Failure(f"cp: {destination}: {_text(error)}") from None
    if no_target_directory:
        if len(sources) > 1:
            raise Failure(f"cp: --no-target-directory: more than one source: {sources[1]}", 2)
        yield sources[0], destination
        return
    if len(sources) > 1 and not is_directory:
        raise Failure(f"cp: {destination}: is not a directory, and there are {len(sources)} sources for it")
    for source in sources:
        name = os.path.basename(source.rstrip("/")) or "."
        yield source, os.path.join(destination, "." if name == ".." else name) if is_directory else destination


def _text(error: OSError) -> str:
    if error.errno == errno.ENOTCONN:
        return "the daemon of the gpufs mount has died (gpufs umount cleans up)"
    return error.strerror or str(error)


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
    """One run of the command: walks the sources, has files copied by threads, and keeps the books."""

    def __init__(self, copier: Copier, options: dict[str, Any], *, show: bool) -> None:
        self._copier = copier
        self._recursive: bool = options["recursive"]
        self._preserve: bool = options["preserve"]
        self._no_clobber: bool = options["no_clobber"]
        self._verbose: bool = options["verbose"]
        self._show = show
        self._cancel = Cancellation()
        self._queue: SimpleQueue[tuple[str, str] | None] = SimpleQueue()
        self._tally = _Tally()
        self._made: set[str] = set()  # destinations of this run
        self._directories: list[tuple[str, os.stat_result, bool]] = []  # made by us, with what they were made from
        self._bar: _Bar | None = None
        self._began = time.monotonic()
        self._seconds = 0.0
        self.signal: int | None = None
        self.results: list[CopyResult] = []
        self.errors: list[dict[str, Any]] = []
        self.output_error: OSError | None = None  # of standard output

    def copy(self, targets: list[tuple[str, str]], jobs: int) -> None:
        """Copies everything; errors are printed and kept."""
        previous = {number: _signal.signal(number, self._interrupt) for number in (_signal.SIGINT, _signal.SIGTERM)}
        if len(targets) == 1 and not self._recursive:
            jobs = 1
        workers = [_Worker(lambda number=number: self._work(number)) for number in range(jobs)]  # type: ignore[misc]
        try:
            with _Bar() if self._show else _NoBar() as self._bar:
                for worker in workers:
                    worker.start()
                for source, destination in targets:
                    self._find(source, destination)
                for _ in workers:
                    self._put(None)
                self._wait(workers)
            if not self._cancel.cancelled:
                self._finish_directories()
        finally:
            self._seconds = time.monotonic() - self._began
            for number, handler in previous.items():
                _signal.signal(number, handler)

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
        while self._queue.qsize() >= _QUEUED_FILES:
            time.sleep(_REFRESH)
            self._refresh()
        self._queue.put(item)

    def _refresh(self) -> None:
        if self._bar is not None:
            self._bar.show(*self._tally.now())

    # ---- what there is to copy ----

    def _find(self, source: str, destination: str) -> None:
        if self._cancel.cancelled:
            return
        try:
            status = os.lstat(source) if self._recursive else os.stat(source)
        except OSError as error:
            self._error(source, None, error.errno or errno.EIO, _text(error))
            return
        if stat.S_ISDIR(status.st_mode):
            if not self._recursive:
                self._error(source, None, errno.EISDIR, "is a directory (-r copies it)")
            elif not self._on_a_mount(status.st_dev, destination):
                text = "neither of them is on a gpufs mount: use cp"
                self._error(source, destination, errno.EXDEV, text)
            else:
                self._find_in_directory(source, destination, status)
        else:
            self._find_file(source, destination, status)

    def _on_a_mount(self, device: int, destination: str) -> bool:
        if self._copier.mount_of(device) is not None:
            return True
        for path in (destination, os.path.dirname(destination.rstrip("/")) or "."):
            try:
                return self._copier.mount_of(os.stat(path).st_dev) is not None
            except OSError:
                continue
        return True  # making it will tell what is wrong

    def _find_file(self, source: str, destination: str, status: os.stat_result) -> None:
        name = os.path.normpath(destination)
        if name in self._made:
            self._error(source, destination, errno.EEXIST, "another source of this command has been copied there")
            return
        if self._no_clobber and os.path.lexists(destination):
            return
        self._made.add(name)
        if stat.S_ISLNK(status.st_mode):
            self._copy_link(source, destination)
            return
        if stat.S_ISREG(status.st_mode):
            with self._tally.lock:
                self._tally.total += status.st_size
        self._put((source, destination))

    def _find_in_directory(self, source: str, destination: str, status: os.stat_result) -> None:
        """Makes the directory and looks at everything in it."""
        inside = os.path.realpath(destination) + "/"
        if inside.startswith(os.path.realpath(source).rstrip("/") + "/"):
            self._error(source, destination, errno.EINVAL, "a directory cannot be copied into itself")
            return
        pending = [(source, destination, status)]
        while pending:
            source, destination, status = pending.pop()
            try:
                self._make_directory(destination, status)
                entries = sorted(os.listdir(source))
            except OSError as error:
                self._error(str(error.filename or source), None, error.errno or errno.EIO, _text(error))
                continue
            for name in entries:
                if self._cancel.cancelled:
                    return
                path, target = os.path.join(source, name), os.path.join(destination, name)
                try:
                    found = os.lstat(path)
                except OSError as error:
                    self._error(path, None, error.errno or errno.EIO, _text(error))
                    continue
                if stat.S_ISDIR(found.st_mode):
                    pending.append((path, target, found))
                else:
                    self._find_file(path, target, found)

    def _make_directory(self, path: str, status: os.stat_result) -> None:
        mode = stat.S_IMODE(status.st_mode)
        try:
            # The copy must be able to write there, whatever the mode will be in the end.
            os.mkdir(path, mode & 0o777 | stat.S_IRWXU)
        except FileExistsError:
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, "a file cannot be overwritten with a directory", path) from None
            if self._preserve:
                self._directories.append((path, status, False))
            return
        self._directories.append((path, status, True))

    def _finish_directories(self) -> None:
        """Modes and times, once nothing more is written into them."""
        for path, status, new in reversed(self._directories):
            mode = stat.S_IMODE(status.st_mode)
            try:
                if self._preserve:
                    try:
                        os.chown(path, status.st_uid, status.st_gid)
                    except PermissionError:
                        mode &= 0o777
                    os.chmod(path, mode)
                    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
                elif new and mode & stat.S_IRWXU != stat.S_IRWXU:
                    os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & (mode | ~stat.S_IRWXU))
            except OSError as error:
                self._error(path, None, error.errno or errno.EIO, _text(error))

    def _copy_link(self, source: str, destination: str) -> None:
        try:
            target = os.readlink(source)
            try:
                os.symlink(target, destination)
            except FileExistsError:
                os.unlink(destination)
                os.symlink(target, destination)
            if self._preserve:
                status = os.lstat(source)
                os.utime(destination, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)
        except OSError as error:
            self._error(source, destination, error.errno or errno.EIO, _text(error))

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
            if self._cancel.cancelled:
                continue
            name = os.path.basename(source)
            with tally.lock:
                tally.name = name
            done, paths = 0, {}
            try:
                result = self._copier.copy_file(
                    source, destination, progress=tell if self._show else None, cancel=self._cancel
                )
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
                f"{result.source} -> {result.destination}: {bytes_text(result.bytes)}, {rate} ({served})", sys.stdout
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


class _Bar:
    """A progress bar on standard error, drawn by the main thread alone."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._lock = allocate_lock()  # guards the terminal

    def __enter__(self) -> _Bar:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        self._progress = Progress(
            TextColumn("{task.fields[name]}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            Speed(),
            TextColumn("{task.fields[paths]}", markup=False),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=False,
        )
        self._task = self._progress.add_task("", total=None, name="", paths="")
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            with self._lock:
                self._progress.stop()
                self._progress = None

    def show(self, moved: int, total: int, paths: dict[str, int], name: str) -> None:
        """Draws it."""
        if self._progress is None:
            return
        served = sum(paths.values())
        text = " ".join(f"{path} {100 * count // served}%" for path, count in paths.items()) if served else ""
        shown = name if len(name) <= 32 else name[:29] + "..."
        with self._lock:
            self._progress.update(
                self._task, completed=moved, total=max(total, moved) or None, name=shown, paths=text, refresh=True
            )

    def print(self, line: str, stream: Any) -> None:
        """A line above the bar."""
        if self._progress is None or not stream.isatty():
            print(line, file=stream, flush=True)
            return
        with self._lock:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)


class _NoBar(_Bar):
    def __enter__(self) -> _NoBar:
        return self
