"""The memory of registrations outlives the daemon: the keeper holds its descriptors, and what they are descriptors of.

Each registration has a range of keys there: first a memfd with a :class:`RegisteredMemory`, then the descriptors.
"""

import contextlib
import errno
import heapq
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gpufs.engine import Mount, SharedPiece
from gpufs.protocol import MAX_MEMORY_PIECES, Register, ShareKind
from gpufs.service._resources import Keeping
from gpufs.syscalls import close_all

log = logging.getLogger(__name__)

FIRST_KEY: Final = 1 << 31
LAST_KEY: Final = (1 << 32) - 1
_KEYS: Final = MAX_MEMORY_PIECES + 1  # of one registration
_MOST_DESCRIPTORS: Final = 1 << 14  # of all registrations. Those beyond end with the daemon


class RegisteredMemory(msgspec.Struct, frozen=True):
    """A client's memory that is the contents of a file. Offsets and sizes in bytes, as in protocol.Register.

    ``pieces``: offset and size of the memory behind each descriptor, for "descriptor"; empty for the other kinds.
    """

    kind: ShareKind
    offset: int
    size: int
    writable: bool
    handle: bytes
    pieces: list[tuple[int, int]]

    @classmethod
    def of(cls, wanted: Register, pieces: Sequence[SharedPiece]) -> "RegisteredMemory":
        """What a client has asked for, with the pieces that it has passed on."""
        layout = [(piece.offset, piece.bytes) for piece in pieces]
        return cls(wanted.kind, wanted.offset, wanted.size, wanted.writable, wanted.handle, layout)

    def register(self, mount: Mount, ino: int, descriptors: Sequence[int]) -> None:
        """Make it the contents of a file. The descriptors stay the caller's. OSError as Mount.inode_register()."""
        places = zip(self.pieces, descriptors, strict=False)
        mount.inode_register(
            ino,
            self.kind,
            descriptors[0] if self.kind == "file" else -1,
            offset=self.offset,
            size=self.size,
            writable=self.writable,
            handle=self.handle,
            pieces=[SharedPiece(offset, size, fd) for (offset, size), fd in places],
        )


@dataclass
class KeptRegistrations:
    """What the keeper holds for all registrations of a mount; nothing without a keeper. Any thread may call."""

    keeper: Keeping | None
    _lock: threading.Lock = field(default_factory=threading.Lock)  # guards all below
    _held: dict[int, list[int]] = field(default_factory=dict)  # descriptors that stay open here, by their number
    _free: list[int] = field(default_factory=list)  # numbers below the largest, a heap
    _descriptors: int = 0

    def hold(self, memory: RegisteredMemory, descriptors: Sequence[int]) -> int | None:
        """Have the keeper hold a registration's memory. Return its number; None where it ends with the daemon."""
        if self.keeper is None:
            return None
        copies: list[int] = []
        try:
            with self._lock:
                if self._descriptors + 1 + len(descriptors) > _MOST_DESCRIPTORS:
                    log.warning("registrations have too many pieces of memory: one of them ends with the daemon")
                    return None
                copies.append(os.memfd_create("gpufs-registration"))
                os.pwrite(copies[0], msgspec.json.encode(memory), 0)
                for descriptor in descriptors:
                    copies.append(os.dup(descriptor))
                number = heapq.heappop(self._free) if self._free else len(self._held)
                self._held[number] = copies
                self._descriptors += len(copies)
        except OSError as failure:
            close_all(copies)
            log.warning("a registration ends with the daemon: %s", failure.strerror)
            return None
        self.keeper.hold(dict(enumerate(copies, _first_key(number))))
        return number

    def drop(self, number: int) -> None:
        """A registration has ended."""
        with self._lock:
            copies = self._held.pop(number)
            self._descriptors -= len(copies)
            heapq.heappush(self._free, number)
        if self.keeper is not None:
            self.keeper.drop(range(_first_key(number), _first_key(number) + len(copies)))
        close_all(copies)

    def restore(self, held: Mapping[int, int]) -> None:
        """Take over what the keeper holds of the former daemon. Before anything is registered."""
        for key in sorted(key for key in held if FIRST_KEY <= key <= LAST_KEY):
            self._held.setdefault((key - FIRST_KEY) // _KEYS, []).append(held[key])
        self._descriptors = sum(map(len, self._held.values()))
        self._free = [number for number in range(max(self._held, default=0)) if number not in self._held]

    def register_again(self, mount: Mount, number: int | None, ino: int) -> None:
        """Give a file the memory that it had. OSError if that is impossible."""
        if number not in self._held:
            raise OSError(errno.ENODATA, "its memory was not kept")
        first, *descriptors = self._held[number]
        memory = msgspec.json.decode(os.pread(first, os.fstat(first).st_size, 0), type=RegisteredMemory)
        memory.register(mount, ino, descriptors)

    def drop_others(self, used: set[int | None]) -> None:
        """Drop what belongs to no registration: the former daemon had not finished it, or was ending it."""
        for number in set(self._held) - used:
            with contextlib.suppress(OSError):
                self.drop(number)


def _first_key(number: int) -> int:
    return FIRST_KEY + number * _KEYS
