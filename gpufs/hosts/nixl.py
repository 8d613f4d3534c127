"""Bytes of files by NIXL: from memory of one machine straight into memory of the other, by RDMA where there is any.

Both sides register as many slots. The receiver reads a slot of the sender into its own slot of the same number. Or the
sender writes the memory of a file into that of the receiver's new file; so only the new file can be reached from
outside. NIXL's own thread, which keeps a core busy, is not used: a side calls progress() while it waits.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from gpufs.hosts.channel import BLOCK_BYTES, ChannelError, ConnectionEnded
from gpufs.hosts.messages import Offer, Window
from gpufs.syscalls import start_thread

SLOTS: Final = 4
# Copies of fewer bytes are over before NIXL is ready, which takes one to three seconds.
LEAST_BYTES: Final = 1 << 30
MISSING: Final = "NIXL is not installed on both machines (pip install nixl)"
_MOST_SECONDS: Final = 10.0  # for one block
_POLL_SECONDS: Final = 50e-6
_PROGRESS_SECONDS: Final = 0.0005
_STEP_BYTES: Final = 32 << 20  # of a file in place


def is_installed() -> bool:
    return find_spec("nixl") is not None


class Region(NamedTuple):
    """Memory of a file. ``device``: the GPU's number in this process, None for host memory."""

    address: int
    size: int
    device: int | None

    @property
    def kind(self) -> str:
        return "DRAM" if self.device is None else "VRAM"


class Nixl:
    """NIXL on this side, and its slots. One thread uses it.

    Raises OSError if NIXL has no agent here.
    """

    def __init__(self) -> None:
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")  # UCX logs to standard output
        with _translated(""):
            from nixl._api import nixl_agent, nixl_agent_config

            logging.getLogger("nixl").setLevel(logging.ERROR)  # this one, too
            self._agent: Any = nixl_agent(
                secrets.token_hex(8), nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            )
            self._memory = mmap.mmap(-1, SLOTS * BLOCK_BYTES)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self._registered = self._agent.register_memory([(self._address, SLOTS * BLOCK_BYTES, 0, "")], "DRAM")
            self.offer = Offer(self._agent.get_agent_metadata(), self._address)
        self._view = memoryview(self._memory)
        self._peer = ""
        self._there = 0

    def close(self) -> None:
        """Withdraw the slots. The other side must have used them."""
        self._forget(self._agent.deregister_memory, self._registered)

    def _forget(self, call: Callable[[Any], None], what: object) -> None:
        with suppress(Exception):  # the end of the process does it, too
            call(what)

    def connect(self, offer: Offer) -> None:
        """Reach the slots of the other side. OSError if that is not possible."""
        with _translated(""):
            self._peer = self._agent.add_remote_agent(offer.metadata)
            self._there = offer.address

    def slot(self, number: int) -> memoryview:
        return self._view[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]

    def progress(self) -> None:
        """Let the other side reach the slots of this one."""
        with _translated():
            self._agent.get_new_notifs()

    def read(self, slot: int, size: int, check: Callable[[], None]) -> None:
        """Read the first bytes of a slot there. Raises ConnectionEnded, and what ``check`` raises during the wait."""
        offset = slot * BLOCK_BYTES
        here = Region(self._address + offset, size, None)
        self._move("READ", here, Region(self._there + offset, size, None), self._peer, check)

    def _move(self, operation: str, here: Region, there: Region, peer: str, check: Callable[[], None]) -> None:
        deadline = time.monotonic() + _MOST_SECONDS
        with _translated():
            ends = [
                self._agent.get_xfer_descs([(region.address, region.size, region.device or 0)], region.kind)
                for region in (here, there)
            ]
            handle = self._agent.initialize_xfer(operation, *ends, peer)
            state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() < deadline:
                check()
                time.sleep(_POLL_SECONDS)
                state = self._agent.check_xfer_state(handle)
            if state == "DONE":
                handle.release()
        if state != "DONE":
            text = f"the connection ended: NIXL has not moved a block in {_MOST_SECONDS:.0f} seconds"
            raise ConnectionEnded(errno.ETIMEDOUT, text)

    # ---- files in place ----

    @contextmanager
    def registered(self, region: Region) -> Iterator[None]:
        """Let NIXL reach memory of a file. ConnectionEnded if it cannot."""
        memory = [(region.address, region.size, region.device or 0, "")]
        with _translated(""):
            registered = self._agent.register_memory(memory, region.kind)
        try:
            yield
        finally:
            self._forget(self._agent.deregister_memory, registered)

    def window(self, region: Region) -> Window:
        """Return what the other side needs to write to registered memory."""
        device = -1 if region.device is None else region.device
        return Window(self._agent.get_agent_metadata(), region.address, device)

    @contextmanager
    def written_to(self) -> Iterator[None]:
        """Let the other side write, on a thread, while this one waits for its message."""
        done = threading.Event()

        def run() -> None:
            with suppress(OSError):  # the other side sees it, too
                while not done.wait(_PROGRESS_SECONDS):
                    self.progress()

        thread = start_thread(run)
        try:
            yield
        finally:
            done.set()
            thread.join()

    def write(
        self,
        here: Region,
        window: Window,
        offset: int,
        least: float,
        check: Callable[[], None],
        report: Callable[[int], None],
    ) -> int:
        """Write registered memory of a file from ``offset`` on, while that is not slower than ``least`` bytes a second.

        Nothing is written if NIXL cannot write such memory. ``report`` is called with the offset that is reached, which
        is returned. Raises as read().
        """
        device = None if window.device < 0 else window.device
        with _translated():
            peer = self._agent.add_remote_agent(window.metadata)
        connected = False
        try:
            while offset < here.size:
                began, size = time.monotonic(), min(_STEP_BYTES, here.size - offset)
                source = Region(here.address + offset, size, here.device)
                try:
                    self._move("WRITE", source, Region(window.address + offset, size, device), peer, check)
                except ConnectionEnded:
                    if connected:
                        raise
                    break  # NIXL has registered this memory, and cannot move it
                offset += size
                report(offset)
                if connected and size / (time.monotonic() - began) < least:
                    break
                connected = True
        finally:
            self._forget(self._agent.remove_remote_agent, peer)  # the next file may have the same addresses
        return offset

    def measure(self, check: Callable[[], None]) -> float:
        """Return how many bytes a second are read, after a first round that connects and allocates."""
        for slot in range(SLOTS):
            self.read(slot, BLOCK_BYTES, check)
        began = time.monotonic()
        for slot in range(SLOTS):
            self.read(slot, BLOCK_BYTES, check)
        return SLOTS * BLOCK_BYTES / (time.monotonic() - began)


@contextmanager
def _translated(what: str = "the connection ended: ") -> Iterator[None]:
    """Raise ConnectionEnded for what NIXL raises, which has many kinds."""
    try:
        yield
    except ChannelError:  # of what is called during a wait
        raise
    except Exception as error:  # noqa: BLE001 - as above
        raise ConnectionEnded(errno.ECONNRESET, f"{what}NIXL: {str(error) or type(error).__name__}") from None
