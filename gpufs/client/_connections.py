"""The connections to daemons that copies use again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Final

from gpufs.client import _find
from gpufs.client._connection import Connection
from gpufs.mounting import MountEntry

# An unreachable daemon is tried again after this many seconds, plus this many times the duration of the failed try.
_RETRY_SECONDS: Final = 1.0
_RETRY_FACTOR: Final = 10.0


class Connections:
    """Idle connections by mount; any thread may take one. ``required``: an unreachable daemon is an error.

    ``notice``: called with one line, once for each mount whose daemon cannot be reached.
    """

    def __init__(self, *, required: bool, notice: Callable[[str], None] | None) -> None:
        self._required = required
        self._notice = notice
        self._process = os.getpid()
        self._lock = threading.Lock()  # guards all below
        self._idle: dict[int, list[Connection]] = {}  # by the mount's st_dev
        self._unreachable: dict[int, tuple[float, OSError]] = {}  # until when, and why
        self._noticed: set[int] = set()

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
                if connection.usable():
                    return connection
                connection.close()
            until, failure = self._unreachable.get(device, (0.0, None))
        began = time.monotonic()
        if failure is None or began >= until or self._required:
            try:
                return Connection(_find.connect(device, mounts))
            except OSError as error:
                failure = error
            if self._required:
                raise failure
            now = time.monotonic()
            with self._lock:
                self._unreachable[device] = (now + _RETRY_SECONDS + _RETRY_FACTOR * (now - began), failure)
        with self._lock:
            known = device in self._noticed
            self._noticed.add(device)
        if not known and self._notice is not None:
            why = failure.strerror or str(failure)
            self._notice(
                f"{mounts[0].mountpoint}: its copy service cannot be reached ({why}): copying through the mount instead"
            )
        return None
