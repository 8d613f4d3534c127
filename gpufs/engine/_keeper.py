"""The engine's side of the keeper: the process that holds a mount's descriptors for the next daemon."""

import os
from collections.abc import Iterable, Mapping, Sequence

from gpufs.engine._binding import HANDLE, Handle, check, reason_of, result_of
from gpufs.engine._native import ffi, lib


class KeeperLink(Handle):
    """The link to the keeper of one mount. Thread-safe. Closing it leaves the keeper alone.

    If the keeper ends, or does not take what is sent, the engine replaces it, and the next one gets everything.

    Parameters
    ----------
    program
        The path of ``gpufs-keeper``.
    mountpoint
        Its argument.
    fd, held
        Of a process that the keeper has started: the socket, which the link takes over, also when this fails, and the
        descriptors that the keeper holds, by their keys. Without them a keeper is started.

    Raises
    ------
    EngineError
        It cannot be started.
    """

    __slots__ = ()

    def __init__(self, program: str, mountpoint: str, fd: int = -1, held: Mapping[int, int] | None = None) -> None:
        words = (os.fsencode(program), os.fsencode(mountpoint))
        self._own(result_of(HANDLE, lib.gpufs_keeper_open, *words, fd, *_listed(held or {})))

    def hold(self, descriptors: Mapping[int, int]) -> None:
        """Make the keeper hold descriptors, each under its key, in place of what it holds there.

        They must stay open here until :meth:`drop`: the next keeper gets them again. Waits for a keeper that is slow,
        as :meth:`drop` does.
        """
        check(lib.gpufs_keeper_hold(self._handle, *_listed(descriptors)))

    def drop(self, keys: Iterable[int]) -> None:
        """Make the keeper close what it holds under the keys."""
        dropped = list(keys)
        check(lib.gpufs_keeper_drop(self._handle, dropped, len(dropped)))

    def note(self, kind: int, numbers: Sequence[int] = (), fd: int = -1) -> None:
        """Send a message, and to later keepers the last one of each kind. Takes over the descriptor."""
        check(lib.gpufs_keeper_note(self._handle, kind, numbers, len(numbers), fd))

    def obstacle(self) -> str | None:
        """Return the reason why the keeper does not have everything; None if it has."""
        return reason_of(lib.gpufs_keeper_health, self._handle)

    def end(self) -> None:
        """End the keeper, which closes everything that it holds. Return when it has ended."""
        check(lib.gpufs_keeper_end(self._handle))


def _listed(held: Mapping[int, int]) -> tuple[object, int]:
    return ffi.new("gpufs_kept_fd[]", list(held.items())), len(held)
