"""Another process that maps memory of this one, or leases memory to it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from gpufs import engine

_MOST = 253  # descriptors of a message


class Peer:
    """A process that has mapped, or leases, memory; it obeys commands until the end of the context."""

    def __init__(self, kind: str, **options: Any) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-c", "from support import sharing; sharing.main()"]
        with theirs:
            path = str(Path(__file__).parents[1])
            self.process: subprocess.Popen[bytes] = subprocess.Popen(words, stdin=theirs.fileno(), cwd=path)
        self.call(kind, **options)

    def call(self, command: str, pieces: list[engine.SharedPiece] | None = None, **options: Any) -> Any:
        """Have it do something; the descriptors of pieces are closed here. RuntimeError if it fails there."""
        send(self._socket, {"command": command, **options}, pieces or [])
        answer, self.pieces = receive(self._socket)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer.get("value")

    def wait_ended(self) -> int:
        return self.process.wait(120)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(120)

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()
        try:
            self.process.wait(120)
        finally:
            self.process.kill()


def send(to: socket.socket, message: dict[str, Any], pieces: list[engine.SharedPiece]) -> None:
    if len(pieces) > _MOST:
        raise ValueError("more pieces than one message can carry")
    message["pieces"] = [(piece.offset, piece.bytes) for piece in pieces]
    try:
        socket.send_fds(to, [json.dumps(message).encode()], [piece.fd for piece in pieces])
    finally:
        for piece in pieces:
            socket.close(piece.fd)


def receive(source: socket.socket) -> tuple[dict[str, Any], list[engine.SharedPiece]]:
    text, fds, _, _ = socket.recv_fds(source, 1 << 16, _MOST)
    if not text:
        raise EOFError("the other process has ended")
    message: dict[str, Any] = json.loads(text)
    pieces = [
        engine.SharedPiece(offset, size, fd) for (offset, size), fd in zip(message.pop("pieces"), fds, strict=True)
    ]
    return message, pieces


class Memory:
    """Device memory of this process, read and written by way of a file: on every driver."""

    def __init__(self, driver: str) -> None:
        self.engine = engine.Engine(driver, devices=1, memory_bytes=64 << 20, hip_memory="virtual")
        self.folder = tempfile.TemporaryDirectory()

    def close(self) -> None:
        self.engine.close()
        self.folder.cleanup()

    def read(self, device: int, address: int, size: int) -> bytes:
        path = Path(self.folder.name) / "out"
        with engine.BackingFile.open(self.engine, bytes(path), "w") as file:
            file.write(engine.DeviceRange(device, address, size))
        return path.read_bytes()

    def write(self, device: int, address: int, data: bytes) -> None:
        path = Path(self.folder.name) / "in"
        path.write_bytes(data)
        with engine.BackingFile.open(self.engine, bytes(path), "r") as file:
            file.read(engine.DeviceRange(device, address, len(data)))


def main() -> None:
    """What the other process does: one answer for each message."""
    parent = socket.socket(fileno=0)
    held: dict[str, Any] = {}
    while True:
        try:
            message, pieces = receive(parent)
        except EOFError:
            break
        answer: dict[str, Any] = {}
        given: list[engine.SharedPiece] = []
        try:
            answer["value"], given = obey(held, message, pieces)
        except Exception as error:  # noqa: BLE001 - the parent reports it
            answer["error"] = f"{type(error).__name__}: {error}"
        send(parent, answer, given)
    for name in ("mapping", "lease", "buffer", "memory"):
        if name in held:
            held[name].close()


def obey(
    held: dict[str, Any], message: dict[str, Any], pieces: list[engine.SharedPiece]
) -> tuple[Any, list[engine.SharedPiece]]:
    match message:
        case {"command": "map", "driver": driver, "pci": pci, "writable": writable, "reserve": reserve}:
            held["mapping"] = engine.Mapping(driver, pci, writable=writable, reserve=reserve)
            held["memory"] = Memory(driver)
            held["mapping"].add(pieces)
            return held["mapping"].bytes, []
        case {"command": "add"}:
            held["mapping"].add(pieces)
            return held["mapping"].bytes, []
        case {"command": "read", "offset": offset, "size": size}:
            mapping = held["mapping"]
            return held["memory"].read(mapping.device, mapping.address + offset, size).hex(), []
        case {"command": "write", "offset": offset, "data": data}:
            mapping = held["mapping"]
            held["memory"].write(mapping.device, mapping.address + offset, bytes.fromhex(data))
            return None, []
        case {"command": "poke", "offset": offset}:  # as a program's own code does
            import ctypes

            ctypes.memset(held["mapping"].address + offset, 0x21, 1)
            return None, []
        case {"command": "lease", "driver": driver, "data": data}:
            held["memory"] = Memory(driver)
            held["buffer"] = engine.Buffer(held["memory"].engine)
            held["buffer"].write(0, bytes.fromhex(data))
            held["lease"] = engine.Lease(held["buffer"], writable=True)
            info = held["memory"].engine.devices[0].info
            return info.pci_address, held["lease"].pieces()
    raise ValueError(f"unknown: {message}")
