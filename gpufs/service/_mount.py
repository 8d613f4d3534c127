"""What the service needs of a mount: its buffers, leases on them, and memory that programs register."""

import os
import stat
import time
from collections.abc import Callable
from errno import EINVAL, EISDIR, ENODATA, ENOENT, EOPNOTSUPP, EXDEV
from typing import Final, Protocol

from gpufs.engine import BackingFile, Buffer, Lease, Mount, SharedPiece
from gpufs.protocol import Register

# A write through the mount waits as long for the memory of files that have just been removed.
_SPACE_SECONDS: Final = 3.0
_SPACE_RETRY_SECONDS: Final = 0.002


class Names(Protocol):
    """The names of the mount's files. Only the trio thread calls it."""

    def hold(self, ino: int) -> None:
        """Keeps a file until forget(). OSError ESTALE if it is gone."""

    def forget(self, ino: int, count: int) -> None:
        """Drops so many references."""

    def remove_names(self, ino: int, most: int) -> list[tuple[int, bytes]]:
        """Removes the names of a file, so many at most; the directories and the names that it had there."""


class MountLease:
    """The memory of a file for a program that maps it. Any thread may call; all methods may block.

    ``driver``, ``pci_address`` and ``device`` (its number in the mount) say where it is. ``private``: it is a copy.
    """

    def __init__(self, lease: Lease, driver: str, pci_address: str, device: int, *, private: bool) -> None:
        self._lease = lease
        self.driver = driver
        self.pci_address = pci_address
        self.device = device
        self.private = private

    @property
    def bytes(self) -> int:
        """The size that the lease covers."""
        return self._lease.bytes

    def refresh(self) -> None:
        """Covers what the file has grown by."""
        if self.private:
            raise OSError(EOPNOTSUPP, "a private copy does not follow the file: attach it again")
        self._lease.refresh()

    def pieces(self, start: int) -> list[SharedPiece]:
        """The memory from ``start`` on. The descriptors are the caller's."""
        return self._lease.pieces(start)

    def close(self) -> None:
        """Ends the lease."""
        self._lease.close()


class ServedMount:
    """The mount that the service copies into and out of, and whose memory it shares. Any thread may call; all methods
    may block.

    ``trust_readers``: clients that may only read get the memory itself on GPUs, too, whose descriptors always give
    write access. ``set_limit``: limits a user, or None for all, below the directory of an inode. ``names`` and
    ``set_limit`` are for the trio thread alone.
    """

    def __init__(
        self,
        mount: Mount,
        names: Names,
        set_limit: Callable[[int, int | None, int], None],
        *,
        trust_readers: bool = False,
    ) -> None:
        self._mount = mount
        self.names = names
        self.set_limit = set_limit
        self._trust_readers = trust_readers

    def open_host(self, fd: int) -> BackingFile:
        """The host's file behind a descriptor, which stays the caller's. OSError if it cannot be used."""
        return BackingFile(self._mount.engine, fd)

    def open_buffer(self, ino: int) -> Buffer:
        """The buffer of an inode, which lives until it is closed. OSError EINVAL if there is none."""
        try:
            return self._mount.buffer(ino)
        except OSError as error:
            # The engine has no control files and no files below backing/. A file that a client has open still exists.
            if error.errno in (ENOENT, EINVAL, EISDIR):
                raise OSError(EINVAL, "the file on the mount holds no device memory") from None
            raise

    def gets_copy(self, buffer: Buffer) -> bool:
        """Whether a client that may only read this buffer gets a private copy of it.

        On GPUs it does, because a descriptor of device memory always gives write access. A small file is copied on
        every driver: sharing it would move it to a granule of its own, for good, and a reader could do that to all
        small files of a mount.
        """
        granule = buffer.engine.devices[buffer.info.device].info.granule
        if buffer.info.held_bytes < granule:
            return True
        return self._mount.engine.driver != "host" and not self._trust_readers

    def cost_of_copy(self, buffer: Buffer) -> tuple[int, int]:
        """The device memory that a copy of a buffer takes, in whole granules, and that there is, in bytes."""
        device = buffer.engine.devices[buffer.info.device]
        granule = device.info.granule
        return -(-buffer.info.size // granule) * granule, device.memory().total_bytes

    def lease(self, buffer: Buffer, *, writable: bool, private: bool, label: str) -> MountLease:
        """Opens a lease on a buffer, or on a private copy of it. ``label``: the holder, for messages.

        OSError ENODATA if it has holes and is not ``writable``, ENOSPC if the memory for its holes or the copy is
        missing.
        """
        index = buffer.info.device
        where = (buffer.engine.driver, buffer.engine.devices[index].info.pci_address, index)
        if not private:
            return MountLease(Lease(buffer, writable=writable, label=label), *where, private=False)
        size = buffer.info.size
        if buffer.seek(0, os.SEEK_HOLE) < size:  # or the copy would fill them with zeros
            raise OSError(ENODATA, "the file has holes, which have no memory: allocate them with fallocate(1)")
        self.await_space(buffer, size)
        with Buffer(buffer.engine, index) as copy:  # afterwards the lease keeps the memory
            copy.copy_from(buffer, size=size)
            return MountLease(Lease(copy, label=label), *where, private=True)

    def await_space(self, buffer: Buffer, size: int) -> None:
        """Before a load of so many bytes: waits a little for the memory of files that have just been removed."""
        deadline = time.monotonic() + _SPACE_SECONDS
        # In this order: what is no longer pending has become free.
        while (
            self._mount.statistics()["table"]["orphan_bytes"]
            and self._free_bytes(buffer) < size
            and time.monotonic() < deadline
        ):
            time.sleep(_SPACE_RETRY_SECONDS)

    def _free_bytes(self, buffer: Buffer) -> int:
        info = buffer.info
        free = buffer.engine.devices[info.device].memory().free_bytes
        return free if info.room_bytes is None else min(free, info.room_bytes)

    def written(self, ino: int) -> None:
        """The contents of an inode change: sets its times, clears its set-id bits and notifies the kernel."""
        self._mount.inode_written(ino)

    def register(self, ino: int, wanted: Register, memory: int) -> None:
        """Makes a client's memory the contents of a file. ``memory``: its descriptor, -1 where there is none.

        OSError if the memory or the file is not what the client says, EXDEV if it is that of another device.
        """
        index = self._mount.inode_get(ino).device
        if index < 0:
            raise OSError(EINVAL, "the file on the mount holds no device memory")
        devices = self._mount.engine.devices
        if wanted.pci_address and wanted.pci_address != devices[index].info.pci_address:
            where = next((one.index for one in devices if one.info.pci_address == wanted.pci_address), None)
            remedy = f"its files are below gpu{where}" if where is not None else "this mount does not show that GPU"
            raise OSError(EXDEV, f"the memory is on another GPU ({wanted.pci_address}): {remedy}")
        self._mount.inode_register(
            ino,
            wanted.kind,
            memory,
            offset=wanted.offset,
            size=wanted.size,
            writable=wanted.writable,
            whole=wanted.whole,
            handle=wanted.handle,
        )

    def withdraw(self, ino: int, patience: float) -> None:
        """Ends that, and waits until nothing uses the memory. OSError ETIMEDOUT after so many seconds."""
        self._mount.inode_revoke(ino, patience)

    def invalidate_name(self, parent: int, name: bytes) -> None:
        """Notifies the kernel that a name is gone. Queued."""
        self._mount.invalidate_entry(parent, name)


def without_set_id(mode: int) -> int:
    """The mode after a write. Set-gid without group execution once meant mandatory locking and stays."""
    mode &= ~stat.S_ISUID
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP else mode


def drop_set_id(fd: int) -> None:
    """Clears the set-id bits of the host's file behind a descriptor, as the client's own write would have."""
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if without_set_id(mode) != mode:
        os.fchmod(fd, without_set_id(mode))
