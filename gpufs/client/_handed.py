"""A copy that the command's launcher has asked for, while Python was starting; native/launcher/hand_over.h says how."""

from __future__ import annotations

import _socket
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass
    from typing import Final
else:
    from gpufs.client._record import dataclass

_VARIABLE: Final = "GPUFS_HANDED"


@dataclass(frozen=True)
class Handed:
    """A copy under way: both files, and the socket on which its daemon has been greeted and asked for it.

    ``began``: seconds, by :func:`time.monotonic`. ``size``: the source's bytes. ``created``: the destination was not
    there before. ``signals``: those that have been blocked since and wait for somebody who ends the copy.
    """

    began: float
    direction: str
    size: int
    sock: _socket.socket
    source_fd: int
    destination_fd: int
    created: bool
    signals: tuple[int, ...]
    destination: str


def take() -> Handed | None:
    """What this process was handed when it became this program, once; None if nothing was."""
    text = os.environ.pop(_VARIABLE, "")
    process, _, rest = text.partition(":")
    if process != str(os.getpid()):
        return None  # inherited
    began, direction, size, connection, source, destination, created, signals, name = rest.split(":", 8)
    for fd in (connection, source, destination):
        os.set_inheritable(int(fd), False)
    return Handed(
        int(began) / 1e9,
        direction,
        int(size),
        _socket.socket(fileno=int(connection)),
        int(source),
        int(destination),
        created == "1",
        tuple(map(int, filter(None, signals.split(",")))),
        name,
    )
