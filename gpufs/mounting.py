"""Mounting and unmounting: system calls as root, fusermount3 as a user, and the list of mounts in mountinfo.

Nothing here touches a file of a mount, so a mount that hangs blocks nothing here. Root works on descriptors whose place
has been checked: the owner of a part of the path cannot redirect root by replacing it with a symbolic link.
"""

import errno
import os
import re
import select
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, NamedTuple

from gpufs import syscalls
from gpufs.exceptions import DEAD, NotOnMount
from gpufs.syscalls import closed_after, path_of

FUSE_DEVICE: Final = "/dev/fuse"
FILESYSTEM_TYPE: Final = "fuse.gpufs"

# The options of mount(8) that are flags of mount(2) and may be chosen; nosuid and nodev are always set.
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
# The flags that fusermount3 accepts. The others are about access times, which the daemon keeps for FUSE.
_USER_FLAGS: Final = frozenset({"ro", "noexec", "sync", "dirsync", "noatime"})
_MS_NOSUID: Final = 2
_MS_NODEV: Final = 4
_MS_REMOUNT: Final = 32
_MNT_FORCE: Final = 1
_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8
_REMEDY: Final = "; gpufs doctor says what to do"
_CONNECTIONS: Final = "/sys/fs/fuse/connections"
_FUSERMOUNT_TIMEOUT: Final = 30.0
_DESCRIPTOR_BYTES: Final = 4


class MountEntry(NamedTuple):
    """One gpufs mount, as the kernel lists it."""

    mountpoint: str
    root: str  # the directory of the file system that is shown there
    device: str  # "major:minor", the st_dev of its files
    source: str
    options: str
    fstype: str
    number: int  # the mount's ID
    flags: frozenset[str]  # of this mountpoint: rw, nosuid, relatime, ...; ro also if the file system is read-only

    @property
    def identity(self) -> str:
        """Identifies the mount, whatever its options become: no two mounts that exist at a time have the same.

        The kernel gives it to another mount as soon as this one is gone.
        """
        return f"{self.number} {self.device}"

    @property
    def uid(self) -> int:
        match = re.search(r"(?:^|,)user_id=(\d+)", self.options)
        return int(match[1]) if match else 0

    @property
    def st_dev(self) -> int:
        """The device number that stat(2) gives for its files."""
        major, minor = self.device.split(":")
        return os.makedev(int(major), int(minor))


def _undo_escapes(text: str) -> str:
    """Return a field of mountinfo, in which blanks and backslashes are escaped as three octal digits."""
    raw = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), os.fsencode(text))
    return os.fsdecode(raw)


def listed(pid: str = "self") -> Iterator[MountEntry]:
    """Every mount that a process sees, of any type, in the kernel's order."""
    return _parsed(f"/proc/{pid}/mountinfo")


def _parsed(mountinfo: str | int) -> Iterator[MountEntry]:
    """The mounts in such a file, which is open if it is given by its descriptor."""
    opened = isinstance(mountinfo, int)
    with open(mountinfo, errors="surrogateescape", newline="\n", closefd=not opened) as file:
        for line in file:
            fields = line.rstrip("\n").split(" ")
            separator = fields.index("-", 6)
            fstype, source, options = fields[separator + 1 : separator + 4]
            yield MountEntry(
                _undo_escapes(fields[4]),
                _undo_escapes(fields[3]),
                fields[2],
                _undo_escapes(source),
                options,
                fstype,
                int(fields[0]),
                frozenset(fields[5].split(",")) | ({"ro"} & set(options.split(","))),
            )


def by_device() -> dict[int, list[MountEntry]]:
    """The places where gpufs is mounted by st_dev of their files. Asks no mount anything."""
    return _by_device(listed())


def _by_device(entries: Iterable[MountEntry]) -> dict[int, list[MountEntry]]:
    places: dict[int, list[MountEntry]] = {}
    for entry in entries:
        if entry.fstype == FILESYSTEM_TYPE:
            places.setdefault(entry.st_dev, []).append(entry)
    return places


class MountTable:
    """The same for a caller that asks again and again: mountinfo is read only after a mount of any type has changed.

    Thread-safe. Works in a forked child.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._start()

    def _start(self) -> None:
        self.close()
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards all below
        self._fd = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._changes = select.poll()
        self._changes.register(self._fd, select.POLLPRI)  # once for each change since this file was opened
        self._places: dict[int, list[MountEntry]] | None = None

    def by_device(self) -> dict[int, list[MountEntry]]:
        """The places where gpufs is mounted by st_dev of their files."""
        if self._pid != os.getpid():  # the parent and its child would take each other's notifications
            self._start()
        with self._lock:
            if self._changes.poll(0) or self._places is None:
                os.lseek(self._fd, 0, os.SEEK_SET)
                self._places = _by_device(_parsed(self._fd))
            return self._places

    def close(self) -> None:
        """Release the descriptor. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    __del__ = close


def mounts(pid: str = "self", entries: Iterable[MountEntry] | None = None) -> list[MountEntry]:
    """Return the gpufs mounts that a process sees, dead ones as well; of several on one mountpoint the uppermost.

    ``entries``: what listed() returned to the caller, so that it is not read again. OSError if ``pid`` belongs to
    another user or has ended.
    """
    uppermost: dict[str, MountEntry] = {}
    for entry in listed(pid) if entries is None else entries:
        uppermost.pop(entry.mountpoint, None)  # each hides what was mounted there before it
        uppermost[entry.mountpoint] = entry
    return [entry for entry in uppermost.values() if entry.fstype == FILESYSTEM_TYPE]


def entry_of(mountpoint: str, entries: Iterable[MountEntry] | None = None) -> MountEntry | None:
    """Return the gpufs mount at an absolute path without symbolic links, or None. ``entries``: as of :func:`mounts`."""
    return next((entry for entry in mounts(entries=entries) if entry.mountpoint == mountpoint), None)


def entry_with(identity: str) -> MountEntry | None:
    """Return the gpufs mount of this identity, wherever it is now: a directory above it may have been renamed."""
    return next((entry for entry in mounts() if entry.identity == identity), None)


def absolute(path: str) -> str:
    """Return the path without symbolic links. Does not access a mount at the path itself, which may never answer.

    OSError ENOENT for a relative path if the current directory has been removed.
    """
    parent, name = os.path.split(os.path.abspath(path))
    if not name:
        return parent
    candidate = os.path.join(os.path.realpath(parent), name)
    return candidate if entry_of(candidate) is not None else os.path.realpath(path)


def is_root(path: str) -> bool:
    """Return whether gpufs is mounted at a path."""
    path = os.path.realpath(path)
    return any(entry.mountpoint == path for entries in by_device().values() for entry in entries)


def places_of(st_dev: int, path: str) -> list[MountEntry]:
    """Return the places that show the mount with this st_dev. NotOnMount, which names the path, if there is none."""
    places = by_device().get(st_dev)
    if places is None:
        raise NotOnMount(errno.EXDEV, "is not on a gpufs mount", path)
    return places


def root_of(mounts: Iterable[MountEntry]) -> MountEntry | None:
    """Return where a mount's root is visible, of the places that show the mount or a part of it; None if nowhere."""
    return next((entry for entry in mounts if entry.root == "/"), None)


def place_of(fd: int, mounts: Sequence[MountEntry]) -> str:
    """Return where an open file is: a directory of the mount, such as gpu0, or the mountpoint of a host file system.

    "" if that is not known.
    """
    path = os.readlink(path_of(fd))
    for mount in mounts:
        if path.startswith(mount.mountpoint.rstrip("/") + "/"):
            inside = mount.root + "/" + path.removeprefix(mount.mountpoint)
            return next(filter(None, inside.split("/")), "")
    if mounts or not os.path.isabs(path):
        return ""
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def _open_device() -> int:
    try:
        return os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
            text = f"{FUSE_DEVICE} is missing: load the module with modprobe fuse, or give the container the device"
            raise OSError(errno.ENODEV, text) from None
        raise OSError(error.errno, f"{FUSE_DEVICE}: {error.strerror}{_REMEDY}") from None


def _mount_on(directory: int, source: str, flags: int, names: Collection[str], options: str = "") -> None:
    """Call mount(2) for a descriptor, with more flags by their ``names``. OSError if it fails."""
    bits = flags | _MS_NOSUID | _MS_NODEV | sum(FLAGS[name] for name in set(names))
    target = path_of(directory).encode()
    syscalls.mount(os.fsencode(source), target, FILESYSTEM_TYPE.encode(), bits, options.encode())


def _number_of(fd: int) -> int:
    """Return the ID of the mount that a descriptor belongs to. Asks the file system nothing."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["mnt_id"])


def _open_directory(path: str) -> int:
    """Return a descriptor of a directory. OSError if the path leads through a symbolic link by now."""
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.readlink(path_of(fd)) != path:
            raise OSError(errno.ELOOP, "the path has just been changed to lead to another place")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _mount_directly(
    mountpoint: str, source: str, allow_other: bool, flags: Collection[str], before: Collection[MountEntry]
) -> tuple[int, MountEntry]:
    """Attach a new mount to the directory by descriptor; undo that if the mount is not at its place afterwards.

    ``before``: the mounts that existed before.
    """
    options = "rootmode=40000,default_permissions" + (",allow_other" if allow_other else "")
    with ExitStack() as opened:
        fuse = _open_device()
        opened.callback(os.close, fuse)
        try:
            directory = _open_directory(mountpoint)
            opened.callback(os.close, directory)
            ids = f"user_id={os.geteuid()},group_id={os.getegid()}"
            _mount_on(directory, source, 0, flags, f"fd={fuse},{ids},{options}")
        except OSError as failure:
            raise OSError(failure.errno, f"{mountpoint}: mount failed: {failure.strerror}") from None
        try:
            # The mount's number does not show whether it is new: another mount may just have given it back.
            entry = entry_of(mountpoint) if os.readlink(path_of(directory)) == mountpoint else None
            if entry is None:
                raise OSError(errno.EIO, f"{mountpoint}: mount failed: the mountpoint has moved")
        except BaseException:
            opened.close()  # closing the connection kills the mount
            _remove_dead(mountpoint, before)
            raise
        opened.pop_all()
        os.close(directory)
        return fuse, entry


def _remove_dead(mountpoint: str, before: Collection[MountEntry]) -> None:
    """Remove dead mounts of gpufs that are newer than those ``before``."""
    known = {(entry.identity, entry.mountpoint) for entry in before}
    try:
        for entry in mounts():
            if (entry.identity, entry.mountpoint) not in known:
                unmount_dead(entry)
    except OSError:  # mountinfo cannot be read
        with suppress(OSError):
            unmount(mountpoint, lazy=True)


def _fusermount(purpose: str) -> str:
    """Return the path of fusermount3, the set-user-id program by which users mount. OSError if it is missing."""
    import shutil  # copies, which only read mountinfo, do without it

    program = shutil.which("fusermount3")
    if program is None:
        raise OSError(errno.ENOENT, f"fusermount3 is needed to {purpose} as a user: install the package fuse3")
    return program


def _last_line(output: bytes, default: str) -> str:
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("fusermount3: ") if lines else default


def _mount_as_user(mountpoint: str, source: str, allow_other: bool, flags: Collection[str]) -> int:
    """Mount by fusermount3, which opens the device and sends the descriptor over the socket that _FUSE_COMMFD names."""
    import socket
    import subprocess

    program = _fusermount("mount")
    shown = source.replace("\\", "\\\\").replace(",", "\\,")  # as a value in the list of options
    options = [f"fsname={shown}", "subtype=gpufs", "default_permissions", "nosuid", "nodev"]
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
        _, output = process.communicate()
    if descriptors:
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]
    reason = _last_line(output, "fusermount3 gave no descriptor")
    remedy = _REMEDY if FUSE_DEVICE in reason else ""
    raise OSError(errno.EPERM, f"{mountpoint}: {reason}{remedy}")


def mount(
    mountpoint: str, *, source: str = "gpufs", allow_other: bool = False, flags: Collection[str] = ()
) -> tuple[int, MountEntry]:
    """Mount an empty FUSE connection at ``mountpoint``; return its descriptor, which is close-on-exec, and the mount.

    ``mountpoint`` is absolute and without symbolic links. Always with default_permissions, nosuid and nodev; ``flags``
    are names of FLAGS. Root uses system calls, other users fusermount3. On failure, an OSError with one line for the
    user, nothing is mounted: EBUSY if gpufs is mounted there already.
    """
    present = list(listed())
    if entry_of(mountpoint, present) is not None:
        raise OSError(errno.EBUSY, f"{mountpoint}: gpufs is mounted there already")
    if os.geteuid() == 0:
        return _mount_directly(mountpoint, source, allow_other, flags, present)
    fd = _mount_as_user(mountpoint, source, allow_other, flags)
    try:
        entry = entry_of(mountpoint)
        if entry is None:
            raise OSError(errno.EIO, f"{mountpoint}: mounted, but not in mountinfo")
    except BaseException:
        os.close(fd)
        with suppress(OSError):
            unmount(mountpoint, lazy=True)
        raise
    return fd, entry


@contextmanager
def _opened(entry: MountEntry) -> Iterator[int]:
    """Open the mount's root. OSError EINVAL if another mount has taken its place."""
    with closed_after(os.open(entry.mountpoint, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)) as fd:
        if _number_of(fd) != entry.number:
            raise OSError(errno.EINVAL, f"{entry.mountpoint}: no longer this mount")
        yield fd


def remount(entry: MountEntry, flags: Collection[str]) -> None:
    """Replace a mount's FLAGS; those not named are off. OSError, with one line: EBUSY, EPERM, EINVAL."""
    with _opened(entry) as fd:
        try:
            _mount_on(fd, entry.source, _MS_REMOUNT, flags)
        except OSError as failure:
            raise OSError(failure.errno, f"{entry.mountpoint}: remount failed: {failure.strerror}") from None


def abort(entry: MountEntry) -> None:
    """Cut a mount's connection, so that every call that waits for it fails.

    Root and the mount's user may do it if the kernel's control file system for FUSE is mounted. Otherwise nothing
    happens, as when the mount is gone.
    """
    path = f"{_CONNECTIONS}/{os.minor(entry.st_dev)}/abort"
    # While the mount is open, the kernel gives its number to no other one.
    with suppress(OSError), _opened(entry), open(path, "wb", buffering=0) as control:
        control.write(b"1")


def unmount_dead(entry: MountEntry) -> bool:
    """Detach this mount if its daemon is dead. False if the daemon lives or the mount is gone. OSError as unmount().

    Waits until a daemon that is ending has ended, or a living one has answered.
    """
    try:
        with _opened(entry) as fd:
            try:
                os.fstatvfs(fd)
                return False
            except OSError as failure:
                if failure.errno not in DEAD:
                    return False
            if os.geteuid() != 0:
                unmount(entry.mountpoint, lazy=True)
            else:  # by the descriptor: another mount at the same place stays
                _umount2(path_of(fd), _MNT_DETACH, entry.mountpoint)
            return True
    except OSError as failure:
        if failure.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False  # the mount is gone, or its place has changed
        raise


def _umount2(target: str, flags: int, mountpoint: str) -> None:
    try:
        syscalls.umount2(os.fsencode(target), flags)
    except OSError as failure:
        raise OSError(failure.errno, f"{mountpoint}: {failure.strerror}") from None


def unmount(mountpoint: str, *, force: bool = False, lazy: bool = False) -> None:
    """Unmount. OSError, with one line: EBUSY while it is used, EPERM, EINVAL if nothing is mounted.

    ``lazy`` detaches it now; it ends when its last user has gone. ``force`` cuts the connection first, which ends calls
    that hang; a user other than root gets a lazy unmount instead.
    """
    if os.geteuid() == 0:
        flags = _UMOUNT_NOFOLLOW | (_MNT_FORCE if force else 0) | (_MNT_DETACH if lazy else 0)
        # Through the directory above it: a descriptor of the mount itself would keep it busy.
        folder, name = os.path.split(mountpoint)
        try:
            above = _open_directory(folder)
        except OSError as failure:
            # A process without a free descriptor can only use the path.
            if failure.errno != errno.EMFILE:
                raise
            _umount2(mountpoint, flags, mountpoint)
            return
        try:
            _umount2(f"{path_of(above)}/{name}", flags, mountpoint)
        finally:
            os.close(above)
        return
    import subprocess

    arguments = [_fusermount("unmount"), "-u", *(["-z"] if lazy or force else []), "--", mountpoint]
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
    reason = _last_line(done.stderr, "fusermount3 failed")
    for code in (errno.EBUSY, errno.EPERM, errno.EINVAL):
        if os.strerror(code).lower() in reason.lower():
            raise OSError(code, reason)
    if not os.path.exists("/etc/mtab"):  # in a bare chroot; systemd and container engines create it
        reason += " (fusermount3 needs /etc/mtab: as root, ln -s ../proc/self/mounts /etc/mtab)"
    raise OSError(errno.EINVAL if entry_of(mountpoint) is None else errno.EPERM, reason)
