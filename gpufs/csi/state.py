"""The volumes of a plug-in, in a file from which it continues after a kill.

A volume is in the file before anything of it exists, and until nothing of it does. The file has no secrets. If it is
lost, the kubelet's next call for a volume that is bound puts it there again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from gpufs.csi.volumes import Model, Volume

_VERSION: Final = 1
_FILE: Final = "state.json"
_KEY_BYTES: Final = 32
_LOCK_SECONDS: Final = 30.0


class _Saved(msgspec.Struct):
    version: int = _VERSION
    volumes: list[Volume] = []


class State:
    """The plug-in's directory, open from its start. One process at a time has it. Thread-safe.

    Attributes
    ----------
    directory : str
        Its path.
    key : bytes
        Of this node, for the identity of secrets.
    """

    def __init__(self, directory: str) -> None:
        """Read it. OSError if it cannot be used: EBUSY while another plug-in has it."""
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
            self._saved = self._read()
        except BaseException:
            os.close(self._fd)
            raise
        self._lock = threading.Lock()  # guards _saved

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
        key = self._content("key")
        if key is not None and len(key) == _KEY_BYTES:
            return key
        key = secrets.token_bytes(_KEY_BYTES)
        self._replace("key", key)
        return key

    def _content(self, name: str) -> bytes | None:
        try:
            with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def _read(self) -> _Saved:
        path = os.path.join(self.directory, _FILE)
        content = self._content(_FILE)
        if content is None:
            return _Saved()
        try:
            saved = msgspec.json.decode(content, type=_Saved)
        except ValueError as error:  # msgspec's is one
            text = f"{path}: {error}: remove it; what pods show stays, and the kubelet's next calls name the volumes"
            raise OSError(errno.EINVAL, text) from None
        if saved.version != _VERSION:
            raise OSError(errno.EINVAL, f"{path}: is of another version of gpufs ({saved.version})")
        return saved

    def _replace(self, name: str, content: bytes) -> None:
        """Write a file that is whole after any crash."""
        temporary = f".{name}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o600, dir_fd=self._fd), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        os.fsync(self._fd)

    def _change(self, change: Callable[[list[Volume]], list[Volume]]) -> None:
        with self._lock:
            changed = _Saved(volumes=change(self._saved.volumes))
            if changed != self._saved:
                self._replace(_FILE, msgspec.json.encode(changed))
                self._saved = changed

    def volumes(self) -> list[Volume]:
        """All volumes, also those that are being published."""
        with self._lock:
            return list(self._saved.volumes)

    def volume(self, volume_id: str) -> Volume | None:
        """The volume of this id."""
        return next((one for one in self.volumes() if one.id == volume_id), None)

    def add(self, volume: Volume) -> None:
        """Add a volume. OSError if it cannot be written."""
        self._change(lambda volumes: [*volumes, volume])

    def replace(self, volume: Volume, other: Volume) -> None:
        """Put another one in the place of a volume. OSError if it cannot be written."""
        self._change(lambda volumes: [other if one == volume else one for one in volumes])

    def remove(self, volume: Volume) -> None:
        """Remove one, if it is there."""
        self._change(lambda volumes: [one for one in volumes if one != volume])

    def models(self) -> set[Model]:
        """The models of all volumes."""
        return {volume.model for volume in self.volumes()}

    def close(self) -> None:
        """Let another process have it."""
        os.close(self._fd)
