"""The service of one mount: its socket and its clients."""

import contextlib
import errno
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import trio

from gpufs import protocol
from gpufs.engine import KeeperLink, Mount
from gpufs.service._channel import process_of
from gpufs.service._client import ClientConnection
from gpufs.service._kept import Kept, KeptClient
from gpufs.service._parking import Parking
from gpufs.service._served_mount import HolderTable, ServedMount
from gpufs.service._user import Limits, Users
from gpufs.syscalls import trusted

log = logging.getLogger(__name__)

_BACKLOG = 64
# The names of their directories, and for how many seconds one may exist before its daemon listens.
_NAME = re.compile(r"\d+-\d+")
_NEW = 60.0
_ATTEMPTS = 5  # to bind a socket in a directory that others remove
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Service:
    """A running service; :func:`serve` passes it to ``started``. Only the trio thread uses it."""

    def __init__(self, served: ServedMount) -> None:
        self._served = served
        self._users = Users(served.limits)
        self._clients: set[ClientConnection] = set()
        self._parking = Parking(served)

    def statistics(self) -> dict[str, Any]:
        """The connections and the copies now."""
        return {"connections": len(self._clients), "running": sum(client.running for client in self._clients)}

    def leases(self, uid: int) -> list[dict[str, Any]]:
        """The leases and registrations that a user may see, oldest first."""
        return self._served.holders.as_list(uid)

    def copies(self, uid: int) -> list[dict[str, Any]]:
        """The copies in progress that a user may see, oldest first."""
        copies = [copy for client in self._clients for copy in client.copies(uid)]
        return sorted(copies, key=lambda copy: float(copy["since"]))

    async def _run(self, listener: socket.socket, kept: list[KeptClient], failed: Callable[[], None]) -> None:
        async with trio.open_nursery() as nursery:
            try:
                await self._accept(listener, kept, nursery)
            except Exception:
                failed()  # before the clients' tasks are cancelled, which ends their leases
                raise

    async def _accept(self, listener: socket.socket, kept: list[KeptClient], nursery: trio.Nursery) -> None:
        """Serve the clients of the former daemon, and those that connect."""
        number = max((client.number for client in kept), default=0)

        def serve(*connection: Any) -> None:
            client = ClientConnection(self._served, self._users, self._parking, *connection)
            self._clients.add(client)
            nursery.start_soon(self._serve_client, client)

        while kept:
            adopted = kept.pop()
            serve(adopted.sock, adopted.peer, adopted.number, adopted)
            await trio.lowlevel.checkpoint()  # the client may have thousands of leases
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
            peer = process_of(sock)
            if self._over_limit(peer.uid):
                _reject(sock)
            else:
                serve(sock, peer, number)
            await trio.lowlevel.checkpoint()

    def _over_limit(self, uid: int) -> bool:
        """Whether a user may not connect now. Other users' connections limit neither root nor the owner."""
        users = [client.peer.uid for client in self._clients]
        if users.count(uid) >= self._served.limits.connections_per_user:
            return True
        return not trusted(uid) and sum(not trusted(user) for user in users) >= self._served.limits.connections

    async def _serve_client(self, client: ClientConnection) -> None:
        try:
            await client.run()
        except Exception:
            # A failure in one connection must not end the mount.
            log.exception("a connection of %s failed", client.peer, extra={"user": client.peer.uid})
        finally:
            self._clients.discard(client)


def _reject(sock: socket.socket) -> None:
    with sock:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            protocol.send(sock, protocol.Goodbye(errno.EBUSY, "too many connections to the copy service"))


def _listen(path: str, *, allow_other: bool) -> socket.socket:
    """A listening socket at a path, whose directory is made; replaces one that a dead daemon left there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        for remaining in reversed(range(_ATTEMPTS)):
            try:
                _bind(listener, path, 0o711 if allow_other else 0o700)
                break
            except FileNotFoundError:  # the daemon of a mount that had the device number removed it
                if not remaining:
                    raise
        # Nobody can connect before listen(), so the mode is always in force.
        os.chmod(path, 0o666 if allow_other else 0o600)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _bind(listener: socket.socket, path: str, mode: int) -> None:
    """Give a socket its path, in a directory with a mode."""
    folder = os.path.dirname(path)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    os.chmod(folder, mode)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener.bind(path)


def sweep(folder: str) -> None:
    """Remove the directories of sockets that killed daemons of this user left in a folder, "MAJOR-MINOR".

    If no counters of the mount are beside it, and it is not new, a connection attempt shows whether anybody listens.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return
    counted = {name.removesuffix(".stats").partition("-")[2] for name in names if name.endswith(".stats")}
    for name in names:
        place = os.path.join(folder, name)
        path = socket_path(folder, name)
        if not _NAME.fullmatch(name) or name in counted:
            continue
        try:
            status = os.lstat(place)
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _NEW:
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as asking:
                asking.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(OSError):
                os.unlink(path)
            remove_directory(path)
        except OSError:
            pass  # another process was faster


def socket_path(folder: str, device: str) -> str:
    """Return the path of the socket of the mount with this device number ("0:52"), in a directory of the mount's own.

    A volume of a pod shows this directory, and no other mount. It is the same for all daemons of the mount.
    """
    return os.path.join(folder, device.replace(":", "-"), "socket")


def remove_directory(path: str) -> None:
    """Remove the directory of a socket, unless the next mount uses it already."""
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


async def serve(
    mount: Mount,
    set_limit: Callable[[int, int | None, int], None],
    *,
    path: str,
    st_dev: int,
    allow_other: bool,
    trust_readers: bool,
    kept: Kept,
    keeper: KeeperLink | None,
    started: Callable[[Service], None],
    failed: Callable[[], None],
) -> None:
    """Serve copies and leases for a mount until cancelled.

    The mount must stay open until this returns. ``path``: where the socket is created, at most 107 bytes, for its owner
    alone or with ``allow_other`` for everybody. ``st_dev``: the mount's device number, found without asking the mount.
    ``kept``: from restore(); the clients there are taken over. ``started``: called once clients can connect.
    ``failed``: called while an error of the service itself is handled, before its clients' leases end. ``set_limit``,
    ``trust_readers``, ``keeper``: see :class:`ServedMount`. When this is cancelled, copies in progress are cancelled,
    their clients get results, and their files have the size that was really copied; that takes a few seconds at most.
    OSError if the socket cannot be created.
    """
    limits = Limits()
    holders = HolderTable(limits)
    served = ServedMount(mount, set_limit, st_dev, trust_readers, limits, holders, kept.registrations, keeper)
    service = Service(served)
    with _listen(path, allow_other=allow_other) as listener:
        created = os.lstat(path)
        try:
            started(service)
            await service._run(listener, kept.clients, failed)
        finally:
            # Another daemon may have taken the name by now.
            with contextlib.suppress(OSError):
                if os.path.samestat(created, os.lstat(path)):
                    os.unlink(path)
