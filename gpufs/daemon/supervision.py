"""The daemon's supervisors: systemd, and the guard that unmounts if the daemon dies."""

import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Final

import trio

log = logging.getLogger("gpufs.daemon")

_GUARD: Final = Path(__file__).with_name("guard.py")
_GUARD_SECONDS: Final = 5.0  # to end after it was asked to
_SEND_SECONDS: Final = 5.0  # for a service manager whose queue is full


class ServiceManager:
    """sd_notify(3): datagrams to the socket that NOTIFY_SOCKET names; does nothing without one.

    Runs in trio's loop without blocking it: a service manager that does not read must not stop the mount.
    """

    def __init__(self) -> None:
        # The programs that we start must not see them.
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        interval = os.environ.pop("WATCHDOG_USEC", "")
        for_us = os.environ.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_seconds = int(interval) / 1e6 if interval.isdecimal() and for_us else 0.0

    async def ready(self, status: str) -> None:
        """Reports that the mount answers."""
        await self._send(f"READY=1\nMAINPID={os.getpid()}\nSTATUS={status}")

    async def reloading(self) -> None:
        """Reports that the log file is being reopened; ready() follows."""
        await self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    async def stopping(self, status: str) -> None:
        """Reports that the mount ends."""
        await self._send(f"STOPPING=1\nSTATUS={status}")

    async def alive(self) -> None:
        """Feeds the watchdog; due every ``watchdog_seconds`` if those are not 0."""
        await self._send("WATCHDOG=1")

    async def _send(self, text: str) -> None:
        if not self._address:
            return
        name = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with trio.fail_after(_SEND_SECONDS):
                with trio.socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                    # trio can wait only for a connected socket.
                    await sender.connect(name)
                    await sender.send(text.encode(), socket.MSG_NOSIGNAL)
        except trio.TooSlowError:
            log.warning("the service manager at %s does not read its messages", self._address)
        except OSError as failure:
            log.warning("cannot notify the service manager at %s: %s", self._address, failure.strerror)


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
