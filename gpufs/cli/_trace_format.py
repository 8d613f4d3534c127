"""From the engine's trace records to the JSON that Chrome's tracing and Perfetto open. docs/traces.md has both."""

import json
import os
import struct
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
}
_PHASES: Final = frozenset({40, 41, 42})
_BY_INODE: Final = frozenset({10, 11})
_FLOWS: Final = ("in", "out")
_PROCESS: Final = 1  # the number of the process in the file; those of devices follow
_LANES: Final = 256


class Converter:
    """Takes records in the order in which they were read and writes events, one a line."""

    def __init__(self, sink: IO[str], facts: dict[str, Any]) -> None:
        self._sink = sink
        self._facts = facts
        self._rest = b""
        self._first = True
        self._names: dict[int, str] = {}
        self._threads: dict[int, str] = {}
        self._lanes: set[tuple[int, int, int]] = set()
        self._devices: set[int] = set()
        self._epoch: int | None = None
        self.spans = 0
        self.lost = 0

    def begin(self) -> None:
        """The head of the file."""
        self._sink.write('{"displayTimeUnit": "ns",\n"traceEvents": [')
        self._meta("process_name", _PROCESS, None, "gpufs")

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

    def end(self) -> None:
        """The tail of the file."""
        facts = {**self._facts, "lost_records": self.lost}
        self._sink.write(f'\n],\n"otherData": {json.dumps(facts)}}}\n')

    def _record(self, fields: tuple[Any, ...], text: bytes) -> None:
        start, end, number, offset, size, thread, name, kind, _, flow, lane, device, error, _ = fields
        if kind == _THREAD:
            self._threads[thread] = os.fsdecode(text)
            self._meta("thread_name", _PROCESS, thread, f"{self._threads[thread]} ({thread})")
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
        arguments: dict[str, Any] = {"size": size, "offset": offset}
        if device >= 0:
            arguments["device"] = f"gpu{device}"
        if name:
            arguments["path"] = self._names.get(name, "?")
        if error:
            arguments["error"] = os.strerror(error)
        if kind in _BY_INODE:
            arguments["inode"] = number
        elif number:
            arguments["transfer"] = number
        event: dict[str, Any] = {"name": title, "cat": category, "pid": _PROCESS, "tid": thread}
        if kind in _PHASES:
            arguments["direction"] = _FLOWS[flow]
            self._phase(event, number, start, end, arguments)
        else:
            if lane:
                event["pid"], event["tid"] = self._lane(device, thread, lane)
            self._event({**event, "ph": "X", "ts": self._time(start), "dur": (end - start) / 1000, "args": arguments})
        self.spans += 1

    def _phase(self, event: dict[str, Any], number: int, start: int, end: int, arguments: dict[str, Any]) -> None:
        # Transfers overlap each other in whatever way they like: each is a track of its own.
        event |= {"id": f"0x{number:x}"}
        self._event({**event, "ph": "b", "ts": self._time(start), "args": arguments})
        self._event({**event, "ph": "e", "ts": self._time(end)})

    def _lane(self, device: int, thread: int, lane: int) -> tuple[int, int]:
        """A track for what a device does for one slot of a thread."""
        process = _PROCESS + 1 + device
        track = thread * _LANES + lane
        if device not in self._devices:
            self._devices.add(device)
            self._meta("process_name", process, None, f"gpu{device}")
        if (device, thread, lane) not in self._lanes:
            self._lanes.add((device, thread, lane))
            self._meta("thread_name", process, track, f"{self._threads.get(thread, thread)} slot {lane}")
        return process, track

    def _time(self, nanoseconds: int) -> float:
        """Microseconds since the first record; what began before it has a negative time."""
        if self._epoch is None:
            self._epoch = nanoseconds
        return (nanoseconds - self._epoch) / 1000

    def _meta(self, kind: str, process: int, thread: int | None, name: str) -> None:
        event: dict[str, Any] = {"name": kind, "ph": "M", "pid": process, "args": {"name": name}}
        if thread is not None:
            event["tid"] = thread
        self._event(event)

    def _event(self, event: dict[str, Any]) -> None:
        self._sink.write("\n" if self._first else ",\n")
        self._first = False
        self._sink.write(json.dumps(event))
