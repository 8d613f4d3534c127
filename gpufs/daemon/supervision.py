"""The daemon's supervisors: systemd, and the guard that unmounts if the daemon dies."""

import functools
import logging
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from gpufs import threads

log = logging.getLogger("gpufs.daemon")

_GUARD: Final = Path(__file__).with_name("guard.py")
_GUARD_SECONDS: Final = 5.0  # to end after it was asked to
_SEND_SECONDS: Final = 5.0  # for a service manager whose queue is full


class ServiceManager:
    """sd_notify(3): datagrams to the socket that NOTIFY_SOCKET names; does nothing without one."""

    def __init__(self) -> None:
        # The programs that we start must not see them.
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        interval = os.environ.pop("WATCHDOG_USEC", "")
        for_us = os.environ.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_seconds = int(interval) / 1e6 if interval.isdecimal() and for_us else 0.0

    async def notify(self, text: str) -> None:
        """Sends assignments, one a line: "READY=1", "STOPPING=1"; "WATCHDOG=1" every ``watchdog_seconds`` if not 0."""
        if self._address:
            # On a thread: a service manager that does not read must not stop the mount.
            with suppress(OSError):  # no thread is free
                await threads.run(functools.partial(self._send, text.encode()), abandon_on_cancel=True)

    def _send(self, text: bytes) -> None:
        name = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_SEND_SECONDS)
                sender.connect(name)
                sender.send(text)
        except OSError as failure:
            log.warning("cannot notify the service manager at %s: %s", self._address, failure.strerror or failure)


class Guard:
    """The process that unmounts if this one dies. A context manager; the guard has ended when it exits.

    The guard inherits the signals that the calling thread blocks.
    """

    def __init__(self, mountpoint: str, log_file: str | None) -> None:
        self._words = [str(os.getpid()), mountpoint, log_file or ""]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Guard":
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), *self._words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
                bufsize=0,
            )
        except OSError as failure:
            # The mount is useful without it.
            log.error("no auto_unmount: %s: %s", sys.executable, failure.strerror)
        return self

    def watch(self, identity: str) -> None:
        """Names our mount, by the identity of its entry."""
        self._send(identity)

    def _send(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            try:
                self._process.stdin.write(line.encode() + b"\n")
            except OSError as failure:
                log.warning("no auto_unmount any more: the guard has ended: %s", failure.strerror)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is None:
            return
        self._send("end")
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_GUARD_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
