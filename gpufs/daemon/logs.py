"""The daemon's log.

Logging a line never blocks, not even if nobody reads the pipe behind it, its terminal is stopped or its disk is frozen.
Both planes write into a pipe that serves as a queue; one thread copies from there to the log. Lines that find the queue
full are dropped and counted.
"""

import contextlib
import errno
import fcntl
import logging
import os
import select
import signal
import threading
import time
from collections import Counter
from typing import Final

from gpufs import engine
from gpufs._printable import printable
from gpufs.daemon.log_file import open_log_file
from gpufs.daemon.startup import StartFailure, is_journal
from gpufs.syscalls import trusted

log = logging.getLogger("gpufs.daemon")

_LOG_FORMAT: Final = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
_LOG_DATE: Final = "%Y-%m-%d %H:%M:%S"
# The journal has times of its own, and takes a line's priority from a number before it (sd-daemon(3)).
_PRIORITIES: Final = {b"CRITICAL": 2, b"ERROR": 3, b"WARNING": 4, b"INFO": 6, b"DEBUG": 7}
_QUEUE_BYTES: Final = 1 << 20
_ATOMIC_BYTES: Final = select.PIPE_BUF  # up to here the kernel does not interleave writes
_READ_BYTES: Final = 1 << 16
# Seconds at the end for lines that are still in the queue.
_END_GRACE: Final = 1.0
# Lines that one user may cause, and within how many seconds.
_USER_LINES: Final = 50
_USER_SECONDS: Final = 10.0


def _open_log(path: str) -> int:
    fd = open_log_file(path)
    os.set_blocking(fd, True)
    return fd


class _Formatter(logging.Formatter):
    """Keeps a message on its line: names of files and programs, which users choose, may contain anything."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)


class _Lines(logging.Handler):
    """Writes lines to the queue; those that do not fit are dropped and counted.

    Records with the attribute ``user`` were caused by that user's clients. Root and the mount's owner may cause any
    number of them, other users a limited number within some seconds.
    """

    def __init__(self, queue: int) -> None:
        super().__init__()
        self._queue = queue
        self._dropped = 0
        self._window = 0.0  # when the current count began
        self._users: Counter[int] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if self._over_limit(record):
            return
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            if not self._put(self._note(f"{dropped} lines dropped: the log is too slow")):
                self._dropped = dropped
        self._put(record)

    def _over_limit(self, record: logging.LogRecord) -> bool:
        user = getattr(record, "user", None)
        now = time.monotonic()
        if now >= self._window + _USER_SECONDS:
            self._window, users, self._users = now, self._users, Counter()
            for number, count in users.items():
                if count > _USER_LINES:
                    self._put(self._note(f"{count - _USER_LINES} more lines about user {number} left out"))
        if user is None or trusted(user):
            return False
        self._users[user] += 1
        return self._users[user] > _USER_LINES

    def _note(self, text: str) -> logging.LogRecord:
        return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)

    def _put(self, record: logging.LogRecord) -> bool:
        try:
            text = self.format(record)
        except Exception as failure:  # noqa: BLE001 - a wrong log line must not disturb what logs it
            text = f"a line cannot be logged: {type(failure).__name__}: {failure}"
        for line in _encoded(text).split(b"\n"):
            try:
                os.write(self._queue, line[: _ATOMIC_BYTES - 1] + b"\n")
            except BlockingIOError:
                self._dropped += 1
                return False
        return True


def _encoded(text: str) -> bytes:
    """Return the text in UTF-8. File names are bytes that stay as they are."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # half of a surrogate pair, as JSON can have it
        return text.encode(errors="backslashreplace")


def _copy_lines(queue: int, sink: int, path: str | None) -> None:
    """Copy lines until the queue's other end is closed. What cannot be written (a full disk) is lost.

    If the file at ``path`` has been renamed or removed, as logrotate does, a new one gets the next lines.
    """
    for_journal = is_journal(sink)
    rest = b""
    while data := os.read(queue, _READ_BYTES):
        if path is not None and not _is_at(path, sink):
            with contextlib.suppress(OSError):  # the old file keeps the log
                fresh = _open_log(path)
                os.dup2(fresh, sink, inheritable=False)
                os.close(fresh)
        if for_journal:
            *lines, rest = (rest + data).split(b"\n")
            data = b"".join(map(_journal_line, lines))
        while data:
            try:
                data = data[os.write(sink, data) :]
            except BlockingIOError:  # another program has made the same file non-blocking
                select.select([], [sink], [])
            except OSError:
                break


def _is_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False


def _journal_line(line: bytes) -> bytes:
    """Return a line of the log with its priority instead of time and level."""
    words = line.split(b" ", 3)  # date, time, level, text
    if len(words) == 4 and words[2] in _PRIORITIES:
        return b"<%d>%s\n" % (_PRIORITIES[words[2]], words[3])
    return line + b"\n"  # a later line of a traceback


class Log:
    """The destination of both planes' log lines: a file, standard error, the journal, or nothing.

    ``fd`` is a descriptor for the lines, as of systemd's journal, that the launcher has passed, or -1. The log owns it.
    """

    def __init__(self, path: str | None, level: str, *, foreground: bool, fd: int = -1) -> None:
        self._path = path
        self._level = int(getattr(logging, level.upper()))
        self._fd = -1
        self._queue = -1
        self._writer: threading.Thread | None = None
        if path is not None:
            try:
                self._fd = _open_log(path)
            except OSError as failure:
                raise StartFailure(failure.errno or errno.EIO, f"log_file: {path}: {failure.strerror}") from None
        elif foreground:
            self._fd = os.dup(2)
        else:
            self._fd = fd
        root = logging.getLogger()
        for old in list(root.handlers):
            root.removeHandler(old)
        if self._fd >= 0:
            self._start_writer()
            handler = _Lines(self._queue)
            handler.setFormatter(_Formatter(_LOG_FORMAT, _LOG_DATE))
            root.addHandler(handler)
            engine.log_configure(self._queue, self._level)
        else:
            root.addHandler(logging.NullHandler())
        root.setLevel(self._level)

    def _start_writer(self) -> None:
        reader, self._queue = os.pipe()
        os.set_blocking(self._queue, False)
        with contextlib.suppress(OSError):  # a user may have only so many large pipes
            fcntl.fcntl(self._queue, fcntl.F_SETPIPE_SZ, _QUEUE_BYTES)
        self._writer = threading.Thread(
            target=_copy_lines, args=(reader, self._fd, self._path), name="gpufs-log", daemon=True
        )
        # The main thread handles the signals: it blocks them while it mounts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._writer.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def fd(self) -> int:
        """The descriptor of the log itself, -1 if there is none."""
        return self._fd

    def close(self) -> None:
        """Wait at most a second until the queued lines are written. Later lines are dropped."""
        if self._writer is None:
            return
        engine.log_configure(-1, self._level)
        # Closes the queue's end but keeps its number, because a native thread may be about to write there.
        try:
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:  # no descriptor is left: give the number up
            os.close(self._queue)
        else:
            os.dup2(null, self._queue, inheritable=False)
            os.close(null)
        self._writer.join(_END_GRACE)
        self._writer = None
