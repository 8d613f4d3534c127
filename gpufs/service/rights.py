"""Which users may send each message of a client: one table, by which the dispatcher finds what each handler asks first.

A message without a row is refused. A handler gets its check, and has what it works on from that alone. docs/security.md
shows the same table.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import EINVAL, EPERM
from typing import Any, Final

from gpufs import protocol
from gpufs.protocol import ClientMessage, ProtocolError
from gpufs.service import _checks
from gpufs.service._served_mount import ServedMount
from gpufs.syscalls import FileIdentity, trusted

EVERYBODY: Final = "every user who can connect"
HOLDERS: Final = "every user, with descriptors that allow it"
ITSELF: Final = "the connection that began it"
ASKED: Final = "a program that was asked"
OWNERS: Final = "the file's owner, root, the user who mounted"
MOUNTERS: Final = "root, the user who mounted"

_FOREIGN_IPC: Final = (
    "an IPC handle does not prove whose memory it stands for, so the daemon takes it only from its own user and from "
    "root: use memory that can be exported as a descriptor, or a mount of your own"
)


@dataclass(frozen=True, slots=True)
class Sender:
    """The client that sends a message, and what comes with it."""

    uid: int
    served: ServedMount
    fds: Sequence[int]


def _nothing(_sender: Sender, _message: Any) -> None:
    """Accept: the numbers in a message mean what its own connection has, and nothing of another's."""


@dataclass(frozen=True, slots=True)
class Right:
    """``who``: in words. ``descriptors``: how many come with the message.

    ``check``: returns what the message is about. OSError if it is refused. It opens nothing, but descriptors of files
    on other file systems may make it wait for their servers.
    """

    who: str
    descriptors: tuple[int, ...] = (0,)
    check: Callable[[Sender, Any], Any] = _nothing


def _copy(sender: Sender, copy: protocol.Copy) -> tuple[FileIdentity, FileIdentity]:
    host, mount = sender.fds
    return _checks.check_copy(copy.direction, host, mount, sender.served.st_dev)


def _attach(sender: Sender, attach: protocol.Attach) -> tuple[int, bool]:
    return _checks.check_attachable(sender.fds[0], attach.mode, sender.served.st_dev)


def _register(sender: Sender, register: protocol.Register) -> int:
    is_ipc = register.kind == "ipc"
    if len(sender.fds) != (1 if is_ipc else 2) or is_ipc != bool(register.handle):
        raise OSError(EINVAL, "only an IPC handle comes without the descriptor of the memory")
    if is_ipc and not trusted(sender.uid):
        raise OSError(EPERM, _FOREIGN_IPC)
    for memory in sender.fds[1:]:
        _checks.check_shareable(memory)
    return _checks.check_registrable(sender.fds[0], sender.served.st_dev)


def _check_owner(sender: Sender, ino: int) -> None:
    if not sender.served.owned_by(sender.uid, ino):
        raise OSError(EPERM, f"only the owner of a file (inode {ino}), root and the user who mounted may do that")


def _move(sender: Sender, message: protocol.Park | protocol.BringBack) -> list[int]:
    inodes = list(dict.fromkeys(message.inodes))
    for ino in inodes:
        with suppress(FileNotFoundError):  # removed by now
            _check_owner(sender, ino)
    return inodes


def _revoke(sender: Sender, _message: protocol.Revoke) -> int:
    ino = _checks.check_revocable(sender.fds[0], sender.served.st_dev)
    _check_owner(sender, ino)
    return ino


def _set_quota(sender: Sender, _message: protocol.SetQuota) -> int:
    if not trusted(sender.uid):
        raise OSError(EPERM, "only root and the user who mounted may change limits")
    return _checks.check_limitable(sender.fds[0], sender.served.st_dev)


TABLE: Final[Mapping[type[ClientMessage], Right]] = {
    protocol.Hello: Right(EVERYBODY),
    protocol.Copy: Right(HOLDERS, (2,), _copy),
    protocol.Cancel: Right(ITSELF),
    protocol.Attach: Right(HOLDERS, (1,), _attach),
    protocol.Refresh: Right(ITSELF),
    protocol.Detach: Right(ITSELF),
    protocol.Check: Right(ITSELF),
    protocol.Sleep: Right(ITSELF),
    protocol.Wake: Right(ITSELF),
    protocol.Park: Right(OWNERS, (0,), _move),
    protocol.BringBack: Right(OWNERS, (0,), _move),
    protocol.Listen: Right(EVERYBODY),
    protocol.Declined: Right(ASKED),
    protocol.Register: Right(HOLDERS, (1, 2), _register),
    protocol.Unregister: Right(ITSELF),
    protocol.Revoke: Right(OWNERS, (1,), _revoke),
    protocol.SetQuota: Right(MOUNTERS, (1,), _set_quota),
}


def of(message: ClientMessage, descriptors: int) -> Right:
    """Return the row of a message. ProtocolError if there is none, or so many descriptors do not belong to it."""
    right = TABLE.get(type(message))
    if right is None:
        raise ProtocolError(f"nobody may send {type(message).__name__}")
    if descriptors not in right.descriptors:
        raise ProtocolError(f"a message {type(message).__name__} with {descriptors} descriptors")
    return right
