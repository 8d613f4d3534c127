"""A new daemon takes a mount over from one that has died: what that needs, and how it begins."""

import errno
from dataclasses import dataclass
from typing import Any, Final

from gpufs.daemon.keeper import Keeper, Key, new_memfd, receive_held
from gpufs.daemon.logs import Log
from gpufs.daemon.startup import DAEMON, MountRequest, StartFailure

_SOCKET: Final = 3  # where the keeper puts a new daemon's socket


def obstacle(values: dict[str, Any]) -> str | None:
    """Return the reason why a mount with these values of the knobs does not survive its daemon. None if it does."""
    if values["backing"]:
        return "it shows directories of the host (backing)"
    return "this version cannot restore a mount"


def prepare(keeper: Keeper, request: MountRequest, logs: Log, *, connection: int, owner: int) -> None:
    """Give the keeper what the next daemon needs to begin, and the command that starts it.

    Parameters
    ----------
    connection
        The descriptor of /dev/fuse.
    owner
        A descriptor of the process with which the mount ends; -1 for none.
    """
    held: dict[int, int] = {Key.CONNECTION: connection, Key.REQUEST: new_memfd("gpufs-request", request.encode())}
    if owner >= 0:
        held[Key.OWNER] = owner
    if logs.fd >= 0 and request.config["log_file"] is None:
        held[Key.LOG] = logs.fd
    keeper.hold(held)
    keeper.restart_with([*DAEMON, "--takeover-fd", str(_SOCKET), request.mountpoint])


@dataclass(frozen=True, slots=True)
class Takeover:
    """What a new daemon begins with.

    Parameters
    ----------
    held
        The descriptors that the keeper holds, by :class:`Key` and by the journal's numbers of memory.
    died
        When the former daemon had ended, in nanoseconds of CLOCK_MONOTONIC.
    """

    request: MountRequest
    keeper: Keeper
    held: dict[int, int]
    died: int


def begin(fd: int, mountpoint: str) -> Takeover:
    """Receive everything from the keeper at the other end of a socket. StartFailure if that is not enough."""
    try:
        held, died = receive_held(fd)
        keeper = Keeper(mountpoint, held, fd)
    except OSError as failure:
        raise StartFailure.of(failure, "cannot take over: ") from None
    if missing := [key.name.lower() for key in (Key.CONNECTION, Key.REQUEST) if key not in held]:
        raise StartFailure(errno.EINVAL, f"cannot take over: the keeper does not hold {' and '.join(missing)}")
    with open(held[Key.REQUEST], "rb", closefd=False) as file:
        file.seek(0)
        request = MountRequest.decode(file.read())
    return Takeover(request, keeper, held, died)


def restore(takeover: Takeover, logs: Log) -> None:
    """Serve the mount again, from its journal, until it ends. StartFailure if it cannot be restored."""
    raise StartFailure(errno.ENOSYS, f"{takeover.request.mountpoint}: cannot restore the mount: not implemented")
