"""Bytes of files by NIXL: from a buffer of one machine straight into a buffer of the other, by RDMA where there is any.

Both sides register as many slots. The receiver reads a slot of the sender into its own slot of the same number. NIXL's
own thread, which keeps a core busy, is not used: the sender calls progress() while it waits.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import secrets
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final

from gpufs.nodes.channel import BLOCK_BYTES, ConnectionEnded
from gpufs.nodes.messages import Offer

SLOTS: Final = 4
# Copies of fewer bytes are over before NIXL is ready, which takes one to three seconds.
LEAST_BYTES: Final = 1 << 30
_MOST_SECONDS: Final = 10.0  # for one block
_POLL_SECONDS: Final = 50e-6


def is_installed() -> bool:
    """Return whether this machine has NIXL."""
    return find_spec("nixl") is not None


class Bounce:
    """The slots of this side. One thread uses it.

    Raises OSError if NIXL has no agent here.
    """

    def __init__(self) -> None:
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")  # it logs to standard output
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            logging.getLogger("nixl").setLevel(logging.ERROR)  # this one, too
            self._agent: Any = nixl_agent(
                secrets.token_hex(8), nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            )
            self._memory = mmap.mmap(-1, SLOTS * BLOCK_BYTES)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self._registered = self._agent.register_memory([(self._address, SLOTS * BLOCK_BYTES, 0, "")], "DRAM")
            self.offer = Offer(self._agent.get_agent_metadata(), self._address)
        except Exception as error:  # noqa: BLE001 - NIXL raises many kinds
            raise _failure(error) from None
        self._view = memoryview(self._memory)
        self._peer = ""
        self._there = 0

    def close(self) -> None:
        """Withdraw the slots. The other side must have used them."""
        try:
            self._agent.deregister_memory(self._registered)
        except Exception:  # noqa: BLE001 - the end of the process does it, too
            pass

    def connect(self, offer: Offer) -> None:
        """Reach the slots of the other side. OSError if that is not possible."""
        try:
            self._peer = self._agent.add_remote_agent(offer.metadata)
            self._there = offer.address
        except Exception as error:  # noqa: BLE001 - as above
            raise _failure(error) from None

    def slot(self, number: int) -> memoryview:
        """Return the memory of a slot."""
        return self._view[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]

    def progress(self) -> None:
        """Let the other side reach the slots of this one."""
        try:
            self._agent.get_new_notifs()
        except Exception as error:  # noqa: BLE001 - as above
            raise _failure(error, "the connection ended: ") from None

    def read(self, slot: int, size: int, check: Callable[[], None]) -> None:
        """Read the first bytes of a slot there. Raises ConnectionEnded, and what ``check`` raises during the wait."""
        deadline = time.monotonic() + _MOST_SECONDS
        offset = slot * BLOCK_BYTES
        try:
            here = self._agent.get_xfer_descs([(self._address + offset, size, 0)], "DRAM")
            there = self._agent.get_xfer_descs([(self._there + offset, size, 0)], "DRAM")
            handle = self._agent.initialize_xfer("READ", here, there, self._peer)
            state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() < deadline:
                check()
                time.sleep(_POLL_SECONDS)
                state = self._agent.check_xfer_state(handle)
            if state == "DONE":
                handle.release()
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            raise _failure(error, "the connection ended: ") from None
        if state != "DONE":
            text = f"the connection ended: NIXL has not moved a block in {_MOST_SECONDS:.0f} seconds"
            raise ConnectionEnded(errno.ETIMEDOUT, text)

    def measure(self, check: Callable[[], None]) -> float:
        """Return how many bytes a second are read, after a first round that connects and allocates."""
        for slot in range(SLOTS):
            self.read(slot, BLOCK_BYTES, check)
        began = time.monotonic()
        for slot in range(SLOTS):
            self.read(slot, BLOCK_BYTES, check)
        return SLOTS * BLOCK_BYTES / (time.monotonic() - began)


def _failure(error: Exception, what: str = "") -> ConnectionEnded:
    return ConnectionEnded(errno.ECONNRESET, f"{what}NIXL: {str(error) or type(error).__name__}")
