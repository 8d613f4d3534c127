"""From the engine's trace records to Perfetto's own format, protocol buffers. docs/traces.md says what is where.

Only the few messages that a trace of spans needs are written, so that no library has to be there for it. Numbers are
those of the published definitions (perfetto/protos/trace), whose fields never change their number.
"""

import os
from typing import IO, Any, Final

from gpufs.cli._trace_format import PROCESS, Records, Span

# Packets of a trace.
_PACKET: Final = 1
# TracePacket
_CLOCK_SNAPSHOT, _TIMESTAMP, _SEQUENCE, _TRACK_EVENT, _SEQUENCE_FLAGS, _CLOCK, _TRACK = 6, 8, 10, 11, 13, 58, 60
_STATE_CLEARED: Final = 1  # of the sequence: whatever came before it counts no more
# ClockSnapshot, and a Clock of it
_CLOCKS, _PRIMARY_CLOCK = 1, 2
_CLOCK_ID, _CLOCK_TIME = 1, 2
_MONOTONIC: Final = 3
# TrackDescriptor, ProcessDescriptor, ThreadDescriptor
_UUID, _TRACK_NAME, _TRACK_PROCESS, _TRACK_THREAD, _PARENT = 1, 2, 3, 4, 5
_PROCESS_ID, _PROCESS_NAME = 1, 6
_THREAD_PROCESS, _THREAD_ID, _THREAD_NAME = 1, 2, 5
# TrackEvent
_ANNOTATION, _TYPE, _EVENT_TRACK, _CATEGORY, _EVENT_NAME = 4, 9, 11, 22, 23
_BEGIN, _END = 1, 2
# DebugAnnotation
_UNSIGNED, _STRING, _ANNOTATION_NAME = 3, 6, 10

# Tracks' numbers: of processes below 2^16, of threads, transfers and operations above.
_THREADS: Final = 1 << 48
_PHASES: Final = {"transfer": 1 << 62, "operation": 1 << 63}


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    # Names of files need not be UTF-8, but every string here must be.
    return _bytes(field, os.fsencode(value).decode("utf-8", "replace").encode())


class PerfettoConverter(Records):
    """Writes packets: tracks, and the beginning and the end of each span."""

    def __init__(self, sink: IO[bytes], facts: dict[str, Any]) -> None:
        super().__init__()
        self._sink = sink
        self._name = " ".join(["gpufs", *(str(facts[key]) for key in ("version", "mountpoint") if key in facts)])
        self._begun = False
        self._described: set[int] = set()

    def end(self) -> None:
        """Nothing comes after the last packet."""

    def _describe_process(self, process: int, name: str) -> None:
        title = self._name if process == PROCESS else name
        described = _number(_PROCESS_ID, process) + _text(_PROCESS_NAME, title)
        self._packet(_bytes(_TRACK, _number(_UUID, process) + _bytes(_TRACK_PROCESS, described)))

    def _describe_thread(self, process: int, thread: int, name: str) -> None:
        track = _number(_UUID, _uuid(process, thread))
        if process == PROCESS:
            described = _number(_THREAD_PROCESS, process) + _number(_THREAD_ID, thread) + _text(_THREAD_NAME, name)
            track += _bytes(_TRACK_THREAD, described)
        else:
            # No thread runs there: a track of the device's own.
            track += _number(_PARENT, process) + _text(_TRACK_NAME, name)
        self._packet(_bytes(_TRACK, track))

    def _slice(self, span: Span) -> None:
        self._span(span, _uuid(span.process, span.thread))

    def _phase(self, span: Span, number: int) -> None:
        track = _PHASES[span.category] + number
        if track not in self._described:
            self._described.add(track)
            name = f"{span.category} {number}"
            described = _number(_UUID, track) + _number(_PARENT, PROCESS) + _text(_TRACK_NAME, name)
            self._packet(_bytes(_TRACK, described))
        self._span(span, track)

    def _span(self, span: Span, track: int) -> None:
        where = _number(_EVENT_TRACK, track)
        begin = _number(_TYPE, _BEGIN) + where + _text(_CATEGORY, span.category) + _text(_EVENT_NAME, span.title)
        for name, value in span.arguments.items():
            said = _text(_ANNOTATION_NAME, name)
            said += _number(_UNSIGNED, value) if isinstance(value, int) else _text(_STRING, str(value))
            begin += _bytes(_ANNOTATION, said)
        self._event(span.start, begin)
        self._event(span.end, _number(_TYPE, _END) + where)

    def _event(self, time: int, event: bytes) -> None:
        self._packet(_number(_TIMESTAMP, time) + _number(_CLOCK, _MONOTONIC) + _bytes(_TRACK_EVENT, event))

    def _packet(self, content: bytes) -> None:
        if not self._begun:
            self._begun = True
            # All times are of one clock, which is the trace's own.
            clock = _number(_CLOCK_ID, _MONOTONIC) + _number(_CLOCK_TIME, 0)
            snapshot = _bytes(_CLOCKS, clock) + _number(_PRIMARY_CLOCK, _MONOTONIC)
            self._packet(_number(_SEQUENCE_FLAGS, _STATE_CLEARED) + _bytes(_CLOCK_SNAPSHOT, snapshot))
        self._sink.write(_bytes(_PACKET, _number(_SEQUENCE, 1) + content))


def _uuid(process: int, thread: int) -> int:
    return _THREADS * process + thread
