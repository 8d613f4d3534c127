"""The service manager, such as systemd, that has started the daemon."""

import functools
import logging
import os
import socket
from contextlib import suppress
from typing import Final

from gpufs import threads

log = logging.getLogger("gpufs.daemon")

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
