"""How the bytes of files leave this machine: by NIXL or through the pipe, whichever is faster."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from gpufs.hosts import nixl
from gpufs.hosts.channel import BLOCK_BYTES, ConnectionEnded, HostChannel, HostProtocolError
from gpufs.hosts.messages import Chosen, Free, InPlace, Measure, Measured, Slot, Window, Written, plain
from gpufs.hosts.nixl import Nixl, Region
from gpufs.units import rate_text

_PROGRESS_SECONDS: Final = 0.0005
# The part of each large file that shows how fast slots are, with what it takes to read and write its bytes. The first
# copies of a daemon are slower: its bounce buffers are pinned then.
_TIMED_FROM: Final = 256 << 20
_TIMED_BYTES: Final = 128 << 20

T = TypeVar("T")


@dataclass(eq=False)
class Outlet:
    """Sends the bytes of files. One thread sends; the thread that receives calls take() and end()."""

    channel: HostChannel  # to the receiver
    notice: Callable[[str], None]  # called with a line that says why NIXL does not move the bytes
    _: KW_ONLY
    peer_has_nixl: bool

    def __post_init__(self) -> None:
        self._block = memoryview(bytearray(BLOCK_BYTES))
        self._nixl: Nixl | None = None  # once NIXL is chosen
        self._slot: int | None = None  # the one that buffer() has returned
        self._answers: SimpleQueue[Measured | None] = SimpleQueue()  # None: nothing more is received
        self._free: SimpleQueue[int | None] = SimpleQueue()  # slots, and the same
        self._windows: SimpleQueue[Window | None] = SimpleQueue()  # and the same
        self._in_place = False  # whether the receiver opens windows, and write() has not been slower
        self._timed: tuple[float, int] | None = None  # when the current file was at which offset

    def take(self, message: Measured | Free | Window) -> None:
        """Take what the receiver has answered."""
        queue: SimpleQueue[Any] = self._answers
        answer: object = message
        if isinstance(message, Free):
            queue, answer = self._free, message.number
        elif isinstance(message, Window):
            queue = self._windows
        if queue.qsize() >= nixl.SLOTS or (isinstance(message, Free) and message.number >= nixl.SLOTS):
            raise HostProtocolError("an answer that was not asked for")
        queue.put(answer)

    def end(self) -> None:
        """Nothing more is received."""
        self._answers.put(None)
        self._free.put(None)
        self._windows.put(None)

    def choose(self, size: int) -> None:
        """Find out, if ``size`` bytes are worth it, whether NIXL is faster, and let the receiver know."""
        if size < nixl.LEAST_BYTES:
            return
        if not (nixl.is_installed() and self.peer_has_nixl):
            self._choose_pipe("NIXL is not installed on both machines (pip install nixl)")
            return
        try:
            slots = Nixl()
        except OSError as error:
            self._choose_pipe(error.strerror or "")
            return
        self.channel.send(slots.offer)
        answer = self._wait(self._answers, slots)
        began = time.monotonic()
        for _ in range(nixl.SLOTS):
            self.channel.send_data(self._block)
        self.channel.send(Measure())
        self._wait(self._answers, slots)
        rate = nixl.SLOTS * BLOCK_BYTES / (time.monotonic() - began)
        if answer.rate <= rate:
            slots.close()
            self._choose_pipe(answer.failure or f"NIXL moves {rate_text(answer.rate)}, the pipe {rate_text(rate)}")
            return
        self._nixl, self._in_place = slots, answer.in_place
        for number in range(nixl.SLOTS):
            self._free.put(number)
        self.channel.send(Chosen(True))

    def begin(self) -> None:
        """A file begins."""
        self._timed = None

    def buffer(self) -> memoryview:
        """Return BLOCK_BYTES of memory for the next bytes. The same until send()."""
        if self._nixl is None:
            return self._block
        if self._slot is None:
            self._slot = self._wait(self._free, self._nixl)
        return self._nixl.slot(self._slot)

    def send(self, count: int) -> None:
        """Send the first bytes of buffer()."""
        if self._slot is None:
            self.channel.send_data(self._block[:count])
        else:
            self.channel.send(Slot(self._slot, count))
            self._slot = None

    def send_copy(self, data: bytes) -> None:
        if self._nixl is None:
            self.channel.send_data(memoryview(data))
        else:
            self.buffer()[: len(data)] = data
            self.send(len(data))

    def should_write(self, offset: int) -> bool:
        """Return whether to try write(), now that a file's bytes before ``offset`` have been sent."""
        if not self._in_place or offset < _TIMED_FROM:
            return False
        if self._timed is None:
            self._timed = (time.monotonic(), offset)
        if offset - self._timed[1] < _TIMED_BYTES:
            return False
        self.await_reads()
        return True

    def write(self, region: Region, offset: int, moved: Callable[[int], None]) -> int:
        """Write a file's memory from ``offset`` on into that of the receiver's file, while that is the faster way.

        Returns the offset that is reached.
        """
        assert self._nixl is not None
        assert self._timed is not None
        began, first = self._timed
        rate = (offset - first) / (time.monotonic() - began)
        self._in_place = False  # until it has proved to be faster
        with ExitStack() as registered:
            try:
                registered.enter_context(self._nixl.registered(region))
            except ConnectionEnded:  # of NIXL alone
                return offset
            self.channel.send(InPlace())
            window = self._wait(self._windows, self._nixl)
            if not window.metadata:
                return offset

            def report(reached: int) -> None:
                self.channel.send(Written(reached, last=False))
                moved(reached)

            offset = self._nixl.write(region, window, offset, rate, self.channel.check, report)
            self.channel.send(Written(offset, last=True))
        self._in_place = offset == region.size
        return offset

    def await_reads(self) -> None:
        """Wait until the receiver has read all slots."""
        if self._nixl is not None:
            slots = [] if self._slot is None else [self._slot]
            self._slot = None
            while len(slots) < nixl.SLOTS:
                slots.append(self._wait(self._free, self._nixl))
            for number in slots:
                self._free.put(number)

    def close(self) -> None:
        if self._nixl is not None:
            self._nixl.close()

    def _choose_pipe(self, reason: str) -> None:
        text = f"the bytes go through the pipe of the shell: {plain(reason)}"
        self.notice(text)
        self.channel.send(Chosen(False, text))

    def _wait(self, queue: SimpleQueue[T | None], slots: Nixl) -> T:
        """Return what the other thread receives next, and let the receiver read at the same time."""
        while True:
            try:
                answer = queue.get(timeout=_PROGRESS_SECONDS)
            except Empty:
                slots.progress()
                continue
            if answer is None:
                raise ConnectionEnded(errno.ECONNRESET, "the connection ended")
            return answer
