"""The process at the other end of a connection, and what its copies and leases need of the connection."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from gpufs import protocol
from gpufs.service._holdings import Holdings

T = TypeVar("T")
_COMMAND_BYTES: Final = 15  # of a process's name, as the kernel keeps it


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end. Used for logs and limits; it grants nothing."""

    pid: int
    uid: int
    gid: int

    def __str__(self) -> str:
        return f"process {self.pid} of user {self.uid}"


class Client(Protocol):
    """A connection, for its copies and leases."""

    async def send(self, message: protocol.ServerMessage, descriptors: Sequence[int] = ()) -> None: ...

    async def in_thread(self, work: Callable[[], T], holdings: Holdings) -> T: ...

    def log(self, level: int, text: str, *arguments: object) -> None: ...

    def send_if_possible(self, message: protocol.ServerMessage) -> None: ...

    def hang_up(self) -> None: ...


def path_of(fd: int) -> str:
    """The path of an open file as this process sees it, "" if it cannot be found."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def program_of(pid: int) -> str:
    """The name of a process, "" if it cannot be seen."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read(_COMMAND_BYTES + 1).decode(errors="replace").strip()
    except OSError:
        return ""
