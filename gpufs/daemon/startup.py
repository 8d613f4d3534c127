"""The launcher's request to mount, and the daemon's answer to it."""

import errno
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any, Final

from gpufs import config, mounting

# Never with the current directory in the module search path: another user may own it. The daemon ignores PYTHON
# variables and the user's own packages if the process that starts it does.
_PYTHON_OPTIONS: Final = ["-I"] if sys.flags.isolated else ["-P", *(["-s"] if sys.flags.no_user_site else [])]
# Start them with the working directory "/".
PYTHON: Final = (sys.executable, *_PYTHON_OPTIONS)
DAEMON: Final = (*PYTHON, "-m", "gpufs.daemon")


class StartFailure(Exception):
    """The mount cannot be started: an errno and one line for the user."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.errno = code
        self.message = message

    @classmethod
    def of(cls, failure: OSError, prefix: str = "") -> "StartFailure":
        """Return the failure that an OSError describes."""
        return cls(failure.errno or errno.EIO, prefix + (failure.strerror or str(failure)))


def is_journal(fd: int) -> bool:
    """Return whether a descriptor leads to systemd's journal: systemd names the journal's stream in JOURNAL_STREAM."""
    try:
        status = os.fstat(fd)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


@dataclass(frozen=True, slots=True)
class MountRequest:
    """The request to mount. It is passed as one JSON object on the daemon's standard input."""

    mountpoint: str
    source: str  # what mount(8) and df(1) show as the device
    config: dict[str, Any]  # a value for each knob
    flags: tuple[str, ...] = ()  # names of mounting.FLAGS
    owner: int | None = None  # the process with which the mount ends

    @property
    def foreground(self) -> bool:
        """Whether the daemon keeps the launcher's terminal."""
        return bool(self.config["foreground"])

    def encode(self) -> bytes:
        """Return the JSON object."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "MountRequest":
        """The request of such an object. StartFailure if that is not what a launcher sends."""
        try:
            request = cls(**json.loads(data))
            defaults = {name: knob.default for name, knob in config.BY_NAME.items()}
            flags = tuple(name for name in mounting.FLAGS if name in request.flags)
            return cls(request.mountpoint, request.source, defaults | request.config, flags, request.owner)
        except (ValueError, TypeError) as failure:
            raise StartFailure(errno.EINVAL, f"the daemon got no valid request: {failure}") from None


class LauncherAnswer:
    """The line that the launcher waits for. It is sent at most once."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def send(self, fields: dict[str, Any]) -> bool:
        """Return False if no launcher waits for it (any more). OSError if the launcher has gone."""
        if self._fd is None:
            return False
        fd, self._fd = self._fd, None
        try:
            os.write(fd, json.dumps(fields).encode() + b"\n")
        finally:
            os.close(fd)
        return True
