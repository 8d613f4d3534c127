"""Where a daemon's log goes."""

import contextlib
import errno
import logging
import os

from gpufs import engine
from gpufs.startup import StartFailure

log = logging.getLogger("gpufs.daemon")

_LOG_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
_LOG_DATE = "%Y-%m-%d %H:%M:%S"


def _open_log(path: str) -> int:
    # A pipe that nobody reads is an error (ENXIO) and not something to wait for.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o640)
    os.set_blocking(fd, True)
    return fd


class _Lines(logging.Handler):
    """Writes lines to a descriptor. One that cannot be written (a full disk) is lost, as those of the engine are."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode(errors="surrogateescape")  # names of files are bytes
        with contextlib.suppress(OSError):
            os.write(self._fd, line)


class Log:
    """Where log lines of both planes go: a file that can be reopened, standard error, or nowhere."""

    def __init__(self, path: str | None, level: str, *, foreground: bool) -> None:
        self._path = path
        self._level = int(getattr(logging, level.upper()))
        self._fd = -1
        if path is not None:
            try:
                self._fd = _open_log(path)
            except OSError as failure:
                raise StartFailure(failure.errno or errno.EIO, f"log_file: {path}: {failure.strerror}") from None
        elif foreground:
            self._fd = os.dup(2)
        root = logging.getLogger()
        for old in list(root.handlers):
            root.removeHandler(old)
        if self._fd >= 0:
            handler = _Lines(self._fd)
            handler.setFormatter(logging.Formatter(_LOG_FORMAT, _LOG_DATE))
            root.addHandler(handler)
            engine.log_configure(self._fd, self._level)
        else:
            root.addHandler(logging.NullHandler())
        root.setLevel(self._level)

    @property
    def fd(self) -> int:
        """The descriptor that lines go to, -1 for nowhere."""
        return self._fd

    def reopen(self) -> None:
        """After the file was renamed by a log rotation: goes on in a new one of the old name."""
        if self._path is None:
            return
        try:
            fresh = _open_log(self._path)
        except OSError as failure:
            log.error("the log stays in the old file: %s: %s", self._path, failure.strerror)
            return
        # The same descriptor number, so that nobody who writes there has to be told.
        os.dup2(fresh, self._fd, inheritable=False)
        os.close(fresh)
