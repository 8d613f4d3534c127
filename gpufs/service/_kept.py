"""Keeps what a client has beyond the life of a daemon: its socket, a record of its leases and registrations, and the
memory that it has registered.

The keeper holds them from the client's first lease or registration on. A new daemon opens the leases again and
registers the memory again before it serves anything. Requests are not kept: the client learns that another daemon
serves it (protocol.Replaced), and makes those again that nobody has answered.
"""

import errno
import logging
import os
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gpufs.engine import KeeperLink, Lease, Mount, SharedPiece
from gpufs.modes import READ_WRITE
from gpufs.protocol import MAX_MEMORY_PIECES, Register
from gpufs.service._channel import ClientProcess, process_of
from gpufs.service._scope import RequestScope
from gpufs.syscalls import close_all, punch, trusted

log = logging.getLogger(__name__)

# The keeper's keys: of each connection two, its socket and its record; of each registration so many, a memfd with a
# RegisteredMemory and then the descriptors of the memory.
_CONNECTION_KEYS: Final = range(1 << 20, 1 << 31)
_REGISTRATION_KEYS: Final = range(1 << 31, 1 << 32)
_KEYS_OF_ONE: Final = MAX_MEMORY_PIECES + 1
# All registrations together keep at most so many descriptors, and this part of those that this process may have. A
# plain user may keep half of what the others have left. Registrations beyond end with the daemon.
_MOST_DESCRIPTORS: Final = 1 << 14
_PART_OF_DESCRIPTORS: Final = 8
_SLOT_BYTES: Final = 4096  # of an entry. A page is written as a whole or not at all, wherever the daemon dies
_PATH_CHARACTERS: Final = 500
REGISTERED: Final = "registered"  # the mode of a registration


# ---- the memory of registrations ----


class RegisteredMemory(msgspec.Struct, frozen=True):
    """A client's memory that is the contents of a file: what it has requested.

    ``pieces``: offset and size in bytes of the memory behind each descriptor, for "descriptor"; empty for other kinds.
    """

    wanted: Register
    pieces: list[tuple[int, int]]

    def register(self, mount: Mount, ino: int, descriptors: Sequence[int]) -> None:
        """Make it the contents of a file. The descriptors stay the caller's. OSError as Mount.inode_register()."""
        wanted, places = self.wanted, zip(self.pieces, descriptors, strict=False)
        mount.inode_register(
            ino,
            wanted.kind,
            descriptors[0] if wanted.kind == "file" else -1,
            offset=wanted.offset,
            size=wanted.size,
            writable=wanted.writable,
            handle=wanted.handle,
            pieces=[SharedPiece(offset, size, fd) for (offset, size), fd in places],
        )


@dataclass
class KeptRegistrations:
    """The descriptors that the keeper holds for all registrations of a mount. Any thread may call."""

    keeper: KeeperLink | None
    _lock: threading.Lock = field(default_factory=threading.Lock)  # guards all below
    _held: dict[int, list[int]] = field(default_factory=dict)  # descriptors that stay open here, by their number
    _free: list[int] = field(default_factory=list)  # numbers below the largest
    _users: dict[int, int] = field(default_factory=dict)  # by number
    _counts: Counter[int] = field(default_factory=Counter)  # descriptors, by user

    def hold(self, memory: RegisteredMemory, descriptors: Sequence[int], uid: int) -> int | None:
        """Have the keeper hold a user's registered memory. Return its number; None where it ends with the daemon."""
        if self.keeper is None:
            return None
        copies: list[int] = []
        try:
            with self._lock:
                if (left := self._left(uid)) < 1 + len(descriptors):
                    log.warning(
                        "registered memory of user %d ends with the daemon: it takes %d descriptors, and %d are left",
                        *(uid, 1 + len(descriptors), left),
                    )
                    return None
                copies.append(os.memfd_create("gpufs-registration"))
                os.pwrite(copies[0], msgspec.json.encode(memory), 0)
                for descriptor in descriptors:
                    copies.append(os.dup(descriptor))
                number = self._free.pop() if self._free else len(self._held)
                self._held[number] = copies
                self._enter(number, uid)
        except OSError as failure:
            close_all(copies)
            log.warning("a registration ends with the daemon: %s", failure.strerror)
            return None
        self.keeper.hold(dict(enumerate(copies, _first_key(number))))
        return number

    def _left(self, uid: int) -> int:
        """How many descriptors a user may take now."""
        most = min(_MOST_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _PART_OF_DESCRIPTORS)
        left = most - self._counts.total()
        return left if trusted(uid) else (left + self._counts[uid]) // 2 - self._counts[uid]

    def _enter(self, number: int, uid: int) -> None:
        self._users[number] = uid
        self._counts[uid] += len(self._held[number])

    def drop(self, number: int) -> None:
        with self._lock:
            copies = self._held[number]
        if self.keeper is not None:
            self.keeper.drop(range(_first_key(number), _first_key(number) + len(copies)))
        with self._lock:  # only now may another registration have its number
            del self._held[number]
            self._counts[self._users.pop(number, -1)] -= len(copies)
            self._free.append(number)
        close_all(copies)

    def restore(self, held: Mapping[int, int]) -> None:
        """Take over what the keeper holds of the former daemon. Before anything is registered."""
        for key in sorted(key for key in held if key in _REGISTRATION_KEYS):
            self._held.setdefault((key - _REGISTRATION_KEYS.start) // _KEYS_OF_ONE, []).append(held[key])
        self._free = [number for number in range(max(self._held, default=0)) if number not in self._held]

    def register_again(self, mount: Mount, holder: "Holder") -> None:
        """Give a file the memory that it had. OSError if that is impossible."""
        if holder.number is None or holder.number not in self._held:
            raise OSError(errno.ENODATA, "its memory was not kept")
        self._enter(holder.number, holder.peer.uid)
        first, *descriptors = self._held[holder.number]
        memory = msgspec.json.decode(os.pread(first, os.fstat(first).st_size, 0), type=RegisteredMemory)
        memory.register(mount, holder.ino, descriptors)

    def drop_others(self, used: set[int | None]) -> None:
        """Drop what belongs to no registration: the former daemon had not finished it, or was ending it."""
        for number in set(self._held) - used:
            self.drop(number)


def _first_key(number: int) -> int:
    return _REGISTRATION_KEYS.start + number * _KEYS_OF_ONE


# ---- connections ----


@dataclass(eq=False, slots=True)
class Holder:
    """One lease or registration, and the program that has it."""

    peer: ClientProcess
    mode: str
    id: int = 0  # of the request that began it
    path: str = ""  # the name at the beginning, as this process sees it
    ino: int = 0
    device: int = 0  # of a lease; its index
    number: int | None = None  # of a registration's memory in KeptRegistrations; None: it ends with the daemon
    private: bool = False  # its memory is a copy, which no other daemon finds again
    read_only: bool = False  # the program's descriptor does not allow writing
    bytes: int = 0
    placement: int | None = None  # where in the memory its program has the first byte
    charged: tuple[int, int] = (0, 0)  # the device of a private copy, and the bytes that it takes there
    since: float = field(default_factory=time.time)
    scope: RequestScope | None = None  # of a lease, which ends with it
    revoked: bool = False
    asleep: bool = False  # it has no memory until it wakes
    may_move: bool = False  # whether the file may leave its device because the program sleeps

    def as_dict(self) -> dict[str, Any]:
        """Return the entry for ``.gpufs/leases``."""
        return {
            "path": self.path,
            "inode": self.ino,
            "pid": self.peer.pid,
            "uid": self.peer.uid,
            "program": self.peer.program,
            "mode": self.mode,
            "private": self.private,
            "asleep": self.asleep,
            "bytes": self.bytes,
            "since": self.since,
        }


class _Kept(msgspec.Struct, frozen=True):
    """What a record has of a Holder."""

    mode: str
    id: int
    path: str
    ino: int
    device: int
    number: int | None
    private: bool
    read_only: bool
    bytes: int
    placement: int | None
    since: float
    asleep: bool


class Record:
    """The leases and registrations of one connection. Any thread may call. Nothing is kept without a keeper.

    ``held``: the descriptors that the keeper holds, too: the connection, and the memory with the entries.
    """

    def __init__(self, keeper: KeeperLink | None, number: int, sock: socket.socket, held: tuple[int, ...] = ()) -> None:
        self._keeper = keeper
        self._keys = (_CONNECTION_KEYS.start + 2 * number, _CONNECTION_KEYS.start + 2 * number + 1)
        self._sock = sock
        # One message to the keeper at a time. The event loop never takes this lock: a stopped keeper reads nothing.
        self._sending = threading.Lock()
        self._lock = threading.Lock()  # guards all below
        self._slots: dict[Holder, int] = {}
        self._free: list[int] = []
        self._held = held

    def read(self, peer: ClientProcess) -> list[Holder]:
        """Return the entries of the former daemon. There may be thousands, and the mount answers nothing yet."""
        decode = msgspec.json.Decoder(_Kept).decode
        data = os.pread(self._held[1], os.fstat(self._held[1]).st_size, 0)
        for slot, start in enumerate(range(0, len(data), _SLOT_BYTES)):
            entry = data[start : start + _SLOT_BYTES].partition(b"\0")[0]
            try:
                if entry:
                    self._slots[Holder(peer, **msgspec.structs.asdict(decode(entry)))] = slot
                    continue
            except msgspec.MsgspecError as failure:
                log.error("a part of what %s has cannot be read: %s", peer, failure)  # the mount goes on
            self._free.append(slot)
        return list(self._slots)

    def add(self, holder: Holder) -> None:
        """Note it as it is now. The first one makes the keeper hold the connection, which may block."""
        kept = msgspec.convert(holder, _Kept, from_attributes=True)
        path = kept.path.encode(errors="replace").decode()[:_PATH_CHARACTERS]
        entry = msgspec.json.encode(msgspec.structs.replace(kept, path=path)) + b"\0"
        with self._sending:
            if self._keeper is None:
                return
            with self._lock:
                is_first = not self._held
                if is_first:
                    with ExitStack() as undo:
                        undo.callback(os.close, record := os.memfd_create("gpufs-client"))
                        self._held = (os.dup(self._sock.fileno()), record)
                        undo.pop_all()
                if holder not in self._slots:
                    self._slots[holder] = self._free.pop() if self._free else len(self._slots)
                os.pwrite(self._held[1], entry, self._slots[holder] * _SLOT_BYTES)
            if is_first:
                self._keeper.hold(dict(zip(self._keys, self._held, strict=True)))

    def remove(self, holder: Holder) -> None:
        """It has ended."""
        with self._lock:
            slot = self._slots.pop(holder, None)
            if slot is not None and self._held:
                self._free.append(slot)
                punch(self._held[1], slot * _SLOT_BYTES, _SLOT_BYTES)

    @property
    def held(self) -> bool:
        """Whether the keeper has the connection, so that close() may block."""
        return bool(self._held)

    def close(self) -> None:
        """The connection ends. May block."""
        with self._sending:
            with self._lock:
                held, self._held = self._held, ()
                keeper, self._keeper = self._keeper, None
            if held and keeper is not None:
                keeper.drop(self._keys)
            close_all(held)


@dataclass(frozen=True, slots=True)
class KeptClient:
    """A connection that the former daemon had, its leases on files, which are open again, and its registrations.

    A private copy, which the client has for itself, has no lease here, and its inode is not kept. One that sleeps has
    no lease, either, and keeps its inode.
    """

    number: int
    sock: socket.socket
    peer: ClientProcess
    leases: list[tuple[Holder, Lease | None]]
    registrations: list[Holder]
    record: Record


@dataclass(frozen=True, slots=True)
class Kept:
    """The connections, leases and registrations of a mount's clients, beyond the life of a daemon.

    ``clients``: those of the former daemon, until the service has taken them over.
    """

    registrations: KeptRegistrations
    clients: list[KeptClient]


def restore(mount: Mount, keeper: KeeperLink | None, held: Mapping[int, int]) -> Kept:
    """Restore what the clients of the former daemon had, from what the keeper holds. Before the mount is started.

    ``held`` is empty for a new mount.
    """
    registrations = KeptRegistrations(keeper)
    registrations.restore(held)
    clients = []
    for key in sorted(held):
        if key in _CONNECTION_KEYS and key % 2 == 0 and key + 1 in held:
            number = (key - _CONNECTION_KEYS.start) // 2
            clients.append(_restore_client(mount, registrations, number, (held[key], held[key + 1])))
    registrations.drop_others({holder.number for client in clients for holder in client.registrations})
    return Kept(registrations, clients)


def _restore_client(mount: Mount, registrations: KeptRegistrations, number: int, held: tuple[int, int]) -> KeptClient:
    sock = socket.socket(fileno=os.dup(held[0]))
    peer = process_of(sock)
    record = Record(registrations.keeper, number, sock, held)
    client = KeptClient(number, sock, peer, [], [], record)
    for holder in record.read(peer):
        try:
            if holder.mode != REGISTERED:
                client.leases.append((holder, None if holder.private else _open_again(mount, holder)))
                continue
        except (OSError, OverflowError) as failure:  # of numbers that cannot be
            log.error("the lease of %s on %s is lost: %s", peer, holder.path, failure)
        else:
            if _register_again(mount, registrations, holder):
                client.registrations.append(holder)
                continue
        record.remove(holder)
    return client


def _open_again(mount: Mount, holder: Holder) -> Lease | None:
    """Keep the inode of a lease, and open the lease again. None for one that sleeps."""
    mount.inode_hold(holder.ino)
    try:
        # What the file has grown by is not the client's: it may be a hole, without memory.
        writable, label = holder.mode == READ_WRITE, str(holder.peer)
        return None if holder.asleep else mount.lease_again(holder.ino, holder.bytes, writable=writable, label=label)
    except BaseException:
        mount.inode_release(holder.ino)
        raise


def _register_again(mount: Mount, registrations: KeptRegistrations, holder: Holder) -> bool:
    """Return whether the file shows the memory again. If the memory is lost, the file is removed."""
    try:
        mount.inode_hold(holder.ino)
    except OSError:
        return False  # the file had no name, and no program had it open
    try:
        registrations.register_again(mount, holder)
    except (OSError, OverflowError, msgspec.MsgspecError) as failure:
        log.error("the file %s, which %s registered, is gone: %s", holder.path, holder.peer, failure)
        mount.remove_names(holder.ino)
        mount.inode_release(holder.ino)
        return False
    return True
