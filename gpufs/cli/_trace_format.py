"""Converts trace records (docs/internals/trace-records.md) to the JSON that Perfetto and chrome://tracing open."""

import json
import os
import struct
from typing import IO, Any, Final

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


class Converter:
    """Writes the events of a stream of records, one a line.

    Parameters
    ----------
    sink
        A text file, which the caller closes.
    facts
        Goes into the file as ``otherData``.
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
        """Converts the next part of the stream, which may be cut anywhere."""
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
        """Writes the tail of the file."""
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
        """The track for what a device does for one slot of a thread."""
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
        """Microseconds since the first span; negative for what began before it."""
        if self._epoch is None:
            self._epoch = nanoseconds
        return (nanoseconds - self._epoch) / 1000

    def _describe(self, what: str, name: str, process: int, track: int) -> None:
        self._event({"name": what, "ph": "M", "pid": process, "tid": track, "args": {"name": name}})

    def _event(self, event: dict[str, Any]) -> None:
        self._sink.write(",\n" + json.dumps(event))
