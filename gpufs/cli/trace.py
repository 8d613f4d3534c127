"""gpufs trace: records what a mount does, for Perfetto or Chrome's tracing."""

import contextlib
import json
import math
import os
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from errno import EACCES, EBUSY, ENOENT, EPERM
from typing import IO, Any, Final

import click

from gpufs._version import __version__
from gpufs.cli import _mounts
from gpufs.cli._main import complete_files
from gpufs.cli._options import complete_mounts, time_option
from gpufs.cli._output import Failure
from gpufs.exceptions import DEAD

_FILE: Final = ".gpufs/trace"
_READ_BYTES: Final = 1 << 20
_PAUSE: Final = 0.02  # seconds between two reads: threads keep more records than they make in this time
_LAST_READS: Final = 1024  # at the end, from a mount that goes on working

# ---- trace records, docs/internals/trace-records.md ----

_RECORD: Final = struct.Struct("=QQQQQIIBBBBiiI")
_THREAD, _NAME, _LOST = 1, 2, 3
# kind: (name, category)
_SPANS: Final = {
    10: ("READ", "mount"),
    11: ("WRITE", "mount"),
    12: ("copy in device memory", "device copy"),
    13: ("piece", "piece"),
    14: ("file read", "file"),
    15: ("file write", "file"),
    16: ("fastpath", "fastpath"),
    17: ("wait for the device", "wait"),
    18: ("wait for pinned memory", "wait"),
    19: ("reply", "mount"),
    30: ("copy to device", "device copy"),
    31: ("copy to host", "device copy"),
    40: ("transfer", "transfer"),
    41: ("queued", "transfer"),
    42: ("bind", "transfer"),
    43: ("operation", "operation"),
    44: ("wait for the stream", "operation"),
    45: ("move", "operation"),
}
_READ, _WRITE, _OPERATION, _STREAM_WAIT, _MOVE = 10, 11, 43, 44, 45
_PHASES: Final = frozenset({"transfer", "operation"})  # categories
_DIRECTIONS: Final = ("in", "out")
_PROCESS: Final = 1  # the number of process "gpufs" in the file; gpu0 is the next
_LANES: Final = 256


@click.command(name="trace")
@click.argument("mountpoint", shell_complete=complete_mounts)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    shell_complete=complete_files,
    help="File to write the trace to; - is standard output.",
)
@time_option("--duration", 0.001, 86400, "End after this time, such as 5 or 500ms.  [default: when interrupted]")
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
        with open(mountpoint, "rb") as recorded:
            if not _is_recorded(recorded):
                raise Failure(f"{mountpoint}: is neither a mount nor a file of trace records")
            with _opened(output) as sink:
                _convert(recorded, sink, {"version": __version__})
        return
    entry = _mounts.find(mountpoint)
    asked: list[int] = []  # the signals that have come; a handler could wait for ever for the lock of an Event
    # Also where whoever started it had SIGINT ignored, as shells do for what runs in the background. nohup is heeded.
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    for number in (signal.SIGINT, signal.SIGTERM, *hangup):
        signal.signal(number, lambda arrived, _: asked.append(arrived))
    try:
        source = os.open(os.path.join(entry.mountpoint, _FILE), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(entry.mountpoint, error) from None
    try:
        # Converting to JSON takes longer than recording, so it is done afterwards.
        with tempfile.TemporaryFile(buffering=0) as records, _opened(output) as sink:
            ended = _record(source, records, duration, asked)
            records.seek(0)
            _convert(records, sink, {"version": __version__, "mountpoint": entry.mountpoint})
    finally:
        with contextlib.suppress(OSError):  # the mount may have ended, which reading has found out
            os.close(source)
    if ended is not None:
        raise Failure(f"{entry.mountpoint}: {ended.strerror}: the trace ends there")


@contextlib.contextmanager
def _opened(output: str) -> Iterator[IO[str]]:
    if output == "-":
        yield sys.stdout
        return
    try:
        with open(output, "w", encoding="ascii") as file:
            yield file
    except OSError as error:
        raise Failure(f"{output}: {error.strerror}") from None


def _is_recorded(file: IO[bytes]) -> bool:
    """Return whether a file begins as what gpufs.engine.Trace returns: the name of a thread comes before its spans."""
    first = file.read(_RECORD.size)
    file.seek(0)
    if len(first) < _RECORD.size:
        return not first
    *_, kind, _, _, _, _, _, reserved = _RECORD.unpack(first)
    return kind in (_THREAD, _NAME, _LOST) and not reserved


def _convert(records: IO[bytes], sink: IO[str], facts: dict[str, str]) -> None:
    converter = Converter(sink, facts)
    while data := records.read(_READ_BYTES):
        converter.feed(data)
    converter.end()
    sink.flush()
    lost = f", {converter.lost} more were lost: the recording could not keep up" if converter.lost else ""
    with contextlib.suppress(OSError):  # the trace is complete without this line
        print(f"{converter.spans} spans{lost}", file=sys.stderr)


def _refused(mountpoint: str, error: OSError) -> Failure:
    reasons = {
        EBUSY: "a trace is being recorded already",
        EACCES: "only its owner may record a trace",
        EPERM: "only its owner may record a trace",
        ENOENT: "the mount is of a version that cannot record traces",
        **dict.fromkeys(DEAD, "its process is dead"),
    }
    return Failure(f"{mountpoint}: {reasons.get(error.errno or 0, error.strerror)}")


def _record(source: int, records: IO[bytes], duration: float | None, asked: Sequence[int]) -> OSError | None:
    """Record until the time is over or the user interrupts; return the error if the mount ended first."""
    end = math.inf if duration is None else time.monotonic() + duration
    last_reads = _LAST_READS
    while last_reads > 0:
        over = bool(asked) or time.monotonic() >= end
        try:
            data = os.read(source, _READ_BYTES)
        except OSError as error:
            return error
        _keep(records, data)
        if over:
            last_reads = last_reads - 1 if data else 0
        elif not data:
            time.sleep(max(0.0, min(_PAUSE, end - time.monotonic())))
    return None


def _keep(records: IO[bytes], data: bytes) -> None:
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[records.write(rest) :]
    except OSError as error:
        raise Failure(f"{tempfile.gettempdir()}: {error.strerror}: records are kept there until the end") from None


class Converter:
    """Write the events of a stream of records as the JSON that Perfetto and chrome://tracing open, one a line.

    ``sink`` stays the caller's; ``facts`` go into the file as ``otherData``.
    """

    def __init__(self, sink: IO[str], facts: dict[str, str]) -> None:
        self._sink = sink
        self._facts = facts
        self._rest = b""
        self._names: dict[int, str] = {}
        self._threads: dict[int, str] = {}
        self._tracks: set[tuple[int, int]] = set()
        self._epoch: int | None = None
        self.spans = 0
        self.lost = 0
        sink.write('{"displayTimeUnit": "ns",\n"traceEvents": [\n')
        # Every other event follows a comma.
        sink.write(json.dumps({"name": "process_name", "ph": "M", "pid": _PROCESS, "args": {"name": "gpufs"}}))

    def feed(self, data: bytes) -> None:
        """Convert the next part of the stream, which may be cut anywhere."""
        data = self._rest + data
        place = 0
        while len(data) - place >= _RECORD.size:
            fields = _RECORD.unpack_from(data, place)
            length = fields[4] if fields[7] in (_THREAD, _NAME) else 0
            start = place + _RECORD.size
            end = start + -(-length // _RECORD.size) * _RECORD.size
            if end > len(data):
                break
            self._convert(fields, os.fsdecode(data[start : start + length]))
            place = end
        self._rest = data[place:]

    def end(self) -> None:
        """Write the tail of the file."""
        facts = {**self._facts, "lost_records": self.lost}
        self._sink.write(f'\n],\n"otherData": {json.dumps(facts)}}}\n')

    def _convert(self, fields: tuple[int, ...], text: str) -> None:
        start, end, number, offset, size, thread, name, kind, _, flow, lane, device, error, _ = fields
        if kind == _THREAD:
            self._threads[thread] = text
            self._describe("thread_name", f"{text} ({thread})", _PROCESS, thread)
        elif kind == _NAME:
            self._names[name] = text
        elif kind == _LOST:
            self.lost += size
        elif kind in _SPANS:  # others are of a later version
            title, category = _SPANS[kind]
            arguments: dict[str, Any] = {"size": size}
            meaning = {_OPERATION: "cookie", _STREAM_WAIT: "cookie", _MOVE: "transfer"}
            arguments[meaning.get(kind, "offset")] = offset
            if device >= 0:
                arguments["device"] = f"gpu{device}"
            if name:
                arguments["path"] = self._names.get(name, "?")
            if error:
                arguments["error"] = os.strerror(error)
            if kind in (_READ, _WRITE):
                arguments["inode"] = number
            elif category == "operation":
                arguments["operation"] = number
            elif number:
                arguments["transfer"] = number
            process, track = self._lane(device, thread, lane) if lane else (_PROCESS, thread)
            event = {"name": title, "cat": category, "pid": process, "tid": track, "args": arguments}
            if category in _PHASES:
                # Phases overlap each other in any way, so each transfer and operation is a track of its own.
                arguments["direction"] = _DIRECTIONS[flow]
                event["id"] = f"0x{number:x}"
                self._event({**event, "ph": "b", "ts": self._time(start)})
                self._event({**event, "ph": "e", "ts": self._time(end), "args": {}})
            else:
                self._event({**event, "ph": "X", "ts": self._time(start), "dur": (end - start) / 1000})
            self.spans += 1

    def _lane(self, device: int, thread: int, lane: int) -> tuple[int, int]:
        """Return the track for what a device does for one slot of a thread."""
        process = _PROCESS + 1 + device
        track = thread * _LANES + lane
        if (process, 0) not in self._tracks:
            self._tracks.add((process, 0))
            self._describe("process_name", f"gpu{device}", process, 0)
        if (process, track) not in self._tracks:
            self._tracks.add((process, track))
            self._describe("thread_name", f"{self._threads.get(thread, thread)} slot {lane}", process, track)
        return process, track

    def _time(self, nanoseconds: int) -> float:
        """Return microseconds since the first span; negative for what began before it."""
        if self._epoch is None:
            self._epoch = nanoseconds
        return (nanoseconds - self._epoch) / 1000

    def _describe(self, what: str, name: str, process: int, track: int) -> None:
        self._event({"name": what, "ph": "M", "pid": process, "tid": track, "args": {"name": name}})

    def _event(self, event: dict[str, Any]) -> None:
        self._sink.write(",\n" + json.dumps(event))
