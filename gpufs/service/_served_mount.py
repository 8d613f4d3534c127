"""The mount that the service serves: its buffers, memory that programs register, and who uses memory in place."""

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from errno import EBUSY, EINVAL, EISDIR, EMFILE, ENODATA, ENOENT, ENOSPC, EXDEV
from typing import Any, Final

from gpufs.engine import Buffer, Lease, Mount, SharedPiece
from gpufs.modes import COPY_ON_WRITE
from gpufs.protocol import Register, receive_pieces
from gpufs.service import _checks
from gpufs.service._channel import ClientProcess
from gpufs.service._kept import Keeping, KeptRegistrations, RegisteredMemory
from gpufs.service._scope import RequestScope
from gpufs.service._user import Limits
from gpufs.syscalls import trusted
from gpufs.units import bytes_text

# A write through the mount waits as long for the memory of files that have just been removed.
SPACE_SECONDS: Final = 3.0
REGISTERED: Final = "registered"  # the mode of a registration
_NAMED: Final = 3  # files in a message about a full device


@dataclass(eq=False, slots=True)
class Holder:
    """One lease or registration, and the program that has it."""

    peer: ClientProcess
    mode: str
    path: str = ""  # the name at the beginning, as this process sees it
    ino: int = 0
    private: bool = False
    bytes: int = 0
    placement: int | None = None  # where in the memory its program has the first byte
    charged: tuple[int, int] = (0, 0)  # the device of a private copy, and the bytes that it takes there
    since: float = field(default_factory=time.time)
    scope: RequestScope | None = None  # of a lease, which ends with it
    revoked: bool = False
    asleep: bool = False

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


class HolderTable:
    """All leases and registrations of a mount. Any thread may call."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()  # guards all below
        self._holders: set[Holder] = set()
        self._counts: Counter[tuple[int, bool]] = Counter()  # by user, and whether they are registrations
        self._private: Counter[tuple[int, int]] = Counter()  # bytes of private copies by user and device

    def enter(self, holder: Holder) -> None:
        """Add one. OSError EMFILE or EBUSY if its user has too many."""
        uid, registered = key = holder.peer.uid, holder.mode == REGISTERED
        with self._lock:
            if registered and self._counts[key] >= (most := self._limits.registrations_per_user()):
                raise OSError(EBUSY, f"a user may have {most} registrations at a time")
            if not registered and self._counts[key] >= self._limits.attachments_per_user:
                raise OSError(EMFILE, f"user {uid} has {self._counts[key]} files attached already")
            self._counts[key] += 1
            self._holders.add(holder)

    def leave(self, holder: Holder) -> None:
        """Remove one that has been entered."""
        with self._lock:
            self._holders.remove(holder)
            self._counts[holder.peer.uid, holder.mode == REGISTERED] -= 1
            device, size = holder.charged
            self._private[holder.peer.uid, device] -= size

    def charge(self, holder: Holder, device: int, size: int, total: int) -> None:
        """Count a private copy of ``size`` bytes on a device of ``total``. OSError ENOSPC beyond a user's share."""
        uid = holder.peer.uid
        with self._lock:
            used = self._private[uid, device]
            most = total if trusted(uid) else int(total * self._limits.private_share)
            if used + size > most:
                raise OSError(
                    ENOSPC,
                    f"private copies of user {uid} on gpu{device} may take {bytes_text(most)}: {bytes_text(used)} are "
                    f"in use, {bytes_text(size)} more are needed (files that the user may write need no copy)",
                )
            self._private[uid, device] += size
            holder.charged = (device, size)

    def leases_on(self, ino: int) -> list[tuple[Holder, RequestScope]]:
        """The leases on the file itself; private copies keep nobody from anything."""
        with self._lock:
            holders = [holder for holder in self._holders if holder.ino == ino and not holder.private]
        return [(holder, holder.scope) for holder in holders if holder.scope is not None]

    def awake_on(self, ino: int) -> list[Holder]:
        """Return the holders that use the memory of a file now; private copies and registrations do not."""
        return [holder for holder, _ in self.leases_on(ino) if not holder.asleep]

    def asleep_at(self, path: str) -> list[Holder]:
        """Those that sleep on a file that had a name when they attached it."""
        with self._lock:
            return [holder for holder in self._holders if holder.asleep and holder.path == path]

    def largest(self, device: int, mount: Mount) -> list[str]:
        """The files on a device that programs use awake and the programs, as texts, those with the most bytes first."""
        with self._lock:
            awake = [holder for holder in self._holders if not holder.asleep]
        found: dict[int, Holder] = {}
        for holder in sorted(awake, key=lambda holder: -holder.bytes):
            with contextlib.suppress(OSError):
                if holder.ino not in found and mount.inode_get(holder.ino).device == device:
                    found[holder.ino] = holder
        return [f"{each.path} {bytes_text(each.bytes)} by {each.peer}" for each in list(found.values())[:_NAMED]]

    def as_list(self, uid: int) -> list[dict[str, Any]]:
        """Return those that a user may see, oldest first: root and the mount's owner see all, others their own."""
        with self._lock:
            seen = [holder for holder in self._holders if trusted(uid) or holder.peer.uid == uid]
        return [holder.as_dict() for holder in sorted(seen, key=lambda holder: holder.since)]


@dataclass(frozen=True)
class ServedMount:
    """The mount that the service copies into and out of, and whose memory it shares. Any thread may call; all methods
    may block.
    """

    mount: Mount
    # For the trio thread alone: limits a user, or None for all, below the directory of an inode.
    set_limit: Callable[[int, int | None, int], None]
    st_dev: int  # the device number of the mount
    # Whether clients that may only read get the memory itself on GPUs, too, whose descriptors always give write access.
    trust_readers: bool
    limits: Limits
    holders: HolderTable
    registrations: KeptRegistrations  # the registered memory that outlives the daemon
    keeper: Keeping | None  # holds clients' connections for the next daemon; None if the mount ends with its daemon

    def open_buffer(self, ino: int) -> Buffer:
        """The buffer of an inode, which lives until it is closed. OSError EINVAL if there is none."""
        try:
            return self.mount.buffer(ino)
        except OSError as error:
            # The engine has no control files and no files below backing/. A file that a client has open still exists.
            if error.errno in (ENOENT, EINVAL, EISDIR):
                raise OSError(EINVAL, "the file on the mount holds no device memory") from None
            raise

    def gets_copy(self, buffer: Buffer, mode: str) -> bool:
        """Whether a client that may only read this buffer gets a private copy of it.

        On GPUs it does, because a descriptor of device memory always gives write access. A small file is copied on
        every driver: sharing it would move it to a granule of its own, for good, and a reader could do that to all
        small files of a mount.
        """
        if buffer.info.held_bytes < buffer.engine.devices[buffer.info.device].info.granule:
            return True
        return self.mount.engine.driver != "host" and (mode == COPY_ON_WRITE or not self.trust_readers)

    def lease(self, buffer: Buffer, holder: Holder, *, writable: bool, placement: int | None) -> Lease:
        """Open a lease on a buffer, or on a private copy of it if ``holder`` gets one, whose user pays for it then.

        ``placement``: as of Lease.

        OSError ENODATA if it has holes and is not ``writable``, ENOSPC or EDQUOT if the memory for its holes or the
        copy is missing.
        """
        label = str(holder.peer)
        if not holder.private:
            return Lease(buffer, writable=writable, label=label, placement=placement)
        size = buffer.info.size  # the file may change its size at the same time: what is charged is what is copied
        if buffer.seek(0, os.SEEK_HOLE) < size:  # or the copy would fill them with zeros
            raise OSError(ENODATA, "the file has holes, which have no memory: allocate them with fallocate(1)")
        device = buffer.engine.devices[buffer.info.device]
        granules = -(-size // device.info.granule)
        self.holders.charge(holder, device.index, granules * device.info.granule, device.memory().total_bytes)
        buffer.await_memory(size, SPACE_SECONDS)
        with Buffer(buffer.engine, device.index) as copy:  # afterwards the lease keeps the memory
            self.mount.charge_buffer(copy, holder.peer.uid)
            copy.copy_from(buffer, size=size)
            return Lease(copy, label=label, placement=placement)

    def lease_again(self, holder: Holder, *, writable: bool) -> Lease:
        """Open the lease of a holder again, whose file may be parked. OSError ENOSPC as bring_back()."""
        wanted, label = holder.placement, str(holder.peer)
        try:
            return self.mount.lease_again(holder.ino, holder.bytes, writable=writable, label=label, placement=wanted)
        except OSError as error:
            if error.errno != ENOSPC:
                raise
            raise OSError(ENOSPC, self._lack_of_memory(holder.ino)) from None

    def _lack_of_memory(self, ino: int) -> str:
        """Why a file cannot come back to its device."""
        attributes = self.mount.inode_get(ino)
        device = self.mount.engine.devices[attributes.device]
        text = f"{device.info.directory} has {bytes_text(device.memory().free_bytes)} free, the file needs "
        text += bytes_text(attributes.blocks * 512)
        users = self.holders.largest(device.index, self.mount)
        return text + (f"; in use there: {', '.join(users)}" if users else "")

    def park(self, ino: int) -> bool:
        """Move a file to the host's memory; returns whether it is there now: small files stay.

        OSError EBUSY if the file is in use, EOPNOTSUPP without host memory, ENOSPC and EDQUOT if that is full.
        """
        try:
            return self.mount.inode_park(ino)
        except OSError as error:
            if error.errno == ENOSPC:
                host = self.mount.engine.devices[-1]
                text = f"{host.info.directory} has {bytes_text(host.memory().free_bytes)} free, the file needs "
                raise OSError(ENOSPC, text + bytes_text(self.mount.inode_get(ino).blocks * 512)) from None
            raise

    def bring_back(self, ino: int) -> None:
        """Move a file back to its device. OSError ENOSPC names the files and programs that hold memory."""
        try:
            self.mount.inode_bring_back(ino)
        except OSError as error:
            if error.errno != ENOSPC:
                raise
            raise OSError(ENOSPC, self._lack_of_memory(ino)) from None

    def park_sleeping(self, ended: Holder) -> None:
        """A lease has ended: its file is parked if all others on it sleep."""
        others = [holder for holder, _ in self.holders.leases_on(ended.ino) if holder is not ended]
        if others and all(holder.asleep for holder in others):
            with contextlib.suppress(OSError):  # the file stays where it is
                self.park(ended.ino)

    def register(self, holder: Holder, wanted: Register, memory: int, taken: list[int]) -> int | None:
        """Make a client's memory the contents of the holder's file.

        ``memory``: the descriptor that came with it, -1 for none. ``taken`` gets descriptors of the memory's pieces,
        which the caller closes. Returns the number of the memory in ``registrations``; None if it ends with the daemon.

        OSError if the memory or the file is not what the client says, EXDEV if it is that of another device.
        """
        ino = holder.ino
        index = self.mount.inode_get(ino).device
        if index < 0:
            raise OSError(EINVAL, "the file on the mount holds no device memory")
        devices = self.mount.engine.devices
        if wanted.pci_address and wanted.pci_address != devices[index].info.pci_address:
            where = next(
                (device.info.directory for device in devices if device.info.pci_address == wanted.pci_address), None
            )
            remedy = f"its files are below {where}" if where is not None else "this mount does not show that GPU"
            raise OSError(EXDEV, f"the memory is on another GPU ({wanted.pci_address}): {remedy}")
        pieces = [SharedPiece(*piece) for piece in receive_pieces(memory, taken)] if wanted.kind == "descriptor" else []
        for piece in pieces:
            _checks.check_shareable(piece.fd)
        descriptors = [memory] if wanted.kind == "file" else [piece.fd for piece in pieces]
        kept = RegisteredMemory.of(wanted, pieces)
        kept.register(self.mount, ino, descriptors)
        return self.registrations.hold(kept, descriptors, holder.peer.uid)
