"""The volumes of a plug-in, in a file from which it continues after a kill.

A volume is in the file before anything of it exists, and until nothing of it does. The file has no secrets.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from gpufs.csi.volumes import Model, Volume

_VERSION: Final = 1
_KEY_BYTES: Final = 32
_LOCK_SECONDS: Final = 30.0


class _Saved(msgspec.Struct):
    version: int = _VERSION
    volumes: list[Volume] = []


class State:
    """The plug-in's directory. One process at a time has it. Thread-safe.

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
        os.chmod(self.directory, 0o700)
        self._fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
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
        path = os.path.join(self.directory, "key")
        try:
            with open(path, "rb") as file:
                key = file.read()
            if len(key) == _KEY_BYTES:
                return key
        except FileNotFoundError:
            pass
        key = secrets.token_bytes(_KEY_BYTES)
        self._replace("key", key)
        return key

    def _read(self) -> _Saved:
        path = os.path.join(self.directory, "state.json")
        try:
            with open(path, "rb") as file:
                saved = msgspec.json.decode(file.read(), type=_Saved)
        except FileNotFoundError:
            return _Saved()
        except msgspec.MsgspecError as error:
            text = f"{path}: {error}: remove it; pods that run now keep their volumes, and models stay on the mount"
            raise OSError(errno.EINVAL, text) from None
        if saved.version != _VERSION:
            raise OSError(errno.EINVAL, f"{path}: is of another version of gpufs ({saved.version})")
        return saved

    def _replace(self, name: str, content: bytes) -> None:
        """Write a file that is whole after any crash."""
        temporary = os.path.join(self.directory, f".{name}.new")
        with open(temporary, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, os.path.join(self.directory, name))
        os.fsync(self._fd)

    def _change(self, change: Callable[[list[Volume]], list[Volume]]) -> None:
        with self._lock:
            changed = _Saved(volumes=change(self._saved.volumes))
            if changed != self._saved:
                self._replace("state.json", msgspec.json.encode(changed))
                self._saved = changed

    def volumes(self) -> list[Volume]:
        """All volumes, also those that are being published."""
        with self._lock:
            return list(self._saved.volumes)

    def volume(self, volume_id: str) -> Volume | None:
        """The volume of this id."""
        return next((volume for volume in self.volumes() if volume.id == volume_id), None)

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
