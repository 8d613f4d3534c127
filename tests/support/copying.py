"""Clients of a mount's copy service, and what the daemon reports about them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpufs import protocol
from gpufs.client._connection import Connection
from support.mounting import GpufsMount
from support.processes import PATIENCE, wait_until

READ, WRITE, BOTH = os.O_RDONLY, os.O_WRONLY, os.O_RDWR


@contextlib.contextmanager
def opened(path: Path, flags: int = READ) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def transfers(mount: GpufsMount) -> dict[str, Any]:
    """The counters of the mount's copy service."""
    counters: dict[str, Any] = mount.status()["transfers"]
    return counters


def wait_for_no_copies(mount: GpufsMount) -> None:
    wait_until(lambda: transfers(mount)["running"] == 0, 10, "the end of all copies")


def socket_path(mount: Path) -> str:
    return (mount / ".gpufs" / "socket").read_text().strip()


def raw_connection(mount: Path) -> socket.socket:
    """A connected socket on which nothing has been sent."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(PATIENCE)
        sock.connect(socket_path(mount))
    except BaseException:
        sock.close()
        raise
    return sock


def connection(mount: Path) -> Connection:
    return Connection(socket_path(mount), trusting=True)


def greeted(mount: Path) -> socket.socket:
    """A connected socket after the exchange of hello and welcome."""
    sock = raw_connection(mount)
    protocol.send(sock, protocol.Hello([1], "test"))
    protocol.receive(sock)
    return sock


def answer(sock: socket.socket) -> Any:
    """The next message other than progress; None at the end of the connection."""
    while True:
        try:
            data, _ = protocol.receive(sock)
        except ConnectionResetError:
            return None
        if not data:
            return None
        message = protocol.decode_server(data)
        if not isinstance(message, protocol.Progress):
            return message
