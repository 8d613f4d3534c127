"""gpufs trace: records what a mount does, for Perfetto or Chrome's tracing."""

import math
import os
import signal
import sys
import tempfile
import threading
import time
from errno import EACCES, EBUSY, ECONNABORTED, EIO, ENOENT, ENOTCONN, EPERM
from typing import IO, Any, Final, TextIO

import click

from gpufs._version import __version__
from gpufs.cli import _mounts
from gpufs.cli._errors import Failure, failed
from gpufs.cli._knobs import complete_mounts
from gpufs.cli._perfetto_format import PerfettoConverter
from gpufs.cli._trace_format import Converter

_FILE: Final = ".gpufs/trace"
_PERFETTO_SUFFIX: Final = ".pftrace"
_READ_BYTES: Final = 1 << 20
_PAUSE: Final = 0.02  # seconds between two looks: rings are large enough for what happens meanwhile
_LAST_LOOKS: Final = 1024  # at the end, of a mount that goes on working


def _a_number(ctx: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and math.isnan(value):  # which is in every range
        raise click.BadParameter("nan is not a number of seconds.", ctx, parameter)
    return value


@click.command(name="trace")
@click.argument("mountpoint", shell_complete=complete_mounts)
@click.option("-o", "--output", metavar="FILE", required=True, help="Where the trace goes; - is standard output.")
@click.option(
    "--format",
    "style",
    type=click.Choice(("json", "perfetto")),
    help="JSON, or Perfetto's own format.  [default: perfetto where FILE ends in .pftrace, else json]",
)
@click.option(
    "--duration",
    type=click.FloatRange(0.0, 86400.0, min_open=True),
    callback=_a_number,
    metavar="S",
    help="End after S seconds.  [default: when interrupted]",
)
def command(mountpoint: str, output: str, style: str | None, duration: float | None, **_: Any) -> None:
    """Record what the threads of the mount at MOUNTPOINT do, and when.

    The reads and writes that it answers, and the life of each copy: queued, bound, file reads and writes, device
    copies, its end. FILE opens in https://ui.perfetto.dev, JSON in chrome://tracing too. Ctrl-C (or SIGTERM) ends the
    recording; the file is written all the same. For the mount's owner, one recording at a time.

    MOUNTPOINT may also be a file into which a program has written what it read from gpufs.engine.Trace.
    """
    if not output:
        raise Failure("an empty name is given where a file belongs", 2)
    facts = {"version": __version__}
    native = style == "perfetto" or (style is None and output.endswith(_PERFETTO_SUFFIX))
    if os.path.isfile(mountpoint):
        with open(mountpoint, "rb") as recorded:
            _convert(recorded, _Output(output), facts, native=native)
        return
    entry = _mounts.find(mountpoint)
    facts["mountpoint"] = entry.mountpoint
    sink_of = _Output(output)
    interrupted = threading.Event()
    # Also where whoever started it had SIGINT ignored, as shells do for what runs in the background.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    try:
        source = os.open(os.path.join(entry.mountpoint, _FILE), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(entry.mountpoint, error) from None
    try:
        # Records are only put aside while they come: making JSON of them takes longer than making them.
        with tempfile.TemporaryFile(buffering=0) as records:
            broken = _record(source, records, duration, interrupted)
            records.seek(0)
            _convert(records, sink_of, facts, native=native)
    finally:
        try:
            os.close(source)
        except OSError:
            pass  # the mount has ended; what that means was found by reading
    if broken is not None:
        raise Failure(f"{entry.mountpoint}: {broken.strerror}: the trace ends there")


def _convert(records: IO[bytes], output: "_Output", facts: dict[str, str], *, native: bool) -> None:
    with output as sink:
        converter = PerfettoConverter(sink.buffer, facts) if native else Converter(sink, facts)
        converter.begin()
        while data := records.read(_READ_BYTES):
            converter.feed(data)
        converter.end()
    lost = f", {converter.lost} more were lost: the recording could not keep up" if converter.lost else ""
    print(f"{converter.spans} spans{lost}", file=sys.stderr)


def _refused(mountpoint: str, error: OSError) -> Failure:
    if error.errno == EBUSY:
        return Failure(f"{mountpoint}: somebody else is recording already")
    if error.errno in (EACCES, EPERM):
        return Failure(f"{mountpoint}: only its owner may record a trace")
    if error.errno == ENOENT:
        return Failure(f"{mountpoint}: the mount is of a version that cannot record traces")
    if error.errno in (ENOTCONN, ECONNABORTED):
        return Failure(f"{mountpoint}: its process is dead")
    return failed(error.errno or ENOENT, mountpoint)


def _record(source: int, records: IO[bytes], duration: float | None, interrupted: threading.Event) -> OSError | None:
    """Until the time is over or the user interrupts; the failure where the mount ended first."""
    try:
        end = None if duration is None else time.monotonic() + duration
        while not interrupted.is_set() and (end is None or time.monotonic() < end):
            data = os.read(source, _READ_BYTES)
            if data:
                _put_aside(records, data)
            else:
                interrupted.wait(_PAUSE if end is None else max(0.0, min(_PAUSE, end - time.monotonic())))
        for _ in range(_LAST_LOOKS):
            data = os.read(source, _READ_BYTES)
            if not data:
                break
            _put_aside(records, data)
    except OSError as error:
        return error
    return None


def _put_aside(records: IO[bytes], data: bytes) -> None:
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[records.write(rest) :]
    except OSError as error:
        raise Failure(f"{tempfile.gettempdir()}: {error.strerror}: records are kept there until the end") from None


class _Output:
    """The file, which gets its name when it is whole. Failure, which names it, where it cannot be written."""

    def __init__(self, name: str) -> None:
        self._name = name
        try:
            self._path = name if name == "-" else os.path.abspath(name)
        except FileNotFoundError:
            raise Failure(f"{name}: the current directory has been removed") from None
        self._temporary: str | None = None
        self._file: TextIO | None = None

    def __enter__(self) -> TextIO:
        if self._path == "-":
            return sys.stdout
        try:
            self._file = self._open()
        except OSError as error:
            raise self._failed(error) from None
        return self._file

    def _open(self) -> TextIO:
        if os.path.exists(self._path) and not os.path.isfile(self._path):
            # A pipe or a device is written as it is; a directory says what it is.
            return open(self._path, "w", encoding="utf-8", errors="surrogateescape")
        folder, name = os.path.split(self._path)
        fd, self._temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
        mask = os.umask(0)
        os.umask(mask)
        os.fchmod(fd, 0o666 & ~mask)
        return open(fd, "w", encoding="utf-8", errors="surrogateescape")

    def _failed(self, error: OSError) -> Failure:
        return failed(error.errno or EIO, self._name)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._file is None:
            if kind is None:
                sys.stdout.flush()  # before anybody is told that it is there
            return
        try:
            try:
                self._file.close()
                if self._temporary is not None and kind is None:
                    os.replace(self._temporary, self._path)
                    self._temporary = None
            finally:
                if self._temporary is not None:
                    os.unlink(self._temporary)
        except OSError as late:
            raise self._failed(late) from None
        if isinstance(error, OSError):
            raise self._failed(error) from None
