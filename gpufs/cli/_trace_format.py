"""From the engine's trace records to the JSON that Chrome's tracing and Perfetto open. docs/traces.md has both."""

import json
import os
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import IO, Any, Final

_RECORD: Final = struct.Struct("=QQQQQIIBBBBiiI")
_THREAD, _NAME, _LOST = 1, 2, 3
# number: (name, category)
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
_PHASES: Final = frozenset({40, 41, 42})
_OPERATION, _STREAM_WAIT, _MOVE = 43, 44, 45
_BY_INODE: Final = frozenset({10, 11})
_FLOWS: Final = ("in", "out")
PROCESS: Final = 1  # the number of the process in the file; those of devices follow
_LANES: Final = 256


@dataclass(frozen=True, slots=True)
class Span:
    """One span: times in nanoseconds of the monotonic clock, the track by the numbers of its process and thread."""

    title: str
    category: str
    process: int
    thread: int
    start: int
    end: int
    arguments: dict[str, Any]


class Records(ABC):
    """Takes records in the order in which they were read, and hands out what they say.

    A track is described before its first span, but for the thread of a phase, which counts for nothing.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._names: dict[int, str] = {}
        self._threads: dict[int, str] = {}
        self._lanes: set[tuple[int, int, int]] = set()
        self._devices: set[int] = set()
        self.spans = 0
        self.lost = 0

    def begin(self) -> None:
        """The head of the file."""
        self._describe_process(PROCESS, "gpufs")

    def feed(self, data: bytes) -> None:
        """Some more bytes, cut anywhere."""
        data = self._rest + data
        place = 0
        while len(data) - place >= _RECORD.size:
            fields = _RECORD.unpack_from(data, place)
            length = fields[4]
            follows = 0
            if fields[7] in (_THREAD, _NAME):
                follows = -(-length // _RECORD.size) * _RECORD.size
                if len(data) - place < _RECORD.size + follows:
                    break
            start = place + _RECORD.size
            self._record(fields, data[start : start + length] if follows else b"")
            place = start + follows
        self._rest = data[place:]

    @abstractmethod
    def end(self) -> None:
        """The tail of the file."""

    @abstractmethod
    def _describe_process(self, process: int, name: str) -> None: ...

    @abstractmethod
    def _describe_thread(self, process: int, thread: int, name: str) -> None: ...

    @abstractmethod
    def _slice(self, span: Span) -> None:
        """A span of its track: those of one track nest."""

    @abstractmethod
    def _phase(self, span: Span, number: int) -> None:
        """A phase of a transfer or an operation, which is a track of its own; the whole of it first, then its parts.

        The category says which of the two it is.
        """

    def _record(self, fields: tuple[Any, ...], text: bytes) -> None:
        start, end, number, offset, size, thread, name, kind, _, flow, lane, device, error, _ = fields
        if kind == _THREAD:
            self._threads[thread] = os.fsdecode(text)
            self._describe_thread(PROCESS, thread, f"{self._threads[thread]} ({thread})")
            return
        if kind == _NAME:
            self._names[name] = os.fsdecode(text)
            return
        if kind == _LOST:
            self.lost += size
            return
        if kind not in _SPANS:
            return  # of a later version
        title, category = _SPANS[kind]
        arguments: dict[str, Any] = {"size": size}
        if kind in (_OPERATION, _STREAM_WAIT):
            arguments["cookie"] = offset
        elif kind == _MOVE:
            arguments["transfer"] = offset
        else:
            arguments["offset"] = offset
        if device >= 0:
            arguments["device"] = f"gpu{device}"
        if name:
            arguments["path"] = self._names.get(name, "?")
        if error:
            arguments["error"] = os.strerror(error)
        if kind in _BY_INODE:
            arguments["inode"] = number
        elif category == "operation":
            arguments["operation"] = number
        elif number:
            arguments["transfer"] = number
        if kind in _PHASES or category == "operation":
            arguments["direction"] = _FLOWS[flow]
            self._phase(Span(title, category, PROCESS, thread, start, end, arguments), number)
        else:
            process, track = self._lane(device, thread, lane) if lane else (PROCESS, thread)
            self._slice(Span(title, category, process, track, start, end, arguments))
        self.spans += 1

    def _lane(self, device: int, thread: int, lane: int) -> tuple[int, int]:
        """A track for what a device does for one slot of a thread."""
        process = PROCESS + 1 + device
        track = thread * _LANES + lane
        if device not in self._devices:
            self._devices.add(device)
            self._describe_process(process, f"gpu{device}")
        if (device, thread, lane) not in self._lanes:
            self._lanes.add((device, thread, lane))
            self._describe_thread(process, track, f"{self._threads.get(thread, thread)} slot {lane}")
        return process, track


class Converter(Records):
    """Writes JSON: events, one a line."""

    def __init__(self, sink: IO[str], facts: dict[str, Any]) -> None:
        super().__init__()
        self._sink = sink
        self._facts = facts
        self._first = True
        self._epoch: int | None = None

    def begin(self) -> None:
        """The head of the file."""
        self._sink.write('{"displayTimeUnit": "ns",\n"traceEvents": [')
        super().begin()

    def end(self) -> None:
        """The tail of the file."""
        facts = {**self._facts, "lost_records": self.lost}
        self._sink.write(f'\n],\n"otherData": {json.dumps(facts)}}}\n')

    def _describe_process(self, process: int, name: str) -> None:
        self._event({"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}})

    def _describe_thread(self, process: int, thread: int, name: str) -> None:
        self._event({"name": "thread_name", "ph": "M", "pid": process, "args": {"name": name}, "tid": thread})

    def _slice(self, span: Span) -> None:
        duration = (span.end - span.start) / 1000
        self._event({**_head(span), "ph": "X", "ts": self._time(span.start), "dur": duration, "args": span.arguments})

    def _phase(self, span: Span, number: int) -> None:
        # They overlap each other in any way, so each is a track of its own, by its category and number.
        event = {**_head(span), "id": f"0x{number:x}"}
        self._event({**event, "ph": "b", "ts": self._time(span.start), "args": span.arguments})
        self._event({**event, "ph": "e", "ts": self._time(span.end)})

    def _time(self, nanoseconds: int) -> float:
        """Microseconds since the first record; what began before it has a negative time."""
        if self._epoch is None:
            self._epoch = nanoseconds
        return (nanoseconds - self._epoch) / 1000

    def _event(self, event: dict[str, Any]) -> None:
        self._sink.write("\n" if self._first else ",\n")
        self._first = False
        self._sink.write(json.dumps(event))


def _head(span: Span) -> dict[str, Any]:
    return {"name": span.title, "cat": span.category, "pid": span.process, "tid": span.thread}
