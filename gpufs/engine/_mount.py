"""A mount's data plane and the inode table that both planes share."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from errno import ENOENT
from operator import attrgetter
from typing import Final, Literal

from gpufs.engine._binding import HANDLE, NUMBER, SMALL_NUMBER, Handle, check, reason_of, result_of
from gpufs.engine._buffer import Buffer, Lease
from gpufs.engine._engine import Engine
from gpufs.engine._keeper import KeeperLink
from gpufs.engine._mapping import SharedPiece
from gpufs.engine._native import ffi, lib

RELATIME: Final[int] = lib.GPUFS_RELATIME
STRICTATIME: Final[int] = lib.GPUFS_STRICTATIME
NOATIME: Final[int] = lib.GPUFS_NOATIME
NO_LIMIT: Final[int] = lib.GPUFS_NO_LIMIT
DEFAULT_LIMIT: Final[int] = lib.GPUFS_DEFAULT_LIMIT

# How a program passes on memory: a file in memory, or on GPUs descriptors of physical memory or the vendor's handle.
_ShareKind = Literal["file", "descriptor", "ipc"]
_SHARE_KINDS: Final[dict[_ShareKind, int]] = {
    "file": lib.GPUFS_SHARE_FILE,
    "descriptor": lib.GPUFS_SHARE_DESCRIPTOR,
    "ipc": lib.GPUFS_SHARE_IPC,
}

# Looked up once: parsing a type's name costs more than the calls that use it.
_ATTRIBUTES = ffi.typeof("gpufs_attributes *")
_TEXT = ffi.typeof("const char **")


@dataclass(slots=True)
class Attributes:
    """The attributes of an inode, in the order of the C struct.

    Creating one and handing it to the engine costs a few microseconds.

    Attributes
    ----------
    ino, size, mode, nlink, uid, gid, rdev, blksize
        As of stat(2).
    blocks
        The memory held, in units of 512 bytes.
    atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns
        Seconds since 1970-01-01 UTC, and the nanoseconds of each.
    device
        The number of the device, -1 without one.
    """

    ino: int = 0
    size: int = 0
    blocks: int = 0
    atime: int = 0
    mtime: int = 0
    ctime: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    mode: int = 0
    nlink: int = 1
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    blksize: int = 4096
    device: int = -1


_VALUES: Final = attrgetter(*(field.name for field in fields(Attributes)))


def journal_format() -> int:
    """Return the format of the journals by which this version continues mounts of other processes.

    Returns
    -------
    int
        A number; only mounts with the same one can be continued.
    """
    return int(lib.gpufs_journal_format())


def relay_pair() -> tuple[int, int]:
    """Make the socket pair between the planes.

    Returns
    -------
    int, int
        The ``relay_fd`` of :class:`Mount`, and the control plane's descriptor. Both are close-on-exec, and the
        caller's; the first until a mount takes it over.
    """
    native, control = ffi.new("int32_t *"), ffi.new("int32_t *")
    check(lib.gpufs_relay_pair(native, control))
    return int(native[0]), int(control[0])


class Mount(Handle):
    """The data plane of one FUSE connection. It keeps its engine alive.

    close() may not be called by what answers a request.

    Parameters
    ----------
    engine
        Its devices are the memory of the files.
    fuse_fd
        An open and mounted /dev/fuse. The mount takes it over, also when this fails.
    relay_fd
        The native end of :func:`relay_pair`, which the mount takes over as well.
    mask_flags
        INIT flags to treat as not offered by the kernel.
    metadata_bytes
        Host memory that names and attributes may take before new ones fail with ENOSPC; 0 for no limit.
    user_bytes
        Device memory on each device for each user except root and this process's; 0 for no limit.
    keeper
        Holds the state and the memory for the next process. If it holds those of another process, this continues that
        mount, and takes over the descriptors. None if the mount is to end with this process.
    """

    __slots__ = ("engine",)

    def __init__(
        self,
        engine: Engine,
        fuse_fd: int,
        relay_fd: int,
        *,
        mask_flags: int = 0,
        metadata_bytes: int = 0,
        user_bytes: int = 0,
        keeper: KeeperLink | None = None,
    ) -> None:
        options = ffi.new(
            "gpufs_mount_options *",
            {
                "fuse_fd": fuse_fd,
                "relay_fd": relay_fd,
                "mask_flags": mask_flags,
                "metadata_bytes": metadata_bytes,
                "user_bytes": user_bytes,
                "keeper": 0 if keeper is None else keeper._handle,
            },
        )
        handle = result_of(HANDLE, lib.gpufs_mount_open, engine._handle, options)
        self.engine = engine
        self._own(handle)

    def release_forgotten(self) -> None:
        """Free the memory of files of the process before that the kernel has forgotten: call it from time to time."""
        check(lib.gpufs_mount_release_forgotten(self._handle))

    def close_handles(self, handles: Sequence[int]) -> None:
        """Close files and directories that the process before had open. Before :meth:`start`."""
        check(lib.gpufs_mount_close_handles(self._handle, list(handles), len(handles)))

    def obstacle(self) -> str | None:
        """Return the reason why no other process can continue the mount, whatever its keeper has; None if one can."""
        return reason_of(lib.gpufs_mount_survives, self._handle)

    def start(self) -> None:
        """Start the threads; after the descriptor is mounted and before requests are answered."""
        check(lib.gpufs_mount_start(self._handle))

    @staticmethod
    def await_answer(path: str) -> None:
        """Wait until stat(2) of a path on the mount returns, without keeping this process from ending. EngineError."""
        check(lib.gpufs_await_answer(os.fsencode(path)))

    def read_ahead(self, directory: str, piece: int) -> None:
        """Read ahead of programs that go through mappings from front to back; once.

        ``directory`` is where the mount is, which must answer already. ``piece``: bytes to ask the kernel for at a
        time, at most what it reads ahead on this mount. PermissionError without the right to open files by their
        handles (CAP_DAC_READ_SEARCH).
        """
        check(lib.gpufs_mount_read_ahead(self._handle, os.fsencode(directory), piece))

    @property
    def ended_fd(self) -> int:
        """A descriptor of the mount's that becomes readable once the connection has ended."""
        return int(result_of("int *", lib.gpufs_mount_ended_fd, self._handle))

    def busiest(self, most: int) -> list[tuple[int, int, int]]:
        """Return (inode, bytes read, bytes written) of the files that moved most bytes since the last call, sorted.

        The bytes count from the creation of the file. Files whose bytes were never moved are left out.
        """
        files, count = ffi.new("gpufs_file_activity[]", most), ffi.new("uint64_t *", most)
        check(lib.gpufs_mount_busiest(self._handle, files, count))
        return [(file.ino, file.bytes_read, file.bytes_written) for file in files[0 : count[0]]]

    def files(self, device: int) -> int:
        """Return how many regular files a device has, those without a name included."""
        return int(result_of(NUMBER, lib.gpufs_mount_files, self._handle, device))

    def set_access_times(self, policy: int, *, not_directories: bool) -> None:
        """Set which reads change access times: RELATIME, STRICTATIME, NOATIME; ``not_directories``: nodiratime too."""
        check(lib.gpufs_mount_access_times(self._handle, policy, not_directories))

    def limit_user(self, device: int, uid: int, limit: int) -> None:
        """Limit the memory of a user's files on a device, in bytes: more fails with EDQUOT.

        NO_LIMIT: nothing fails. DEFAULT_LIMIT: ``user_bytes`` applies again.
        """
        check(lib.gpufs_quota_user(self._handle, device, uid, limit))

    def limit_directory(self, ino: int, limit: int) -> None:
        """Limits the memory of all that is and will be below a directory on a device; NO_LIMIT: no longer.

        EngineError EINVAL for another inode, EBUSY if a directory above or below it has a limit.
        """
        check(lib.gpufs_quota_directory(self._handle, ino, limit))

    def charge_buffer(self, buffer: Buffer, uid: int) -> None:
        """Count the memory of a buffer without a file as memory of a user's files on its device."""
        check(lib.gpufs_quota_buffer(self._handle, buffer._handle, uid))

    def quotas(self) -> list[tuple[int, int, int, int, int]]:
        """Return (directory or 0, device, user, bytes used, limit or NO_LIMIT) of each account.

        Of a directory only the inode counts, of a user the device and the number. Users who use nothing and have no
        limit are left out.
        """
        accounts, count = ffi.new("gpufs_account **"), ffi.new("uint64_t *")
        check(lib.gpufs_quota_list(self._handle, accounts, count))
        return [
            (account.directory, account.device, account.uid, account.used_bytes, account.limit_bytes)
            for account in accounts[0][0 : count[0]]
        ]

    def place(self, directory: int, name: bytes, attributes: Attributes, target: bytes | None = None) -> int:
        """Create an inode of the mount's own.

        Parameters
        ----------
        directory, name
            Where it appears; 0 and an empty name for the root.
        attributes
            ``mode``, ``uid``, ``gid``, ``size``, ``device`` and ``ino`` count; ``ino`` 0 for the next number. Users can
            change nothing where ``device`` is -1.
        target
            Of a symbolic link.

        Returns
        -------
        int
            The inode number.
        """
        wanted = ffi.new(_ATTRIBUTES, _VALUES(attributes))
        place = self._handle, directory, name, wanted, ffi.NULL if target is None else target
        return int(result_of(NUMBER, lib.gpufs_name_place, *place))

    def find(self, path: bytes) -> int | None:
        """Return the inode at a path below the root, without following symbolic links; None if absent."""
        ino = ffi.new(NUMBER)
        status = lib.gpufs_name_find(self._handle, path, ino)
        if status.error == ENOENT:
            return None
        check(status)
        return int(ino[0])

    def path(self, ino: int) -> bytes | None:
        """Return a path of an inode below the root; None if it has no name."""
        text = ffi.new(_TEXT)
        status = lib.gpufs_name_path(self._handle, ino, text)
        if status.error == ENOENT:
            return None
        check(status)
        return bytes(ffi.string(text[0]))

    def remove_names(self, ino: int) -> None:
        """Remove all names of a registered file, which the kernel does not cache. EngineError ENOENT if unknown."""
        check(lib.gpufs_name_remove_all(self._handle, ino))

    def inode_hold(self, ino: int) -> None:
        """Keep an inode until :meth:`inode_release`, as the kernel does. EngineError ENOENT if unknown."""
        check(lib.gpufs_inode_hold(self._handle, ino))

    def inode_release(self, ino: int) -> None:
        """Drop a reference; an inode without names goes with the last one. EngineError ENOENT if unknown."""
        check(lib.gpufs_inode_release(self._handle, ino))

    def inode_get(self, ino: int) -> Attributes:
        """Return the attributes of an inode as they are now. EngineError ENOENT if unknown."""
        return Attributes(*_VALUES(result_of(_ATTRIBUTES, lib.gpufs_inode_get, self._handle, ino)))

    def inode_written(self, ino: int) -> None:
        """Set the times and clear set-id bits after a change by other means, for example by a transfer.

        Returns when the kernel has forgotten what it had cached of the file. EngineError ENOENT if unknown.
        """
        check(lib.gpufs_inode_written(self._handle, ino))

    def backing_file_open(self, fd: int) -> int:
        """Open a file of the host below backing/ by a descriptor, which the caller keeps.

        The result is the reply's file handle; file_release() ends it. The descriptor's mode and O_APPEND count; it must
        not have O_DIRECT. May block for as long as the file's server does. EngineError as BackingFile's.
        """
        return int(result_of(NUMBER, lib.gpufs_backing_file_open, self._handle, fd))

    def file_release(self, fh: int) -> None:
        """Close a file for RELEASE. EngineError EBADF for an unknown file handle."""
        check(lib.gpufs_file_release(self._handle, fh))

    def buffer(self, ino: int) -> Buffer:
        """Return the buffer of a regular file, which lives at least as long as the result is open.

        EngineError ENOENT if unknown, EISDIR or EINVAL without a buffer.
        """
        return Buffer._adopt(self.engine, result_of(HANDLE, lib.gpufs_mount_buffer, self._handle, ino))

    def lease_again(self, ino: int, size: int, *, writable: bool, label: str, placement: int | None = None) -> Lease:
        """Open a lease that its holder had before on the first ``size`` bytes of a file. ``label``: as of Lease.

        ``placement``: as of Lease. EngineError ENOENT without such a file.
        """
        place = -1 if placement is None else placement
        wanted = ino, lib.GPUFS_LEASE_WRITE if writable else 0, size, label.encode(), place
        return Lease._adopt(result_of(HANDLE, lib.gpufs_lease_open_again, self._handle, *wanted))

    def inode_register(
        self,
        ino: int,
        kind: _ShareKind,
        fd: int,
        *,
        offset: int,
        size: int,
        writable: bool,
        handle: bytes = b"",
        pieces: Sequence[SharedPiece] = (),
    ) -> None:
        """Make memory of another program the contents of a file, whose size is fixed then.

        ``fd``: of the memory for "file", -1 otherwise; ``handle``: for "ipc"; ``pieces``: all the physical memory, for
        "descriptor". Descriptors stay the caller's. ``offset`` and ``size`` in bytes. On return the kernel knows the
        new size. EngineError EBUSY unless the file is new, empty, and was opened for writing only by the call that
        created it; EINVAL, EACCES if the memory is not as described.
        """
        listed = ffi.new("gpufs_shared_piece[]", [(piece.offset, piece.bytes, piece.fd, 0) for piece in pieces])
        memory = ffi.new(
            "gpufs_foreign_memory *",
            {
                "kind": _SHARE_KINDS[kind],
                "fd": fd,
                "writable": writable,
                "offset": offset,
                "bytes": size,
                "handle": handle.ljust(64, b"\0"),
                "pieces": listed,
                "piece_count": len(pieces),
            },
        )
        check(lib.gpufs_inode_register(self._handle, ino, memory))

    def evict_when_full(self) -> None:
        """Have a full device park files that nobody uses, from now on. Before :meth:`start`."""
        check(lib.gpufs_mount_evict(self._handle))

    def inode_park(self, ino: int) -> bool:
        """Move the contents of a file to the host tier; returns whether they are there. Those of small files stay.

        EngineError EOPNOTSUPP without a host tier, EINVAL for anything but a file on a device, EBUSY if a program has a
        lease on it, ENOSPC and EDQUOT if the host tier is full or a limit of the file's owner there is reached.
        """
        return bool(result_of(SMALL_NUMBER, lib.gpufs_inode_park, self._handle, ino))

    def inode_bring_back(self, ino: int) -> None:
        """Move the contents of a file back to its device. EngineError ENOSPC, EDQUOT: as for a write."""
        check(lib.gpufs_inode_bring_back(self._handle, ino))

    def space_for(self, inos: Sequence[int], *, parks: bool) -> tuple[int, int]:
        """Return the bytes that files need to be parked, or to come back to the device of all, and those free there.

        If these are too few, it waits up to three seconds for memory that is being freed. EngineError EOPNOTSUPP
        without a host tier.
        """
        needed, free = ffi.new(NUMBER), ffi.new(NUMBER)
        check(lib.gpufs_inodes_space(self._handle, list(inos), len(inos), parks, needed, free))
        return int(needed[0]), int(free[0])

    def inode_revoke(self, ino: int, timeout: float) -> None:
        """Withdraw that memory: all calls on the file fail with ESTALE from now on.

        Returns when nothing uses the memory any more. EngineError ETIMEDOUT if something still does after ``timeout``
        seconds; the memory is unmapped once that ends.
        """
        check(lib.gpufs_inode_revoke(self._handle, ino, round(timeout * 1000)))
