"""The daemon's supervisors: systemd, and the guard that unmounts if the daemon dies."""

import functools
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
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
        """Send assignments, one a line: "READY=1", "STOPPING=1"; "WATCHDOG=1" every ``watchdog_seconds`` if not 0.

        Raises nothing: a failure is logged.
        """
        if self._address:
            # On a thread: a service manager that does not read must not stop the mount.
            with suppress(OSError):  # no thread is free
                # The text must be UTF-8, and the name of a mountpoint need not be.
                data = text.encode(errors="replace")
                await threads.run(functools.partial(self._send, data), abandon_on_cancel=True)

    def _send(self, text: bytes) -> None:
        name = os.fsencode("\0" + self._address[1:] if self._address.startswith("@") else self._address)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_SEND_SECONDS)
                sender.connect(name)
                sender.send(text)
        except Exception as failure:  # noqa: BLE001 - the mount does not depend on it
            log.warning("cannot notify the service manager at %s: %s", self._address, failure)


@contextmanager
def guard(mountpoint: str, log_file: str | None) -> Iterator[Callable[[str], None]]:
    """Start the process that unmounts if this one dies; it has ended at the end of the context.

    Yields the function that names our mount to it, by the identity of its entry. The guard inherits the signals that
    the calling thread blocks.
    """
    words = [str(os.getpid()), mountpoint, log_file or ""]
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD), *words],
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
        yield lambda identity: None
        return
    assert process.stdin is not None
    pipe = process.stdin

    def send(line: str) -> None:
        try:
            pipe.write(line.encode() + b"\n")
        except OSError as failure:
            log.warning("no auto_unmount any more: the guard has ended: %s", failure.strerror)

    try:
        yield send
    finally:
        send("end")
        pipe.close()
        try:
            process.wait(_GUARD_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
