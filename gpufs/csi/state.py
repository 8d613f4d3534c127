"""What a plug-in knows: its volumes, in memory, and a key in its directory, which one process at a time has.

After a restart the kubelet names the volumes again: it repeats its calls while a pod runs (``requiresRepublish``).
Until then what is bound shows which models are in use.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import threading
import time
from typing import Final

from gpufs.csi.volumes import Model, Volume

_KEY: Final = "key"
_KEY_BYTES: Final = 32
_LOCK_SECONDS: Final = 30.0


class State:
    """The plug-in's directory, open from its start, and its volumes. Thread-safe.

    Attributes
    ----------
    directory : str
        Its path.
    key : bytes
        Of this node, for the identity of secrets.
    """

    def __init__(self, directory: str) -> None:
        """Open it. OSError if it cannot be used: EBUSY while another plug-in has it."""
        self.directory = os.path.realpath(directory)
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self._fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(self._fd)
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise OSError(errno.EPERM, f"{self.directory}: is not root's alone")
            os.fchmod(self._fd, 0o700)
            self._lock_directory()
            self.key = self._read_key()
        except BaseException:
            os.close(self._fd)
            raise
        self._lock = threading.Lock()  # guards _volumes
        self._volumes: dict[str, Volume] = {}  # by their ids

    def _lock_directory(self) -> None:
        """Wait until a plug-in that is ending has ended."""
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(errno.EBUSY, f"{self.directory}: another plug-in uses it") from None
            time.sleep(0.1)

    def _read_key(self) -> bytes:
        """Return the key, a new one if there is none or a crash has cut it off."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(_KEY, flags, 0o600, dir_fd=self._fd), "r+b") as file:
            if len(key := file.read()) != _KEY_BYTES:
                key = secrets.token_bytes(_KEY_BYTES)
                file.seek(0)
                file.truncate()
                file.write(key)
        return key

    def volumes(self) -> list[Volume]:
        """All volumes, also those that are being published."""
        with self._lock:
            return list(self._volumes.values())

    def volume(self, volume_id: str) -> Volume | None:
        """The volume of this id."""
        with self._lock:
            return self._volumes.get(volume_id)

    def put(self, volume: Volume) -> None:
        """Add a volume, in the place of one with the same id."""
        with self._lock:
            self._volumes[volume.id] = volume

    def remove(self, volume: Volume) -> None:
        """Remove one, if it is there."""
        with self._lock:
            self._volumes.pop(volume.id, None)

    def models(self) -> set[Model]:
        """The models of all volumes."""
        return {volume.model for volume in self.volumes()}

    def close(self) -> None:
        """Let another process have it."""
        os.close(self._fd)
