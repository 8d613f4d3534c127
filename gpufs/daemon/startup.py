"""What a daemon is told by its launcher, and what it answers: once it serves the mount, or why it does not."""

import errno
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from gpufs import config, mounting


class StartFailure(Exception):
    """The mount cannot come up: an errno and one line for the user."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.errno = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Request:
    """What the launcher wants."""

    mountpoint: str
    source: str
    config: dict[str, Any]
    foreground: bool
    flags: tuple[str, ...] = ()  # names of mounting.FLAGS

    @classmethod
    def read(cls, mountpoint: str) -> "Request":
        """From standard input. StartFailure where that is not what a launcher sends."""
        try:
            said = json.loads(sys.stdin.buffer.read())
            values = {name: said["config"].get(name, knob.default) for name, knob in config.BY_NAME.items()}
            flags = tuple(name for name in mounting.FLAGS if name in said.get("flags", ()))
            return cls(mountpoint, str(said.get("source", "gpufs")), values, bool(said.get("foreground")), flags)
        except (ValueError, KeyError, TypeError, AttributeError) as failure:
            raise StartFailure(errno.EINVAL, f"the daemon was not told what to mount: {failure}") from None


class Answer:
    """The line that the launcher waits for; given once."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def give(self, fields: dict[str, Any]) -> bool:
        """False where nobody waits for it (any more). OSError where the launcher has gone."""
        if self._fd is None:
            return False
        fd, self._fd = self._fd, None
        try:
            os.write(fd, json.dumps(fields).encode() + b"\n")
        finally:
            os.close(fd)
        return True
