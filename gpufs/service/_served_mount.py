"""What the service needs of a mount: its buffers, leases on them, and memory that programs register."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from errno import EINVAL, EISDIR, ENODATA, ENOENT, EXDEV
from typing import Final

from gpufs.engine import Buffer, Lease, Mount, SharedPiece
from gpufs.modes import COPY_ON_WRITE
from gpufs.protocol import Register, receive_pieces
from gpufs.service import _checks
from gpufs.service._holders import Holder, HolderTable
from gpufs.service._kept_registrations import KeptRegistrations, RegisteredMemory
from gpufs.service._resources import Keeping
from gpufs.service._user import Limits

# A write through the mount waits as long for the memory of files that have just been removed.
SPACE_SECONDS: Final = 3.0


@dataclass(frozen=True)
class ServedMount:
    """The mount that the service copies into and out of, and whose memory it shares. Any thread may call; all methods
    may block.

    Attributes
    ----------
    device
        The st_dev of the mount.
    trust_readers
        Whether clients that may only read get the memory itself on GPUs, too, whose descriptors always give write
        access.
    set_limit
        For the trio thread alone: limits a user, or None for all, below the directory of an inode.
    registrations
        The registered memory that outlives the daemon.
    keeper
        Holds clients' connections for the next daemon; None if the mount ends with its daemon.
    """

    mount: Mount
    set_limit: Callable[[int, int | None, int], None]
    device: int
    trust_readers: bool
    limits: Limits
    holders: HolderTable
    registrations: KeptRegistrations
    keeper: Keeping | None

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

    def lease(self, buffer: Buffer, holder: Holder, *, writable: bool) -> Lease:
        """Open a lease on a buffer, or on a private copy of it if ``holder`` gets one, whose user pays for it then.

        OSError ENODATA if it has holes and is not ``writable``, ENOSPC or EDQUOT if the memory for its holes or the
        copy is missing.
        """
        label = str(holder.peer)
        if not holder.private:
            return Lease(buffer, writable=writable, label=label)
        size = buffer.info.size  # the file may change its size meanwhile: what is charged is what is copied
        if buffer.seek(0, os.SEEK_HOLE) < size:  # or the copy would fill them with zeros
            raise OSError(ENODATA, "the file has holes, which have no memory: allocate them with fallocate(1)")
        device = buffer.engine.devices[buffer.info.device]
        granules = -(-size // device.info.granule)
        self.holders.charge(holder, device.index, granules * device.info.granule, device.memory().total_bytes)
        buffer.await_memory(size, SPACE_SECONDS)
        with Buffer(buffer.engine, device.index) as copy:  # afterwards the lease keeps the memory
            self.mount.charge_buffer(copy, holder.peer.uid)
            copy.copy_from(buffer, size=size)
            return Lease(copy, label=label)

    def register(self, ino: int, wanted: Register, memory: int, taken: list[int]) -> int | None:
        """Make a client's memory the contents of a file. ``memory``: the descriptor that came with it, -1 for none.

        ``taken`` gets the descriptors of the memory's pieces, which the caller closes. Returns the number of the memory
        in ``registrations``; None if it ends with the daemon.

        OSError if the memory or the file is not what the client says, EXDEV if it is that of another device.
        """
        index = self.mount.inode_get(ino).device
        if index < 0:
            raise OSError(EINVAL, "the file on the mount holds no device memory")
        devices = self.mount.engine.devices
        if wanted.pci_address and wanted.pci_address != devices[index].info.pci_address:
            where = next((device.index for device in devices if device.info.pci_address == wanted.pci_address), None)
            remedy = f"its files are below gpu{where}" if where is not None else "this mount does not show that GPU"
            raise OSError(EXDEV, f"the memory is on another GPU ({wanted.pci_address}): {remedy}")
        pieces = [SharedPiece(*piece) for piece in receive_pieces(memory, taken)] if wanted.kind == "descriptor" else []
        for piece in pieces:
            _checks.check_shareable(piece.fd)
        descriptors = [memory] if wanted.kind == "file" else [piece.fd for piece in pieces]
        kept = RegisteredMemory.of(wanted, pieces)
        kept.register(self.mount, ino, descriptors)
        return self.registrations.hold(kept, descriptors)
