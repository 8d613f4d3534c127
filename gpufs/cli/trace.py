"""gpufs trace: records what a mount does, for Perfetto or Chrome's tracing."""

import contextlib
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from errno import EACCES, EBUSY, ECONNABORTED, ENOENT, ENOTCONN, EPERM
from typing import IO, Any, Final

import click

from gpufs._version import __version__
from gpufs.cli import _mounts
from gpufs.cli._errors import Failure
from gpufs.cli._knobs import complete_mounts
from gpufs.cli._main import check_seconds, complete_files
from gpufs.cli._trace_format import Converter

_FILE: Final = ".gpufs/trace"
_READ_BYTES: Final = 1 << 20
_PAUSE: Final = 0.02  # seconds between two reads: threads keep more records than they make in this time
_LAST_READS: Final = 1024  # at the end, from a mount that goes on working


@click.command(name="trace", short_help="Record what a mount does, for Perfetto.")
@click.argument("mountpoint", shell_complete=complete_mounts)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    shell_complete=complete_files,
    help="File to write the trace to; - is standard output.",
)
@click.option(
    "--duration",
    type=click.FloatRange(0.0, 86400.0, min_open=True),
    callback=check_seconds,
    metavar="S",
    help="End after S seconds.  [default: when interrupted]",
)
def command(mountpoint: str, output: str, duration: float | None, **_: Any) -> None:
    """Record what the threads of the mount at MOUNTPOINT do, and when.

    The reads and writes that it answers, and the life of each copy: queued, bound, file reads and writes, device
    copies, its end. FILE is JSON, which opens in https://ui.perfetto.dev and in chrome://tracing. Ctrl-C (or SIGTERM)
    ends the recording; the file is written all the same. For the mount's owner, one recording at a time.

    MOUNTPOINT may also be a file into which a program has written what it read from gpufs.engine.Trace.
    """
    if not output:
        raise Failure("an empty name is given where a file belongs", 2)
    if os.path.isfile(mountpoint):
        with open(mountpoint, "rb") as recorded, _opened(output) as sink:
            _convert(recorded, sink, {"version": __version__})
        return
    entry = _mounts.find(mountpoint)
    interrupted = threading.Event()
    # Also where whoever started it had SIGINT ignored, as shells do for what runs in the background.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    try:
        source = os.open(os.path.join(entry.mountpoint, _FILE), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(entry.mountpoint, error) from None
    try:
        # Converting to JSON takes longer than recording, so it is done afterwards.
        with _opened(output) as sink, tempfile.TemporaryFile(buffering=0) as records:
            ended = _record(source, records, duration, interrupted)
            records.seek(0)
            _convert(records, sink, {"version": __version__, "mountpoint": entry.mountpoint})
    finally:
        with contextlib.suppress(OSError):  # the mount may have ended, which reading has found out
            os.close(source)
    if ended is not None:
        raise Failure(f"{entry.mountpoint}: {ended.strerror}: the trace ends there")


@contextlib.contextmanager
def _opened(output: str) -> Iterator[IO[str]]:
    """The output file. Failure, which names it, if it cannot be written."""
    if output == "-":
        yield sys.stdout
        return
    try:
        with open(output, "w", encoding="ascii") as file:
            yield file
    except OSError as error:
        raise Failure(f"{output}: {error.strerror}") from None


def _convert(records: IO[bytes], sink: IO[str], facts: dict[str, str]) -> None:
    converter = Converter(sink, facts)
    while data := records.read(_READ_BYTES):
        converter.feed(data)
    converter.end()
    sink.flush()
    lost = f", {converter.lost} more were lost: the recording could not keep up" if converter.lost else ""
    print(f"{converter.spans} spans{lost}", file=sys.stderr)


def _refused(mountpoint: str, error: OSError) -> Failure:
    reasons = {
        EBUSY: "a trace is being recorded already",
        EACCES: "only its owner may record a trace",
        EPERM: "only its owner may record a trace",
        ENOENT: "the mount is of a version that cannot record traces",
        ENOTCONN: "its process is dead",
        ECONNABORTED: "its process is dead",
    }
    return Failure(f"{mountpoint}: {reasons.get(error.errno or 0, error.strerror)}")


def _record(source: int, records: IO[bytes], duration: float | None, interrupted: threading.Event) -> OSError | None:
    """Records until the time is over or the user interrupts; returns the error if the mount ended first."""
    end = math.inf if duration is None else time.monotonic() + duration
    last_reads = _LAST_READS
    while last_reads > 0:
        over = interrupted.is_set() or time.monotonic() >= end
        try:
            data = os.read(source, _READ_BYTES)
        except OSError as error:
            return error
        _keep(records, data)
        if over:
            last_reads = last_reads - 1 if data else 0
        elif not data:
            interrupted.wait(max(0.0, min(_PAUSE, end - time.monotonic())))
    return None


def _keep(records: IO[bytes], data: bytes) -> None:
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[records.write(rest) :]
    except OSError as error:
        raise Failure(f"{tempfile.gettempdir()}: {error.strerror}: records are kept there until the end") from None
