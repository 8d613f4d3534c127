"""Mounting and unmounting: mount(2) as root, fusermount3 as a user, and the list of mounts in mountinfo.

Nothing here touches a file of a mount, so nothing here can hang because a mount does.
"""

import ctypes
import errno
import os
import re
import select
import shutil
import socket
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

FUSE_DEVICE: Final = "/dev/fuse"
FILESYSTEM_TYPE: Final = "fuse.gpufs"

# Of the options of mount(8), those that are flags of mount(2) and may be chosen: nosuid and nodev always are.
FLAGS: Final = {
    "ro": 1,
    "noexec": 8,
    "sync": 16,
    "dirsync": 128,
    "nosymfollow": 256,
    "noatime": 1 << 10,
    "nodiratime": 1 << 11,
    "silent": 1 << 15,
    "relatime": 1 << 21,
    "strictatime": 1 << 24,
    "lazytime": 1 << 25,
}
# Those that fusermount3 takes. The others say how access times are kept, which for FUSE the daemon does.
_USER_FLAGS: Final = frozenset({"ro", "noexec", "sync", "dirsync", "noatime"})
_MS_NOSUID: Final = 2
_MS_NODEV: Final = 4
_MS_REMOUNT: Final = 32
_MNT_FORCE: Final = 1
_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8
# How a mount answers whose daemon is dead.
_DEAD: Final = (errno.ENOTCONN, errno.ECONNABORTED)
_CONNECTIONS: Final = "/sys/fs/fuse/connections"
_FUSERMOUNT_TIMEOUT: Final = 30.0
_DESCRIPTOR_BYTES: Final = 4

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One gpufs mount, as the kernel lists it."""

    mountpoint: str
    device: str  # "major:minor", the st_dev of its files
    source: str
    options: str
    fstype: str
    number: int  # the mount's ID
    flags: frozenset[str]  # of this mountpoint: rw, nosuid, relatime, ...

    @property
    def identity(self) -> str:
        """Which mount it is, whatever its options have become: no two that exist at a time have the same."""
        return f"{self.number} {self.device}"

    @property
    def uid(self) -> int:
        """The user who mounted it."""
        found = re.search(r"(?:^|,)user_id=(\d+)", self.options)
        return int(found[1]) if found else 0

    @property
    def st_dev(self) -> int:
        """The device number that stat(2) gives for its files."""
        major, minor = self.device.split(":")
        return os.makedev(int(major), int(minor))


def _undo_escapes(text: str) -> str:
    """A field of mountinfo, in which blanks and backslashes stand as three octal digits."""
    raw = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), os.fsencode(text))
    return os.fsdecode(raw)


def mounts(pid: str = "self") -> list[MountEntry]:
    """The gpufs mounts that a process can see, dead ones as well; of several on one mountpoint the uppermost.

    OSError where ``pid`` is another's process, or has ended.
    """
    found: dict[str, MountEntry | None] = {}
    with open(f"/proc/{pid}/mountinfo", errors="surrogateescape", newline="\n") as file:
        for line in file:
            fields = line.rstrip("\n").split(" ")
            separator = fields.index("-", 6)
            fstype, source, options = fields[separator + 1 : separator + 4]
            mountpoint = _undo_escapes(fields[4])
            found.pop(mountpoint, None)
            if fstype == FILESYSTEM_TYPE:
                found[mountpoint] = MountEntry(
                    mountpoint,
                    fields[2],
                    _undo_escapes(source),
                    options,
                    fstype,
                    int(fields[0]),
                    frozenset(fields[5].split(",")),
                )
            else:
                found[mountpoint] = None  # hides what is mounted below it there
    return [entry for entry in found.values() if entry is not None]


def mountpoints() -> list[str]:
    """Where this process can see anything mounted, of whatever kind."""
    with open("/proc/self/mountinfo", errors="surrogateescape", newline="\n") as file:
        return [_undo_escapes(line.split(" ")[4]) for line in file]


def entry_of(mountpoint: str) -> MountEntry | None:
    """The gpufs mount at an absolute path without symbolic links, None where there is none."""
    return next((entry for entry in mounts() if entry.mountpoint == mountpoint), None)


def filesystem_type(device: int) -> str | None:
    """What kind of file system has this st_dev; None where no mount shows it under that number."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", errors="surrogateescape", newline="\n") as file:
        for line in file:
            fields = line.split(" ")
            if fields[2] == number:
                return fields[fields.index("-", 6) + 1]
    return None


class Changes:
    """Tells when mounts of this process's namespace have come, gone or changed. For one thread."""

    def __init__(self) -> None:
        self._file = open("/proc/self/mountinfo", "rb")  # noqa: SIM115 - as long as this object
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLPRI)

    def wait(self) -> None:
        """Returns after the next change since the last call, or since this object was made."""
        self._poll.poll()

    def close(self) -> None:
        """Not while another thread waits."""
        self._file.close()


def _open_device() -> int:
    try:
        return os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise OSError(errno.ENODEV, f"there is no {FUSE_DEVICE}: this kernel or container offers no FUSE") from None
    except OSError as error:
        raise OSError(error.errno, f"{FUSE_DEVICE}: {error.strerror}") from None


def _bits(flags: Collection[str]) -> ctypes.c_ulong:
    return ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | sum(FLAGS[name] for name in set(flags)))


def _mount_directly(mountpoint: str, source: str, allow_other: bool, flags: Collection[str]) -> int:
    fd = _open_device()
    options = f"fd={fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},default_permissions"
    if allow_other:
        options += ",allow_other"
    status = _libc.mount(
        os.fsencode(source),
        os.fsencode(mountpoint),
        FILESYSTEM_TYPE.encode(),
        _bits(flags),
        options.encode(),
    )
    if status != 0:
        code = ctypes.get_errno()
        os.close(fd)
        raise OSError(code, f"{mountpoint}: mount failed: {os.strerror(code)}")
    return fd


def _option(text: str) -> str:
    """A value in the option list of fusermount3, where commas and backslashes are escaped."""
    return text.replace("\\", "\\\\").replace(",", "\\,")


def _mount_as_user(mountpoint: str, source: str, allow_other: bool, flags: Collection[str]) -> int:
    """fusermount3 opens the device, mounts, and sends the descriptor over the socket that _FUSE_COMMFD names."""
    program = shutil.which("fusermount3")
    if program is None:
        raise OSError(errno.ENOENT, "fusermount3 is needed to mount as a user: install the package fuse3")
    options = [f"fsname={_option(source)}", "subtype=gpufs", "default_permissions", "nosuid", "nodev"]
    options += sorted(_USER_FLAGS.intersection(flags))
    if allow_other:
        options.append("allow_other")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        with theirs:
            process = subprocess.Popen(
                [program, "-o", ",".join(options), "--", mountpoint],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno()), "LC_ALL": "C"},
            )
        descriptors: list[int] = []
        ours.settimeout(_FUSERMOUNT_TIMEOUT)
        try:
            _, descriptors, _, _ = socket.recv_fds(ours, _DESCRIPTOR_BYTES, 1)
        except OSError:
            process.kill()
        _, said = process.communicate()
    if descriptors:
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    reason = lines[-1].removeprefix("fusermount3: ") if lines else "fusermount3 gave no descriptor"
    raise OSError(errno.EPERM, f"{mountpoint}: {reason}")


def mount(mountpoint: str, *, source: str = "gpufs", allow_other: bool = False, flags: Collection[str] = ()) -> int:
    """Mounts an empty FUSE connection at ``mountpoint`` and returns its descriptor, close-on-exec and the caller's.

    ``mountpoint`` is absolute and without symbolic links. Always with default_permissions, nosuid and nodev; ``flags``
    are names of FLAGS. As root by mount(2), otherwise by fusermount3. OSError with one line for the user where that
    cannot be; nothing is mounted then.
    """
    if os.geteuid() == 0:
        return _mount_directly(mountpoint, source, allow_other, flags)
    return _mount_as_user(mountpoint, source, allow_other, flags)


def remount(mountpoint: str, flags: Collection[str]) -> None:
    """Gives a mount other FLAGS; those that are not named are off. OSError, with one line: EBUSY, EPERM."""
    status = _libc.mount(None, os.fsencode(mountpoint), None, ctypes.c_ulong(_bits(flags).value | _MS_REMOUNT), None)
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{mountpoint}: remount failed: {os.strerror(code)}")


def abort(entry: MountEntry) -> bool:
    """Cuts a mount's connection, so that whoever waits for it gets an error. False where we may not or cannot.

    Root and the mount's user may, where the kernel's control file system for FUSE is mounted.
    """
    try:
        fd = os.open(f"{_CONNECTIONS}/{os.minor(entry.st_dev)}/abort", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, b"1")
    finally:
        os.close(fd)
    return True


def unmount_dead(entry: MountEntry) -> bool:
    """Detaches this very mount if its daemon is dead; False where it is not, or is no longer there. OSError as unmount.

    Waits until a daemon that is ending has ended, or a living one has answered.
    """
    try:
        fd = os.open(entry.mountpoint, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as failure:
        if failure.errno not in _DEAD:
            return False
        raise
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
            if f"mnt_id:\t{entry.number}\n" not in file.readlines():
                return False
        try:
            os.fstatvfs(fd)
            return False
        except OSError as failure:
            if failure.errno not in _DEAD:
                return False
        if os.geteuid() != 0:
            try:
                unmount(entry.mountpoint, lazy=True)
            except OSError as failure:
                if failure.errno == errno.EINVAL:
                    return False  # somebody else was faster
                raise
            return True
        # By the descriptor: whatever is mounted there in this moment stays.
        if _libc.umount2(f"/proc/self/fd/{fd}".encode(), _MNT_DETACH) != 0:
            code = ctypes.get_errno()
            if code == errno.EINVAL:
                return False  # somebody else was faster
            raise OSError(code, f"{entry.mountpoint}: {os.strerror(code)}")
        return True
    finally:
        os.close(fd)


def unmount(mountpoint: str, *, force: bool = False, lazy: bool = False) -> None:
    """Takes a mount away. OSError, with one line: EBUSY while it is used, EPERM, EINVAL where nothing is mounted.

    ``lazy`` detaches it now; it ends when its last user has gone. ``force`` cuts the connection first, so that what
    hangs in it ends; a user who is not root cannot do that and gets a lazy unmount instead.
    """
    if os.geteuid() == 0:
        flags = _UMOUNT_NOFOLLOW | (_MNT_FORCE if force else 0) | (_MNT_DETACH if lazy else 0)
        if _libc.umount2(os.fsencode(mountpoint), flags) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"{mountpoint}: {os.strerror(code)}")
        return
    program = shutil.which("fusermount3")
    if program is None:
        raise OSError(errno.ENOENT, "fusermount3 is needed to unmount as a user: install the package fuse3")
    arguments = [program, "-u", *(["-z"] if lazy or force else []), "--", mountpoint]
    try:
        done = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_FUSERMOUNT_TIMEOUT,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        raise OSError(errno.ETIMEDOUT, f"{mountpoint}: fusermount3 does not end") from None
    if done.returncode == 0:
        return
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    reason = lines[-1] if lines else "fusermount3 failed"
    for code in (errno.EBUSY, errno.EPERM, errno.EINVAL):
        if os.strerror(code).lower() in reason.lower():
            raise OSError(code, reason)
    raise OSError(errno.EINVAL if entry_of(mountpoint) is None else errno.EPERM, reason)
