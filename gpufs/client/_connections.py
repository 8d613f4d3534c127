"""The connections to daemons that copies use again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from gpufs.client import _find
from gpufs.client._connection import Connection
from gpufs.mounting import MountEntry


class Connections:
    """Idle connections by mount; any thread may take one. ``required``: an unreachable daemon is an error.

    Otherwise it is not tried again, and ``notice`` is called with one line, once for each such mount.
    """

    def __init__(self, *, required: bool, notice: Callable[[str], None] | None) -> None:
        self._required = required
        self._notice = notice
        self._process = os.getpid()
        self._lock = threading.Lock()  # guards all below
        self._idle: dict[int, list[Connection]] = {}  # by the mount's st_dev
        self._unreachable: set[int] = set()

    def close(self) -> None:
        """Ends the idle ones."""
        self.after_fork()
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def after_fork(self) -> None:
        """In a forked child: the connections are the parent's, and its threads may have held the lock."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._lock = threading.Lock()
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle = {}

    def give_back(self, device: int, connection: Connection) -> None:
        """Keeps a connection for the next copy."""
        with self._lock:
            self._idle.setdefault(device, []).append(connection)

    def take(self, device: int, mounts: list[MountEntry]) -> Connection | None:
        """A connection to a mount's daemon; None if there is none and the mount is used without it."""
        with self._lock:
            idle = self._idle.get(device, [])
            while idle:
                connection = idle.pop()
                if not connection.ended:
                    return connection
                connection.close()
            if device in self._unreachable:
                return None
        try:
            return Connection(_find.connect(device, mounts))
        except OSError as error:
            if self._required:
                raise
            why = error.strerror or str(error)
        with self._lock:
            known = device in self._unreachable
            self._unreachable.add(device)
        if not known and self._notice is not None:
            self._notice(
                f"{mounts[0].mountpoint}: its copy service cannot be reached ({why}): copying through the mount instead"
            )
        return None
