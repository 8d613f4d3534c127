"""The daemon's side of the keeper: the process that holds a mount's descriptors and acts when the daemon has died.

``native/keeper/keeper.cc`` is that process, and describes the messages.
"""

import errno
import logging
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Final

import trio

from gpufs import syscalls, threads
from gpufs.syscalls import closed_after, os_error

log = logging.getLogger("gpufs.daemon")

PROGRAM: Final = Path(__file__).with_name("gpufs-keeper")

_HEADER: Final = struct.Struct("=II")  # the kind, and how many numbers follow
_NUMBER_BYTES: Final = 8
_BATCH: Final = 200  # numbers in a message, and descriptors
_SEND_SECONDS: Final = 5.0  # until a keeper that does not read is replaced
_END_SECONDS: Final = 5.0  # until a keeper that does not end is killed


class Key(IntEnum):
    """The keeper's descriptors. Numbers from 2**20 on are those of service/_kept.py, from 2**32 on for memory."""

    CONNECTION = 1  # /dev/fuse
    JOURNAL = 2
    REQUEST = 3  # a memfd with the launcher's request
    OWNER = 4  # the process with which the mount ends
    LOG = 5  # standard error or the journal of systemd, where there is no log file
    DEATHS = 6  # a memfd in which the keeper notes deaths of daemons


class MessageKind(IntEnum):
    """The kinds of messages."""

    HOLD = 1
    DROP = 2
    RESTART = 3
    GIVE_UP = 4
    HAND_OVER = 5
    END = 6  # 7 is SETTLE, which the engine sends
    SERVES = 8
    WHY = 9
    HELD = 16
    READY = 17
    RELEASED = 18


class Keeper:
    """The keeper of one mount. Thread-safe. As a context manager, it ends with the context.

    If its process has died, or anything cannot be sent to it, calls do nothing: :meth:`replace` starts another one,
    which gets everything. The number of the socket's descriptor is always the same.
    """

    def __init__(self, mountpoint: str, held: Mapping[int, int] | None = None, fd: int | None = None) -> None:
        """Start the process (or OSError), or adopt the one that has started this daemon and sent what is ``held``."""
        self._mountpoint = mountpoint
        self._environment = dict(os.environb)
        self._held = dict(held or {})
        self._programs: dict[MessageKind, Sequence[str]] = {}
        self._serves = False
        self._lock = threading.Lock()  # guards what is above and what is sent
        self._child: subprocess.Popen[bytes] | None = None
        if fd is None:
            self._socket, self._child = self._start()
        else:
            self._socket = socket.socket(fileno=fd)
        self._socket.settimeout(_SEND_SECONDS)

    def _start(self) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                child = subprocess.Popen(
                    [os.fspath(PROGRAM), self._mountpoint],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=self._environment,
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        return ours, child

    @property
    def socket_fd(self) -> int:
        """The descriptor of the socket, also after :meth:`replace`."""
        return self._socket.fileno()

    @property
    def pid(self) -> int:
        """The present process."""
        return self._child.pid if self._child is not None else syscalls.peer_of(self._socket)[0]

    def hold(self, descriptors: Mapping[int, int]) -> None:
        """Make the keeper hold descriptors, each under its key, in place of what it holds there.

        They must stay open here until :meth:`drop` or :meth:`end`: the next keeper gets them again.
        """
        with self._lock:
            self._held.update(descriptors)
            self._send_held(descriptors)

    def drop(self, keys: Iterable[int]) -> None:
        """Make the keeper close what it holds under the keys."""
        dropped = list(keys)
        with self._lock:
            for key in dropped:
                self._held.pop(key, None)
            for start in range(0, len(dropped), _BATCH):
                self._send(MessageKind.DROP, dropped[start : start + _BATCH])

    def restart_with(self, command: Sequence[str]) -> None:
        """Set the program that takes over when this daemon has died. It gets the environment of this daemon."""
        self._set_program(MessageKind.RESTART, command)

    def give_up_with(self, command: Sequence[str]) -> None:
        """Set the program that runs when this daemon has died and none can take over."""
        self._set_program(MessageKind.GIVE_UP, command)

    def hand_over(self) -> None:
        """Announce that this daemon ends next, so that another one takes over."""
        with self._lock:
            self._send(MessageKind.HAND_OVER)

    def serves(self) -> None:
        """Announce that this daemon answers requests: if it dies, the next one is started at once."""
        with self._lock:
            self._serves = True
            self._send(MessageKind.SERVES)

    def fails(self, reason: str) -> None:
        """Announce why this daemon ends next. The keeper shows it while no daemon runs."""
        with self._lock:
            self._send(MessageKind.WHY, _as_numbers(reason))

    def end(self) -> None:
        """End the keeper, which closes everything that it holds. Return when it has ended."""
        with self._lock:
            self._send(MessageKind.END)
            self._socket.settimeout(_END_SECONDS)
            with suppress(TimeoutError, ConnectionResetError):
                self._socket.recv(1)  # nothing: the end of the file
            self._kill()  # it may not have got the message
            if self._child is not None:
                self._child.wait()
            self._socket.close()

    async def replace(self) -> None:
        """Wait until the keeper has died, or does not take what is sent, and start another one that holds the same.

        OSError if that is impossible.
        """
        await trio.lowlevel.wait_readable(self._socket)  # the keeper sends nothing, so this is the end of the file
        await threads.run(self._replace)

    def _replace(self) -> None:
        with self._lock:
            former = self._child
            fresh, child = self._start()
            self._kill()  # it may be alive, and would start a daemon too
            self._child = child
            with fresh:
                os.dup2(fresh.fileno(), self._socket.fileno(), inheritable=False)
            code = former.wait() if former is not None else "unknown"
            log.warning("the keeper has ended (exit code %s): another one takes its place", code)
            for kind, command in self._programs.items():
                self._send_program(kind, command)
            self._send_held(self._held)
            if self._serves:
                self._send(MessageKind.SERVES)

    def _set_program(self, kind: MessageKind, command: Sequence[str]) -> None:
        with self._lock:
            self._programs[kind] = command
            self._send_program(kind, command)

    def _send_program(self, kind: MessageKind, command: Sequence[str]) -> None:
        words = [*map(os.fsencode, command), *(name + b"=" + value for name, value in self._environment.items())]
        with closed_after(new_memfd("gpufs-program", b"".join(word + b"\0" for word in words))) as memfd:
            self._send(kind, [len(command)], [memfd])

    def _send_held(self, descriptors: Mapping[int, int]) -> None:
        keys = list(descriptors)
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            self._send(MessageKind.HOLD, batch, [descriptors[key] for key in batch])

    def _send(self, kind: MessageKind, numbers: Sequence[int] = (), descriptors: Sequence[int] = ()) -> None:
        data = _HEADER.pack(kind, len(numbers)) + struct.pack(f"={len(numbers)}Q", *numbers)
        try:
            socket.send_fds(self._socket, [data], descriptors)
        except OSError as failure:
            if not isinstance(failure, BrokenPipeError | ConnectionResetError):  # it has ended
                log.error("the keeper is replaced, since it does not take what is sent: %s", failure)
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # which replace() waits for

    def _kill(self) -> None:
        """Kill the present process, if it lives: a child, or the parent of this daemon."""
        if self._child is not None:
            self._child.kill()
        elif os.getppid() == (pid := self.pid):
            os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()


def send_reason(fd: int, reason: str) -> None:
    """Do as :meth:`Keeper.fails` by a descriptor of the socket, for a daemon that has not got further."""
    numbers = _as_numbers(reason)
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as keeper:
        keeper.send(_HEADER.pack(MessageKind.WHY, len(numbers)) + struct.pack(f"={len(numbers)}Q", *numbers))


def _as_numbers(text: str) -> tuple[int, ...]:
    data = text.encode(errors="replace")[: _BATCH * _NUMBER_BYTES - 1]
    count = len(data) // _NUMBER_BYTES + 1
    return struct.unpack(f"={count}Q", data.ljust(count * _NUMBER_BYTES, b"\0"))


def receive_held(fd: int) -> tuple[dict[int, int], list[int], int]:
    """Return what the keeper holds, for a daemon that takes over: descriptors by their keys, which the caller owns.

    Also returns the handles of files that were closed while there was no daemon, and when the daemon before this one
    had ended, in nanoseconds of CLOCK_MONOTONIC. OSError if the keeper cannot pass on everything.
    """
    held: dict[int, int] = {}
    released: list[int] = []
    with socket.socket(fileno=os.dup(fd)) as keeper:
        while True:
            data, descriptors, flags, _ = socket.recv_fds(
                keeper, _HEADER.size + _BATCH * _NUMBER_BYTES, _BATCH, socket.MSG_CMSG_CLOEXEC
            )
            if not data:
                raise OSError(errno.ECONNRESET, "the keeper has ended or cannot pass on what it holds")
            kind, count = _HEADER.unpack_from(data)
            numbers = struct.unpack_from(f"={count}Q", data, _HEADER.size)
            if kind == MessageKind.READY:
                return held, released, numbers[0]
            if kind == MessageKind.RELEASED:
                released += numbers
                continue
            if flags & socket.MSG_CTRUNC:
                raise os_error(errno.EMFILE)
            held.update(zip(numbers, descriptors, strict=True))


def new_memfd(name: str, contents: bytes) -> int:
    """Return a descriptor of memory with these contents."""
    memfd = os.memfd_create(name)
    with open(memfd, "wb", closefd=False) as file:
        file.write(contents)
    return memfd
