"""Checks what descriptors of a client may be used for.

A descriptor carries the rights that the kernel gave when its owner opened the file, and the daemon may have more: so it
is used for what it was opened for and for nothing else, and never for files whose meaning depends on the process that
reads or writes them.
"""

import fcntl
import os
import stat
from errno import EBADF, EDEADLK, EINVAL, EISDIR, ENOSYS, ENOTDIR, EXDEV
from typing import Final

from gpufs.modes import READ_WRITE
from gpufs.syscalls import FileIdentity, file_system_type, identity, open_flags, os_error

# File systems that are the kernel's interfaces and not storage: writing there acts in the writer's name.
_KERNEL_FILE_SYSTEMS: Final = frozenset(
    {
        0x9FA0,  # proc
        0x62656572,  # sysfs
        0x27E0EB,  # cgroup
        0x63677270,  # cgroup2
        0x64626720,  # debugfs
        0x74726163,  # tracefs
        0x73636673,  # securityfs
        0xF97CFF8C,  # selinuxfs
        0x43415D53,  # smackfs
        0x5A3C69F0,  # apparmorfs
        0x62656570,  # configfs
        0xCAFE4A11,  # bpf
        0xDE5E81E4,  # efivarfs
        0x6165676C,  # pstore
        0x42494E4D,  # binfmt_misc
        0x65735543,  # fusectl
        0x1CD1,  # devpts
        0x7655821,  # resctrl
    }
)

# File systems behind a server or a user's process, which may stop answering.
_SERVED_FILE_SYSTEMS: Final = frozenset(
    {
        0x6969,  # nfs
        0x517B,  # smb
        0xFF534D42,  # cifs
        0xFE534D42,  # smb2
        0x65735546,  # fuse
        0x01021997,  # 9p
        0xC36400,  # ceph
        0x5346414F,  # afs
        0x6B414653,  # kafs
        0x73757245,  # coda
        0x0BD00BD0,  # lustre
        0x47504653,  # gpfs
        0x01161970,  # gfs2
        0x7461636F,  # ocfs2
        0x19830326,  # beegfs
        0x20030528,  # orangefs
    }
)


def _check_mode(fd: int, *, write: bool, what: str) -> None:
    flags = open_flags(fd)
    if flags & os.O_PATH:
        raise OSError(EBADF, f"{what} is an O_PATH descriptor")
    access = flags & os.O_ACCMODE
    if write and access not in (os.O_WRONLY, os.O_RDWR):
        raise OSError(EBADF, f"{what} is not open for writing")
    if not write and access not in (os.O_RDONLY, os.O_RDWR):
        raise OSError(EBADF, f"{what} is not open for reading")
    if write and flags & os.O_APPEND:
        raise OSError(EBADF, f"{what} is open for appending")


def _device_file(fd: int, what: str, st_dev: int) -> FileIdentity:
    """The identity of a regular file of our mount, whose device number is ``st_dev``. OSError for anything else."""
    file = identity(fd)
    if file.st_dev != st_dev:
        raise OSError(EXDEV, f"{what} is not on this mount")
    if stat.S_ISDIR(file.mode):
        raise os_error(EISDIR)
    if not stat.S_ISREG(file.mode):
        raise OSError(EINVAL, f"{what} is not a regular file")
    return file


def check_copy(direction: str, host_fd: int, mount_fd: int, st_dev: int) -> tuple[FileIdentity, FileIdentity]:
    """The identities of both ends of a copy; ``st_dev`` is that of our mount. Asks no file system anything.

    OSError EBADF unless both descriptors may be used for the direction, EDEADLK when the host's file is on our mount,
    EXDEV when the other is not, EINVAL or EISDIR for what is neither a regular file nor, on the host's side, a block
    device.
    """
    load = direction == "load"
    _check_mode(host_fd, write=not load, what="the host's file")
    _check_mode(mount_fd, write=load, what="the file on the mount")
    host = identity(host_fd)
    if host.st_dev == st_dev:
        raise OSError(EDEADLK, "both files are on this mount: copy_file_range copies between them")
    mount = _device_file(mount_fd, "the file on the mount", st_dev)
    if stat.S_ISDIR(host.mode):
        raise os_error(EISDIR)
    if not stat.S_ISREG(host.mode) and not stat.S_ISBLK(host.mode):
        raise OSError(EINVAL, "the host's file is neither a regular file nor a block device")
    return host, mount


def check_attachable(fd: int, mode: str, st_dev: int) -> tuple[int, bool]:
    """The inode of a file whose memory a client asks for, and whether it may write there. Asks no file system anything.

    OSError EBADF for a descriptor that does not give the rights of the mode, EXDEV for a file that is not on our mount,
    EISDIR and EINVAL for one that is not a regular file.
    """
    what = "the file to attach"
    _check_mode(fd, write=False, what=what)
    if mode == READ_WRITE:
        _check_mode(fd, write=True, what=what)
    ino = _device_file(fd, what, st_dev).ino
    return ino, open_flags(fd) & (os.O_ACCMODE | os.O_APPEND) == os.O_RDWR


def check_registrable(fd: int, st_dev: int) -> int:
    """The inode of a file that a client has created for its memory. Asks no file system anything.

    OSError EBADF unless its descriptor is open for writing, and as of :func:`check_attachable`.
    """
    _check_mode(fd, write=True, what="the file on the mount")
    return _device_file(fd, "the file on the mount", st_dev).ino


def check_shareable(fd: int) -> None:
    """Check the descriptor of memory that a client wants to register. Asks no file system anything.

    OSError EINVAL for a file of storage: it may be served by a process of the client's that does not answer.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # files in memory alone have seals
    except OSError:
        if stat.S_IFMT(identity(fd).mode) in (stat.S_IFREG, stat.S_IFDIR):
            raise OSError(EINVAL, "the descriptor is not that of memory") from None


def check_limitable(fd: int, st_dev: int) -> int:
    """The inode of the directory whose limits a client wants to change. Asks no file system anything.

    OSError EXDEV and ENOTDIR for what is not a directory of the mount.
    """
    directory = identity(fd)
    if directory.st_dev != st_dev:
        raise OSError(EXDEV, "the directory is not on this mount")
    if not stat.S_ISDIR(directory.mode):
        raise os_error(ENOTDIR)
    return directory.ino


def check_revocable(fd: int, st_dev: int) -> int:
    """The inode of the file whose leases a client wants to end, by any descriptor of it. Asks no file system anything.

    OSError as of :func:`check_attachable`.
    """
    return _device_file(fd, "the file", st_dev).ino


def check_file_system(fd: int) -> bool:
    """Whether a file's file system is one that may stop answering. May block as the file's server does.

    OSError EINVAL for a file that is an interface of the kernel.
    """
    try:
        magic = file_system_type(fd)
    except OSError as error:
        if error.errno == ENOSYS:
            return True  # a FUSE server without STATFS; the kernel's own file systems all have it
        raise
    if magic in _KERNEL_FILE_SYSTEMS:
        raise OSError(EINVAL, "the host's file is an interface of the kernel, not storage")
    return magic in _SERVED_FILE_SYSTEMS
