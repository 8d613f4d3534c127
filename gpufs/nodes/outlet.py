"""How the bytes of files leave this machine: by NIXL or through the pipe, whichever is faster."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from gpufs.nodes import bounce
from gpufs.nodes.bounce import Bounce
from gpufs.nodes.channel import BLOCK_BYTES, Channel, ConnectionEnded
from gpufs.nodes.messages import Chosen, Free, Measure, Measured, Slot, plain
from gpufs.units import rate_text

_PROGRESS_SECONDS: Final = 0.0005

T = TypeVar("T")


class Outlet:
    """Sends the bytes of files. One thread sends; the thread that receives calls take() and end().

    Parameters
    ----------
    channel : Channel
        To the receiver.
    notice : callable
        Called with a line that says why NIXL does not move the bytes.
    peer_has_nixl : bool
        Whether NIXL is installed there.
    """

    def __init__(self, channel: Channel, notice: Callable[[str], None], *, peer_has_nixl: bool) -> None:
        self._channel = channel
        self._notice = notice
        self._peer_has_nixl = peer_has_nixl
        self._block = memoryview(bytearray(BLOCK_BYTES))
        self._bounce: Bounce | None = None  # once NIXL is chosen
        self._slot: int | None = None  # the one that buffer() has returned
        self._answers: SimpleQueue[Measured | None] = SimpleQueue()  # None: nothing more is received
        self._free: SimpleQueue[int | None] = SimpleQueue()  # slots, and the same

    def take(self, message: Measured | Free) -> None:
        """Take what the receiver has answered."""
        if isinstance(message, Free):
            self._free.put(message.number)
        else:
            self._answers.put(message)

    def end(self) -> None:
        """Nothing more is received."""
        self._answers.put(None)
        self._free.put(None)

    def choose(self, size: int) -> None:
        """Find out, if ``size`` bytes are worth it, whether NIXL is faster, and let the receiver know."""
        if size < bounce.LEAST_BYTES:
            return
        if not (bounce.is_installed() and self._peer_has_nixl):
            self._choose_pipe("NIXL is not installed on both machines (pip install 'gpufs[nodes]')")
            return
        try:
            slots = Bounce()
        except OSError as error:
            self._choose_pipe(error.strerror or "")
            return
        self._channel.send(slots.offer)
        answer = self._wait(self._answers, slots)
        began = time.monotonic()
        for _ in range(bounce.SLOTS):
            self._channel.send_data(self._block)
        self._channel.send(Measure())
        self._wait(self._answers, slots)
        rate = bounce.SLOTS * BLOCK_BYTES / (time.monotonic() - began)
        if answer.rate <= rate:
            slots.close()
            self._choose_pipe(answer.failure or f"NIXL moves {rate_text(answer.rate)}, the pipe {rate_text(rate)}")
            return
        self._bounce = slots
        for number in range(bounce.SLOTS):
            self._free.put(number)
        self._channel.send(Chosen(True))

    def buffer(self) -> memoryview:
        """Return BLOCK_BYTES of memory for the next bytes. The same until send()."""
        if self._bounce is None:
            return self._block
        if self._slot is None:
            self._slot = self._wait(self._free, self._bounce)
        return self._bounce.slot(self._slot)

    def send(self, count: int) -> None:
        """Send the first bytes of buffer()."""
        if self._slot is None:
            self._channel.send_data(self._block[:count])
        else:
            self._channel.send(Slot(self._slot, count))
            self._slot = None

    def send_copy(self, data: bytes) -> None:
        """Send bytes that lie elsewhere."""
        if self._bounce is None:
            self._channel.send_data(memoryview(data))
        else:
            self.buffer()[: len(data)] = data
            self.send(len(data))

    def await_reads(self) -> None:
        """Wait until the receiver has read all slots."""
        if self._bounce is not None:
            slots = [] if self._slot is None else [self._slot]
            self._slot = None
            while len(slots) < bounce.SLOTS:
                slots.append(self._wait(self._free, self._bounce))
            for number in slots:
                self._free.put(number)

    def close(self) -> None:
        """Withdraw the memory that the receiver reads."""
        if self._bounce is not None:
            self._bounce.close()

    def _choose_pipe(self, reason: str) -> None:
        text = f"the bytes go through the pipe of the shell: {plain(reason)}"
        self._notice(text)
        self._channel.send(Chosen(False, text))

    def _wait(self, queue: SimpleQueue[T | None], slots: Bounce) -> T:
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
