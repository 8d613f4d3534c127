"""The mount that the service serves: its buffers, memory that programs register, and who uses memory in place."""

import contextlib
import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from errno import EBUSY, EINVAL, EISDIR, EMFILE, ENODATA, ENOENT, ENOSPC, ESTALE, EXDEV
from typing import Any, Final, TypeVar

from gpufs.engine import Buffer, KeeperLink, Lease, Mount, SharedPiece
from gpufs.modes import COPY_ON_WRITE
from gpufs.protocol import Move, Register, receive_pieces
from gpufs.service import _checks
from gpufs.service._kept import REGISTERED, Holder, KeptRegistrations, RegisteredMemory
from gpufs.service._user import Limits
from gpufs.syscalls import trusted
from gpufs.units import bytes_text

T = TypeVar("T")

# A write through the mount waits as long for the memory of files that have just been removed.
SPACE_SECONDS: Final = 3.0
_NAMED: Final = 3  # files in a message


def check_size(size: int, had: int) -> None:
    """OSError ESTALE for a file that has fewer bytes than a lease on it had."""
    if size < had:
        raise OSError(ESTALE, f"the file has {size} bytes now, and had {had} when its attachment went to sleep")


class HolderTable:
    """All leases and registrations of a mount. Any thread may call."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()  # guards all below, and Holder.asleep
        self._holders: set[Holder] = set()
        # The leases by inode, except private copies, which keep nobody from anything.
        self._uses: dict[int, set[Holder]] = {}
        self._counts: Counter[tuple[int, bool]] = Counter()  # by user, and whether they are registrations
        self._plain_leases = 0  # of all users except root and the mount's owner
        self._private: Counter[tuple[int, int]] = Counter()  # bytes of private copies by user and device

    def enter(self, holder: Holder, *, adopted: bool = False) -> None:
        """Add one. OSError EMFILE or EBUSY if its user has too many, unless it is that of the former daemon."""
        uid, registered = key = holder.peer.uid, holder.mode == REGISTERED
        with self._lock:
            if adopted:
                pass
            elif registered and self._counts[key] >= (most := self._limits.registrations_per_user()):
                raise OSError(EBUSY, f"a user may have {most} registrations at a time")
            elif not registered and self._counts[key] >= self._most_attachments(uid):
                raise OSError(EMFILE, f"user {uid} has {self._counts[key]} files attached already")
            self._counts[key] += 1
            self._plain_leases += not registered and not trusted(uid)
            self._holders.add(holder)

    def _most_attachments(self, uid: int) -> int:
        """How many leases a user may have now. Needs the lock."""
        left = self._limits.attachments_together - (self._plain_leases - self._counts[uid, False])
        return self._limits.attachments_per_user if trusted(uid) else min(self._limits.attachments_per_user, left // 2)

    def leave(self, holder: Holder) -> None:
        """Remove one that has been entered."""
        with self._lock:
            self._holders.remove(holder)
            uid, registered = holder.peer.uid, holder.mode == REGISTERED
            self._counts[uid, registered] -= 1
            self._plain_leases -= not registered and not trusted(uid)
            device, size = holder.charged
            self._private[uid, device] -= size
            use = self._uses.get(holder.ino, set())
            use.discard(holder)
            if not use:
                self._uses.pop(holder.ino, None)

    def use(self, holder: Holder) -> None:
        """Count one that has been entered among the leases on the file itself, awake or asleep."""
        with self._lock:
            self._uses.setdefault(holder.ino, set()).add(holder)

    def set_asleep(self, holder: Holder, *, asleep: bool, may_move: bool = False) -> None:
        """Let a lease in use sleep, or wake. ``may_move``: see Holder."""
        with self._lock:
            holder.asleep, holder.may_move = asleep, may_move

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

    def leases_on(self, inodes: Iterable[int]) -> list[Holder]:
        """Return the leases on files, except private copies."""
        with self._lock:
            return [holder for ino in inodes for holder in self._uses.get(ino, ())]

    def awake_on(self, ino: int) -> int:
        """Return how many leases use the memory of a file now."""
        with self._lock:
            return sum(not holder.asleep for holder in self._uses.get(ino, ()))

    def is_left(self, ino: int, leaving: int = 0, *, may_move: bool = False) -> bool:
        """Return whether all leases on a file sleep, and one of their programs may move it.

        ``leaving``: how many are about to sleep; ``may_move``: whether one of these may.
        """
        with self._lock:
            use = self._uses.get(ino, set())
            awake = sum(not holder.asleep for holder in use)
            return bool(use) and awake <= leaving and (may_move or any(holder.may_move for holder in use))

    def asleep(self) -> list[Holder]:
        """Return the leases that sleep."""
        with self._lock:
            return [holder for holder in self._holders if holder.asleep]

    def largest(self, device: int, mount: Mount) -> list[str]:
        """The files on a device that programs use awake and the programs, as texts, those with the most bytes first."""
        with self._lock:
            awake = [holder for holder in self._holders if not holder.asleep]
        found: dict[int, Holder] = {}
        for holder in sorted(awake, key=lambda holder: -holder.bytes):
            with contextlib.suppress(OSError):
                if holder.ino not in found and mount.inode_get(holder.ino).device == device:
                    found[holder.ino] = holder
            if len(found) == _NAMED:
                break
        return [f"{each.path} {bytes_text(each.bytes)} by {each.peer}" for each in found.values()]

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
    keeper: KeeperLink | None  # holds clients' connections for the next daemon; None if the mount ends with its daemon

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
        info = buffer.info
        if info.held_bytes + info.parked_bytes < buffer.engine.devices[info.device].info.granule:
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
        again = functools.partial(
            self.mount.lease_again, holder.ino, holder.bytes, writable=writable, label=label, placement=wanted
        )
        return self._with_space([holder.ino], again, parks=False)

    def check_space(self, inodes: Sequence[int], *, parks: bool) -> None:
        """OSError ENOSPC with the figures unless files can be parked, or come back, together.

        EOPNOTSUPP without host memory. For what comes back the text names the files and programs that hold memory.
        """
        devices = self.mount.engine.devices
        groups = {len(devices) - 1: list(inodes)} if parks else self._by_device(inodes)
        for device, group in groups.items():
            needed, free = self.mount.space_for(group, parks=parks)
            if needed > free:
                text = f"{devices[device].info.directory} has {bytes_text(free)} free, "
                text += f"the {'file needs' if len(group) == 1 else 'files need'} {bytes_text(needed)}"
                users = [] if parks else self.holders.largest(device, self.mount)
                text += f"; in use there: {', '.join(users)}" if users else ""
                # Files that nobody uses, or that are pinned, may fill it as well.
                raise OSError(ENOSPC, text + "; gpufs ls lists the files" * (not parks))

    def _by_device(self, inodes: Sequence[int]) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for ino in inodes:
            with contextlib.suppress(FileNotFoundError):  # removed by now
                groups.setdefault(self.mount.inode_get(ino).device, []).append(ino)
        return groups

    def _with_space(self, inodes: Sequence[int], work: Callable[[], T], *, parks: bool) -> T:
        """Do what needs memory for files, and again when memory that is just being freed has come.

        OSError ENOSPC as check_space().
        """
        try:
            return work()
        except OSError as error:
            if error.errno != ENOSPC:
                raise
        self.check_space(inodes, parks=parks)
        return work()

    def name_of(self, ino: int) -> str | None:
        """Return the path of a file below the root of the mount, None without a name, or without a file."""
        with contextlib.suppress(FileNotFoundError):
            path = self.mount.path(ino)
            return None if path is None else os.fsdecode(path)
        return None

    def owned_by(self, uid: int, ino: int) -> bool:
        """Return whether a user may decide where a file lies and who uses it. OSError ENOENT if it is gone."""
        return trusted(uid) or self.mount.inode_get(ino).uid == uid

    def may_move(self, holder: Holder) -> bool:
        """Return whether a file may leave its device because the program of a lease sleeps.

        It may if the program can write to the file, or its user may have it moved from a shell.
        """
        return not holder.read_only or self.trust_readers or self.owned_by(holder.peer.uid, holder.ino)

    def check_move(self, holders: Iterable[Holder], what: Move) -> None:
        """OSError unless these leases can all sleep, or wake, now. Those that do already count."""
        by_ino: dict[int, list[Holder]] = {}
        for holder in holders:
            if holder.asleep == (what == "wake"):
                by_ino.setdefault(holder.ino, []).append(holder)
        for ino, found in list(by_ino.items()):
            if what == "wake":
                check_size(self.mount.inode_get(ino).size, max(holder.bytes for holder in found))
            elif not self.holders.is_left(ino, len(found), may_move=any(map(self.may_move, found))):
                del by_ino[ino]  # it stays
        self.check_space(list(by_ino), parks=what == "sleep")

    def park_if_left(self, ino: int) -> None:
        """Move a file to the host's memory if all leases on it sleep, and one of their programs may move it.

        OSError EOPNOTSUPP without host memory, ENOSPC and EDQUOT if that is full. Small files stay.
        """
        if self.holders.is_left(ino):
            self._with_space([ino], lambda: self._move(ino, parks=True), parks=True)

    def move(self, inodes: Sequence[int], *, parks: bool) -> None:
        """Move files to the host's memory, or back to their devices, all of them or none. Some have no other place.

        OSError EBUSY if one is in use, EOPNOTSUPP without host memory, ENOSPC and EDQUOT if there is too little.
        """
        if parks or len(inodes) > 1:  # one alone takes what it can get
            self.check_space(inodes, parks=parks)
        moved: list[int] = []
        try:
            for ino in inodes:
                if self._with_space(inodes, functools.partial(self._move, ino, parks=parks), parks=parks):
                    moved.append(ino)
        except OSError as error:
            stuck = []
            for ino in reversed(moved):
                try:
                    self._move(ino, parks=not parks)
                except OSError:
                    stuck.append(self.name_of(ino) or f"inode {ino}")
            if not stuck:
                raise
            raise OSError(error.errno, f"{error.strerror}; cannot go back: {', '.join(stuck[:_NAMED])}") from None

    def _move(self, ino: int, *, parks: bool) -> bool:
        """Move a file if it has two places and is not there; returns whether it did."""
        try:
            with self.mount.buffer(ino) as buffer:
                if (buffer.info.parked_bytes > 0) == parks:
                    return False
            if parks:
                return self.mount.inode_park(ino)
            self.mount.inode_bring_back(ino)
        except OSError as error:
            if error.errno in (EINVAL, EISDIR, ENOENT):  # it has no memory of a device's, or was removed
                return False
            raise
        return True

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
        kept = RegisteredMemory(wanted, [(piece.offset, piece.bytes) for piece in pieces])
        kept.register(self.mount, ino, descriptors)
        return self.registrations.hold(kept, descriptors, holder.peer.uid)
