"""How the bytes of files leave this machine: by NIXL or through the pipe, whichever is faster."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias, TypeVar, get_args

import msgspec

from gpufs import waiting
from gpufs.hosts import messages, nixl
from gpufs.hosts.channel import BLOCK_BYTES, ChannelError, ConnectionEnded, HostChannel, HostProtocolError
from gpufs.hosts.messages import Chosen, Free, InPlace, Measure, Measured, Slot, Window, Written, plain
from gpufs.hosts.nixl import Nixl, Region
from gpufs.units import rate_text

_PROGRESS_SECONDS: Final = 0.0005
_END_SECONDS: Final = 2.0  # for what the other side still says after its end
_LATE_SECONDS: Final = 10.0  # between the end of the results and that of the thread that has sent the files
# The part of each large file that shows how fast slots are, with what it takes to read and write its bytes. The first
# copies of a daemon are slower: its bounce buffers are pinned then.
_TIMED_FROM: Final = 256 << 20
_TIMED_BYTES: Final = 128 << 20

_Answer: TypeAlias = Measured | Free | Window
T = TypeVar("T", Measured, Free, Window)


@dataclass(eq=False)
class Outlet:
    """Sends the bytes of files. One thread uses it, in what run() calls."""

    channel: HostChannel  # to the receiver
    notice: Callable[[str], None]  # called with a line that says why NIXL does not move the bytes

    def __post_init__(self) -> None:
        self._block = memoryview(bytearray(BLOCK_BYTES))
        self._nixl: Nixl | None = None  # once NIXL is chosen
        self._slot: int | None = None  # the one that buffer() has returned
        # What has been received, by its kind. None: nothing more is received.
        self._answers: dict[type[_Answer], SimpleQueue[Any]] = {kind: SimpleQueue() for kind in get_args(_Answer)}
        self._in_place = False  # whether the receiver opens windows, and write() has not been slower
        self._timed: tuple[float, int] | None = None  # when the current file was at which offset

    def run(self, write: Callable[[], None], take: Callable[[messages.Report], None]) -> None:
        """Send by ``write``, and receive on another thread until the receiver has finished. ``take`` gets its reports.

        An error of one ends both. The one that says most is raised.
        """
        written = threading.Event()

        def receive() -> None:
            try:
                self._receive(take)
                if not written.wait(_LATE_SECONDS):
                    raise HostProtocolError("the results ended before the files")
            finally:
                self.channel.stop()
                for queue in self._answers.values():
                    queue.put(None)

        reading = waiting.start(receive)
        ended: ChannelError | None = None
        try:
            write()
            written.set()
            wait([reading])
        except ChannelError as error:
            ended = error
            if isinstance(error, ConnectionEnded):
                wait([reading], _END_SECONDS)  # the results end as well, and may say why
        finally:
            written.set()
            self.channel.stop()
            wait([reading])
            if self._nixl is not None:
                self._nixl.close()
        failure = reading.exception()
        if failure is not None and (ended is None or type(failure) is not ChannelError):
            raise failure
        if ended is not None:
            raise ended

    def _receive(self, take: Callable[[messages.Report], None]) -> None:
        while not isinstance(message := self.channel.receive(), messages.Finished):
            if isinstance(message, messages.Report):
                take(message)
            elif isinstance(message, _Answer):
                self._take(message)
            else:
                raise HostProtocolError("no result")

    def _take(self, message: _Answer) -> None:
        queue = self._answers[type(message)]
        if queue.qsize() >= nixl.SLOTS or (isinstance(message, Free) and message.number >= nixl.SLOTS):
            raise HostProtocolError("an answer that was not asked for")
        queue.put(message)

    def send_plan(self, plan: messages.Plan) -> None:
        """Send the plan. Find out, if that is worth it, whether NIXL is faster, and let the receiver know."""
        is_large = plan.size >= nixl.LEAST_BYTES
        has_nixl = is_large and nixl.is_installed()
        self.channel.send(msgspec.structs.replace(plan, nixl=has_nixl))
        if not has_nixl:
            if is_large:
                self._choose_pipe(nixl.MISSING)
            return
        try:
            slots = Nixl()
        except OSError as error:
            self._choose_pipe(error.strerror or "")
            return
        self.channel.send(slots.offer)
        answer = self._wait(Measured, slots)
        began = time.monotonic()
        for _ in range(nixl.SLOTS):
            self.channel.send_data(self._block)
        self.channel.send(Measure())
        self._wait(Measured, slots)
        rate = nixl.SLOTS * BLOCK_BYTES / (time.monotonic() - began)
        if answer.rate <= rate:
            slots.close()
            self._choose_pipe(answer.failure or f"NIXL moves {rate_text(answer.rate)}, the pipe {rate_text(rate)}")
            return
        self._nixl, self._in_place = slots, answer.in_place
        for number in range(nixl.SLOTS):
            self._take(Free(number))
        self.channel.send(Chosen(True))

    def begin(self) -> None:
        """A file begins."""
        self._timed = None

    def buffer(self) -> memoryview:
        """Return BLOCK_BYTES of memory for the next bytes. The same until send()."""
        if self._nixl is None:
            return self._block
        if self._slot is None:
            self._slot = self._wait(Free, self._nixl).number
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
            window = self._wait(Window, self._nixl)
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
                slots.append(self._wait(Free, self._nixl).number)
            for number in slots:
                self._take(Free(number))

    def _choose_pipe(self, reason: str) -> None:
        text = f"the bytes go through the pipe of the shell: {plain(reason)}"
        self.notice(text)
        self.channel.send(Chosen(False, text))

    def _wait(self, kind: type[T], slots: Nixl) -> T:
        """Return what the other thread receives next, and let the receiver read at the same time."""
        while True:
            try:
                answer: T | None = self._answers[kind].get(timeout=_PROGRESS_SECONDS)
            except Empty:
                slots.progress()
                continue
            if answer is None:
                raise ConnectionEnded(errno.ECONNRESET, "the connection ended")
            return answer
