"""The service of one mount: its socket and its clients."""

import contextlib
import errno
import logging
import os
import re
import socket
import stat
import struct
import time
from collections import Counter
from dataclasses import fields
from typing import Any

import trio

from gpufs import protocol
from gpufs.service._client import ClientConnection
from gpufs.service._copies import Counters
from gpufs.service._leases import LeaseTable
from gpufs.service._limits import Limits
from gpufs.service._mount import ServedMount
from gpufs.service._peer import Peer
from gpufs.service._register import Registry

log = logging.getLogger(__name__)

_BACKLOG = 64
# Connections are refused at a rate that leaves the control plane time for other work: so many, then a pause.
_REFUSALS = 16
_REFUSAL_PAUSE = 0.005
# Bad connections of a user are counted for so many seconds.
_BAD_SECONDS = 10.0
# The names of sockets, and for how many seconds one may exist before its daemon listens.
_NAME = re.compile(r"\d+-\d+-\d+\.socket")
_NEW = 60.0
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Service:
    """A running service; :func:`serve` hands it out."""

    def __init__(self, mount: ServedMount, device: int, limits: Limits) -> None:
        self._mount = mount
        self._device = device
        self._limits = limits
        self._counters = Counters()
        self._leases = LeaseTable(limits)
        self._registry = Registry(mount, device, limits)
        self._clients: set[ClientConnection] = set()
        self._users: Counter[int] = Counter()  # connections of each user
        self._strangers = 0  # connections of all users except root and this process's own
        self._bad: Counter[int] = Counter()  # bad connections of each user since the time below
        self._bad_since = 0.0

    def statistics(self) -> dict[str, Any]:
        """Counters since the start, and what runs now; sizes in bytes. Any thread may call."""
        counters = {field.name: getattr(self._counters, field.name) for field in fields(self._counters)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in counters.items()}

    def leases(self, uid: int) -> list[dict[str, Any]]:
        """The leases and registrations that a user may see, oldest first. Any thread may call."""
        return sorted(self._leases.as_list(uid) + self._registry.as_list(uid), key=lambda one: float(one["since"]))

    def copies(self, uid: int) -> list[dict[str, Any]]:
        """The copies in progress that a user may see, oldest first. Only the trio thread calls it."""
        copies = [copy for client in self._clients for copy in client.copies(uid)]
        return sorted(copies, key=lambda one: float(one["since"]))

    async def _run(self, listener: socket.socket) -> None:
        number = refusals = 0
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    sock, _ = listener.accept()
                except BlockingIOError:
                    await trio.lowlevel.wait_readable(listener)
                    continue
                except OSError as error:
                    if error.errno in _OUT_OF_RESOURCES:
                        log.error("no client can be accepted: %s", error.strerror)
                        await trio.sleep(1)
                    elif error.errno not in (errno.ECONNABORTED, errno.EPROTO, errno.EPERM):
                        raise
                    continue
                number += 1
                peer = _peer_of(sock)
                if self._over_limit(peer.uid):
                    self._counters.rejected += 1
                    _reject(sock)
                    refusals += 1
                    await trio.sleep(0 if refusals % _REFUSALS else _REFUSAL_PAUSE)
                    continue
                self._counters.accepted += 1
                self._counters.connections += 1
                self._strangers += not _trusted(peer.uid)
                self._users[peer.uid] += 1
                nursery.start_soon(self._serve_client, sock, peer, number)
                await trio.lowlevel.checkpoint()

    def _over_limit(self, uid: int) -> bool:
        """Whether a user may not connect now. Other users' connections limit neither root nor the owner."""
        if self._users[uid] >= self._limits.connections_per_user:
            return True
        if _trusted(uid):
            return False
        if trio.current_time() >= self._bad_since + _BAD_SECONDS:
            self._bad.clear()
            self._bad_since = trio.current_time()
        return self._strangers >= self._limits.connections or self._bad[uid] >= self._limits.bad_connections

    async def _serve_client(self, sock: socket.socket, peer: Peer, number: int) -> None:
        try:
            shared = (self._mount, self._device, self._limits, self._counters, self._leases, self._registry)
            client = ClientConnection(sock, peer, number, *shared)
            self._clients.add(client)
            try:
                if not await client.run():
                    self._bad[peer.uid] += 1
            finally:
                self._clients.discard(client)
        except Exception:
            # A failure in one connection must not end the mount.
            log.exception("connection %d (%s) failed", number, peer, extra={"user": peer.uid})
        finally:
            sock.close()
            self._counters.connections -= 1
            self._strangers -= not _trusted(peer.uid)
            self._users[peer.uid] -= 1
            if not self._users[peer.uid]:
                del self._users[peer.uid]


def _trusted(uid: int) -> bool:
    return uid in (0, os.geteuid())


def _peer_of(sock: socket.socket) -> Peer:
    return Peer(*struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))))


def _reject(sock: socket.socket) -> None:
    with sock:
        sock.setblocking(False)
        try:
            protocol.send(sock, protocol.Goodbye(errno.EBUSY, "too many connections to the copy service"))
        except OSError:
            pass


def _listen(path: str, *, allow_other: bool) -> socket.socket:
    """A listening socket at a path; replaces one that a dead daemon left there."""
    try:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        listener.bind(path)
        # Nobody can connect before listen(), so the mode is always in force.
        os.chmod(path, 0o666 if allow_other else 0o600)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def sweep(folder: str) -> None:
    """Removes the sockets that killed daemons of this user left in a folder, by their names: "PID-MAJOR-MINOR.socket".

    If its daemon's counters are not beside it, and it is not new, a connection attempt shows whether anybody listens.
    """
    try:
        names = set(os.listdir(folder))
    except OSError:
        return
    for name in names:
        path = os.path.join(folder, name)
        if not _NAME.fullmatch(name) or name.removesuffix(".socket") + ".stats" in names:
            continue
        try:
            found = os.lstat(path)
            if found.st_uid != os.geteuid() or time.time() - found.st_mtime < _NEW or not stat.S_ISSOCK(found.st_mode):
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as asking:
                asking.connect(path)
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):
                os.unlink(path)
        except OSError:
            pass  # another process was faster


async def serve(
    mount: ServedMount,
    *,
    path: str,
    device: int,
    allow_other: bool = False,
    limits: Limits | None = None,
    task_status: trio.TaskStatus[Service] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves copies and leases for a mount until cancelled; hands out its :class:`Service` through ``nursery.start``.

    The mount must stay open until this returns. ``path``: where the socket is created, at most 107 bytes, for its owner
    alone or with ``allow_other`` for everybody. ``device``: the mount's st_dev, found without asking the mount. When
    this is cancelled, copies in progress are cancelled, their clients get results, and their files have the size that
    was really copied; that takes a few seconds at most. OSError if the socket cannot be created.
    """
    service = Service(mount, device, limits or Limits())
    with _listen(path, allow_other=allow_other) as listener:
        created = os.lstat(path)
        try:
            task_status.started(service)
            await service._run(listener)
        finally:
            # Another daemon may have taken the name by now.
            with contextlib.suppress(OSError):
                if os.path.samestat(created, os.lstat(path)):
                    os.unlink(path)
