"""The daemon's side of the keeper: the process that holds a mount's descriptors and acts when the daemon has died.

``native/keeper/keeper.cc`` is that process, and describes the messages. The engine sends them. Only a daemon
that could not start sends its reason by itself (:func:`send_reason`).
"""

import errno
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Final

from gpufs import engine
from gpufs.syscalls import os_error

PROGRAM: Final = Path(__file__).with_name("gpufs-keeper")

_HEADER: Final = struct.Struct("=II")  # the kind, and how many numbers follow
_NUMBER_BYTES: Final = 8
_BATCH: Final = 200  # numbers in a message, and descriptors


class Key(IntEnum):
    """The keeper's descriptors. Numbers from 2**20 on are those of service/_kept.py, from 2**32 on for memory."""

    CONNECTION = 1  # /dev/fuse
    JOURNAL = 2  # which the engine has it hold
    REQUEST = 3  # a memfd with the launcher's request
    OWNER = 4  # the process with which the mount ends
    LOG = 5  # standard error or the journal of systemd, where there is no log file
    DEATHS = 6  # a memfd in which the keeper notes deaths of daemons


class MessageKind(IntEnum):
    """The kinds of messages, but for those that the engine sends by itself."""

    RESTART = 3  # the program that takes over when this daemon has died
    GIVE_UP = 4  # the one that runs if none can take over
    HAND_OVER = 5  # this daemon ends next, so that another one takes over
    SERVES = 8  # it answers requests: if it dies, the next one is started at once
    WHY = 9  # why it ends next
    READY = 17
    RELEASED = 18


class Keeper(engine.KeeperLink):
    """The keeper of one mount. As a context manager, it ends with the context."""

    def __init__(self, mountpoint: str, held: Mapping[int, int] | None = None, fd: int = -1) -> None:
        """Start the process (or OSError), or adopt the one that has started this daemon and sent what is ``held``."""
        super().__init__(os.fspath(PROGRAM), mountpoint, fd, held)

    def instruct(self, kind: MessageKind, command: Sequence[str]) -> None:
        """Set the program of RESTART or GIVE_UP, which gets the environment of this daemon; empty for none."""
        words = [*map(os.fsencode, command), *(name + b"=" + value for name, value in os.environb.items())]
        self.note(kind, [len(command)], new_memfd("gpufs-program", b"".join(word + b"\0" for word in words)))

    def fails(self, reason: str) -> None:
        """Announce why this daemon ends next. The keeper shows it while no daemon runs."""
        self.note(MessageKind.WHY, _as_numbers(reason))

    def __exit__(self, *exception: object) -> None:
        self.end()


def send_reason(fd: int, reason: str) -> None:
    """Do as :meth:`Keeper.fails` by the socket, for a daemon that does not know what its keeper holds."""
    numbers = _as_numbers(reason)
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as keeper:
        keeper.send(_HEADER.pack(MessageKind.WHY, len(numbers)) + struct.pack(f"={len(numbers)}Q", *numbers))


def _as_numbers(text: str) -> tuple[int, ...]:
    data = text.encode(errors="replace")[: _BATCH * _NUMBER_BYTES - 1]
    count = len(data) // _NUMBER_BYTES + 1
    return struct.unpack(f"={count}Q", data.ljust(count * _NUMBER_BYTES, b"\0"))


def receive_held(fd: int) -> tuple[dict[int, int], list[int], int]:
    """Return what the keeper holds, for a daemon that takes over: descriptors by their keys, which the caller owns.

    Also returns the handles of files that were closed while there was no daemon, and when the daemon before this one
    had ended, in nanoseconds of CLOCK_MONOTONIC. OSError if the keeper cannot pass on everything.
    """
    held: dict[int, int] = {}
    released: list[int] = []
    with socket.socket(fileno=os.dup(fd)) as keeper:
        while True:
            data, descriptors, flags, _ = socket.recv_fds(
                keeper, _HEADER.size + _BATCH * _NUMBER_BYTES, _BATCH, socket.MSG_CMSG_CLOEXEC
            )
            if not data:
                raise OSError(errno.ECONNRESET, "the keeper has ended or cannot pass on what it holds")
            kind, count = _HEADER.unpack_from(data)
            numbers = struct.unpack_from(f"={count}Q", data, _HEADER.size)
            if kind == MessageKind.READY:
                return held, released, numbers[0]
            if kind == MessageKind.RELEASED:
                released += numbers
                continue
            if flags & socket.MSG_CTRUNC:
                raise os_error(errno.EMFILE)
            held.update(zip(numbers, descriptors, strict=True))


def new_memfd(name: str, contents: bytes) -> int:
    """Return a descriptor of memory with these contents."""
    memfd = os.memfd_create(name)
    with open(memfd, "wb", closefd=False) as file:
        file.write(contents)
    return memfd
