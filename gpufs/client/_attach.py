"""Attaching: the memory behind a file is mapped into this process, without a copy."""

from __future__ import annotations

import errno
import os
import stat
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

from gpufs import mounting, protocol
from gpufs._naming import named_in
from gpufs.client import _daemons
from gpufs.client._array import DeviceArray
from gpufs.client._connection import Connection, Memory
from gpufs.drivers import HOST
from gpufs.engine import Mapping, SharedPiece
from gpufs.exceptions import NotOnMount, as_failure_of_mount, failure_of_mount, text_of
from gpufs.modes import COPY_ON_WRITE, READ, READ_WRITE, Mode, check_mode
from gpufs.mounting import MountEntry
from gpufs.syscalls import close_all, closed_after, path_of

GRANULE: Final = 2 << 20  # files below this size share memory with others
# Addresses that are reserved so that a file can grow while it is attached.
_RESERVE_FACTOR: Final = 4
_LEAST_RESERVE: Final = 1 << 30
_WHY_A_COPY: Final[dict[Mode, str]] = {
    "r": 'a program that may not write to the file gets a private copy (mode "r+", or `--trust-readers`)',
    "c": 'mode "c" is a private copy here',
}
_READ_ONLY_HERE: Final = (
    "{path} is read-only in this program, which has written to it; "
    'gpufs run --mode c, or mode="c" of a function, keeps changes private'
)
_SLEEPS: Final = "{path} sleeps in this program, which has used it: call gpufs.wake() before"
# The kernel's answers if a file may be read but not written.
_READ_ONLY: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


class Attachment:
    """The memory of one file, mapped into this process, and its lease. Both end when nothing refers to this object."""

    def __init__(
        self,
        path: str,
        identity: tuple[int, int],
        mode: Mode,
        connection: Connection,
        mapping: Mapping,
        answer: protocol.Attached,
    ) -> None:
        """``identity``: st_dev and st_ino of the file."""
        self.path = path
        self.is_asleep = False
        self.mode = mode
        self.driver = (
            HOST if answer.pci_address == protocol.HOST_TIER else answer.driver
        )  # of the memory: that of arrays
        self.private = answer.private
        self.size = answer.size
        self.placement = answer.placement
        self.mapping = mapping
        self.followers: weakref.WeakSet[Any] = weakref.WeakSet()  # each a gpufs.Follower
        self.layout: Any = None  # of the version in use, if something follows the file
        # What stat(2) said of the directory whose files follow together, if this is one of them.
        self.directory: tuple[int, int, int, int] | None = None
        self.is_lost = False  # the memory is mapped no longer, since a change of the version failed in the middle
        self._lock = threading.Lock()  # one refresh, sleep, wake or change of the version at a time
        self._pci_address = answer.pci_address
        self._own(identity, connection, answer.id)
        _known.add(self)

    def _own(self, identity: tuple[int, int], connection: Connection, number: int) -> None:
        """Take over a lease, which ends with this object."""
        self.identity = identity
        self._connection = connection
        self._number = number
        # Not at the exit: threads that use the memory may still run then, and the process's end releases everything.
        self._finalizer = weakref.finalize(self, _end, os.getpid(), self.mapping, connection, number)
        self._finalizer.atexit = False

    def refresh(self) -> None:
        """Map what the file has grown by. OSError as DeviceArray.refresh()."""
        with self._lock:
            if self.is_asleep:
                raise OSError(errno.EAGAIN, "the attachment sleeps: gpufs.wake() it first", self.path)
            self._map_rest()

    def _map_rest(self) -> None:
        with as_failure_of_mount(self.path):
            answer, pieces = self._connection.refresh(self._number, self.mapping.bytes)
        _add(self.mapping, pieces, answer, self.path)
        self.size, self.placement = answer.size, answer.placement
        self.is_lost = False

    def sleep(self) -> bool:
        """Unmap the memory and keep its addresses. False: it sleeps already. OSError as gpufs.sleep().

        After check_together(): what fails only then may leave nothing mapped.
        """
        with self._lock:
            if self.is_asleep:
                return False
            self.mapping.clear()
            if self.driver == HOST:
                self.mapping.explain_accesses(_SLEEPS.format(path=self.path))
            try:
                self._connection.sleep(self._number)
            except OSError as error:
                try:
                    self._map_rest()
                except OSError:  # not even that: the device is full by now, or the daemon has gone
                    self.is_asleep = True
                    text = f"{text_of(error)}; its memory could not be mapped again: call gpufs.wake()"
                    raise OSError(error.errno or errno.EIO, text, self.path) from None
                self._explain()
                raise failure_of_mount(error, self.path) from None
            self.is_asleep = True
            return True

    def wake(self) -> bool:
        """Map the memory again. False: it is awake. OSError as gpufs.wake(); it sleeps on then."""
        with self._lock:
            if not self.is_asleep:
                return False
            with as_failure_of_mount(self.path):
                answer, pieces = self._connection.wake(self._number)
            if answer.placement != self.placement:
                close_all([piece.fd for piece in pieces])
                text = f"its first byte lies at {answer.placement} now, and lay at {self.placement}: attach it again"
                raise OSError(errno.ESTALE, text, self.path)
            self.mapping.clear()  # what a wake that failed has mapped
            _add(self.mapping, pieces, answer, self.path)
            self._explain()
            self.is_asleep = False
            return True

    def take_newest(self) -> bool:
        """Take over the newest version if somebody follows the file."""
        with following:
            return any(follower.take_newest() for follower in list(self.followers)[:1])  # for all of them

    def _find_version(self, path: str, check: Callable[[Attachment, int], object]) -> _Version | None:
        """Lease the file that a name leads to now. None if it is this file."""
        try:
            fd, mounts = _open_file(path, self.mode)
        except OSError as error:
            error.filename = self.path
            raise
        with closed_after(fd):
            status = os.fstat(fd)
            identity = status.st_dev, status.st_ino
            if identity == self.identity:
                return None
            if status.st_dev != self.identity[0]:
                raise OSError(errno.EXDEV, "the new version is on another mount", self.path)
            layout = check(self, fd)
            connection, (answer, pieces) = _lease(fd, mounts, self.mode, self.placement)
        version = _Version(self, identity, layout, connection, answer, pieces)
        try:
            self._check_version(answer, pieces)
        except BaseException:
            version.drop()
            raise
        return version

    def _map_version(self, version: _Version) -> None:
        pieces, version.pieces = version.pieces, []
        _add(self.mapping, pieces, version.answer, self.path)

    def _adopt(self, version: _Version) -> None:
        """Keep the lease of the version that is mapped, and end the former one."""
        self._explain()
        former = self._connection, self._number
        self._finalizer.detach()
        self._own(version.identity, version.connection, version.answer.id)
        self.is_asleep = self.is_lost = False
        self.size, self.layout = version.answer.size, version.layout
        former[0].detach(former[1])

    def _check_version(self, answer: protocol.Attached, pieces: list[SharedPiece]) -> None:
        """OSError if the memory of a new version cannot be mapped at the addresses of this one."""
        path = self.path
        if answer.pci_address != self._pci_address:
            raise OSError(errno.EXDEV, "the new version is on another device", path)
        if answer.private and not self.private:
            text = "this program may not write to the new version, and would get a private copy of it"
            raise OSError(errno.EACCES, f"{text}: keep the owner and the mode of the old one", path)
        if answer.placement != self.placement:
            text = f"the first byte of the new version lies at {answer.placement} of its memory, and has to lie at "
            raise OSError(errno.EBUSY, f"{text}{self.placement}: another program uses it as it lies", path)
        if pieces and pieces[-1].offset + pieces[-1].bytes > self.mapping.capacity:
            raise OSError(errno.EFBIG, "the new version has more memory than there are addresses reserved", path)

    def _map_old_version(self, failure: BaseException) -> None:
        """Map the memory again that has just been unmapped for a new version. OSError if that fails, too."""
        if self.is_asleep:
            self.mapping.clear()
            return
        self.is_lost = True
        try:
            self._map_again()
        except OSError as error:
            text = f"the new version could not be mapped ({failure}), nor the old one again: attach the file"
            raise OSError(error.errno or errno.EIO, f"{text} ({text_of(error)})", self.path) from None

    def restore(self) -> None:
        """Map the memory again if it is lost. OSError if that fails again."""
        with self._lock:
            if self.is_lost:
                self._map_again()

    def _map_again(self) -> None:
        self.mapping.clear()
        self._map_rest()
        self._explain()

    def _explain(self) -> None:
        """Say which accesses to the memory are fatal from now on."""
        if self.driver == HOST:
            self.mapping.explain_accesses(_READ_ONLY_HERE.format(path=self.path) if self.mode == READ else "")


@dataclass(slots=True)
class _Version:
    """The newest version of a file: leased, and not yet mapped."""

    attachment: Attachment
    identity: tuple[int, int]
    layout: object
    connection: Connection
    answer: protocol.Attached
    pieces: list[SharedPiece]

    def drop(self) -> None:
        close_all([piece.fd for piece in self.pieces])
        self.connection.detach(self.answer.id)


following: Final = threading.RLock()  # one change of versions at a time, with what the followers do then


def take_versions(
    named: Sequence[tuple[Attachment, str]],
    check: Callable[[Attachment, int], object],
    check_all: Callable[[], None] = lambda: None,
) -> bool:
    """Map the files that have names now at the addresses of their older versions, and end the leases on those.

    All of them or none: a failure leaves everything as it is, unless its text says otherwise. What sleeps is awake
    afterwards. ``check`` gets an open descriptor of each new file and returns its layout; what it raises refuses the
    version, and so does what ``check_all`` raises once all are leased. False if nothing is newer. FileNotFoundError if
    a name leads to nothing. The caller holds ``following``.
    """
    versions: list[_Version] = []
    unmapped: list[Attachment] = []
    with ExitStack() as locked:
        for attachment, _ in named:
            locked.enter_context(attachment._lock)
        try:
            for attachment, path in named:
                if (version := attachment._find_version(path, check)) is not None:
                    versions.append(version)
            check_all()
            for version in versions:
                version.attachment.mapping.clear()  # waits for all work on the device; a failure unmaps nothing
                unmapped.append(version.attachment)
                version.attachment._map_version(version)
        except BaseException as error:
            with ExitStack() as undone:  # all of it, whatever fails
                for version in versions:
                    undone.callback(version.drop)
                for attachment in unmapped:
                    undone.callback(attachment._map_old_version, error)
            raise
        for version in versions:
            version.attachment._adopt(version)
    return bool(versions)


def check_together(attached: Sequence[Attachment], what: protocol.Move) -> None:
    """OSError unless all of them can sleep, or wake, now."""
    by_connection: dict[Connection, list[Attachment]] = {}
    for each in attached:
        by_connection.setdefault(each._connection, []).append(each)
    for connection, some in by_connection.items():
        with as_failure_of_mount(os.path.commonpath([each.path for each in some])):
            connection.check([each._number for each in some], what)


# The attachments of this process, and the functions that are called for each new one.
_known: Final[weakref.WeakSet[Attachment]] = weakref.WeakSet()
_watchers: Final[list[Callable[[Attachment], None]]] = []


def attachments(watcher: Callable[[Attachment], None] | None = None) -> list[Attachment]:
    """Return the attachments of this process. ``watcher`` is called with each later one."""
    if watcher is not None and watcher not in _watchers:
        _watchers.append(watcher)
    while True:
        with suppress(RuntimeError):  # another thread attaches one
            return list(_known)


def absolute_name(path: str) -> str:
    """Make a name that does not depend on the working directory. Links in it stay."""
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


def _end(process: int, mapping: Mapping, connection: Connection, number: int) -> None:
    if os.getpid() == process:  # else this is a forked child, whose copies of the parent's objects end nothing
        try:
            mapping.close()
        finally:
            connection.detach(number)


def _add(mapping: Mapping, pieces: list[SharedPiece], answer: protocol.Attached, path: str) -> None:
    """Map pieces, whose descriptors the mapping takes over. They complete the memory of the file."""
    try:
        if pieces:
            mapping.add(pieces)
    except OSError as error:
        if error.errno == errno.EFBIG:
            text = "the file has outgrown the addresses that are reserved for it: attach it again"
            raise OSError(errno.EFBIG, text, path) from None
        raise failure_of_mount(error, path) from None
    # The daemon may be another user's. Beyond the mapping this process has other memory.
    if answer.size > 0 and answer.placement + answer.size > mapping.bytes:
        text = (
            f"the daemon gave {mapping.bytes} bytes of memory for a file of {answer.size} bytes, which begins at byte "
            f"{answer.placement} of it"
        )
        raise OSError(errno.EPROTO, text, path)


def _open_file(path: str, mode: Mode) -> tuple[int, list[MountEntry]]:
    """Open the file with as many rights as there are; returns its mounts, too. OSError if no memory is behind it."""
    named = os.open(path, os.O_PATH | os.O_CLOEXEC)  # opening a FIFO or a device in another way has effects
    with closed_after(named):
        status = os.fstat(named)
        mounts = mounting.by_device().get(status.st_dev)
        if mounts is None:
            raise NotOnMount(errno.EXDEV, "not on a gpufs mount: only files there can be attached", path)
        if stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        try:
            if mode != COPY_ON_WRITE:
                return os.open(path_of(named), os.O_RDWR | os.O_CLOEXEC), mounts
        except OSError as error:
            if mode == READ_WRITE or error.errno not in _READ_ONLY:
                raise
        return os.open(path_of(named), os.O_RDONLY | os.O_CLOEXEC), mounts


def _lease(fd: int, mounts: list[MountEntry], mode: Mode, placement: int | None) -> tuple[Connection, Memory]:
    """Ask for a lease on an open file, and for its memory. OSError if the daemon refuses."""
    st_dev = os.fstat(fd).st_dev

    def ask() -> tuple[Connection, Memory]:
        connection = _daemons.shared_connection(st_dev, mounts)
        return connection, connection.attach(fd, mode, placement)

    return _daemons.repeat_if_it_dies(ask)


@named_in("gpufs")
def attach(
    path: str | os.PathLike[str],
    mode: Mode = READ,
    *,
    reserve: int | None = None,
    copy: Literal[False] | None = None,
    placement: int | None = None,
) -> DeviceArray:
    """Map the memory behind a file of a gpufs mount into this process, without a copy.

    The file must exist, and this program needs the permissions that open(2) would ask for. While it is attached the
    file can grow but not shrink: truncating it, punching holes into it and opening it with O_TRUNC fail with EBUSY.
    Removing and replacing its name are possible. The end of the program ends everything, also by SIGKILL.

    Parameters
    ----------
    path
        The file. With content: holes have no memory.
    mode
        "r" maps the memory read-only. A program that may not write to the file gets a private copy in GPU memory,
        unless the mount has the knob ``trust_readers``: a GPU's driver cannot forbid writing. The same holds for a
        small file (less than a granule, 2 MiB). "r+" maps it for reading and writing and allocates the file's holes.
        "c" (copy on write, as in numpy.memmap) lets this program write, and nobody else sees it: a page of host memory
        is copied when it is written to, memory of a GPU is copied at once.
    reserve
        Bytes of addresses to reserve for the file's growth, seen after `DeviceArray.refresh`. None: four times the
        size, and at least 1 GiB.
    copy
        False: an error instead of a private copy. None: a private copy where nothing else is possible.
    placement
        Where in its memory the file's first byte should lie, below 256. ``-header % 256`` aligns what follows a header
        of that many bytes. The daemon moves the contents there, which takes 2 ms for each GiB on a
        GPU, unless another program uses them or the device is full. The file's bytes stay what they are. None: where
        they lie now.

    Returns
    -------
    DeviceArray
        The file's bytes, as an array of uint8. ``address % 256`` is where they begin.

    Raises
    ------
    NotOnMount
        The file is not on a gpufs mount.
    DeviceFull, QuotaExceeded
        The device lacks memory for holes or a private copy, or that would exceed a limit.
    DaemonDied
        The mount's daemon has died.
    OSError
        As of open(2); EINVAL if the file has no device memory (it is below ``backing`` or ``.gpufs``), ENODATA for
        holes with mode "r".
    ValueError
        ``mode`` is none of "r", "r+" and "c", ``reserve`` is less than the file's size, ``placement`` is not below 256,
        or only a copy is possible and ``copy`` is False.

    Examples
    --------
    >>> weights = gpufs.attach("/mnt/gpufs/gpu0/weights")  # doctest: +SKIP
    >>> tensor = torch.from_dlpack(weights.view("bfloat16", (4096, -1)))  # doctest: +SKIP
    """
    check_mode(mode)
    if copy not in (None, False):
        raise ValueError(f"copy: {copy!r} is neither None nor False: copy the elements of the array instead")
    if placement is not None and placement not in range(protocol.PLACEMENT_END):
        raise ValueError(f"placement: {placement!r} is not a number below {protocol.PLACEMENT_END}")
    name = os.fsdecode(path)
    with as_failure_of_mount(name):
        fd, mounts = _open_file(name, mode)
        status = os.fstat(fd)
    try:
        connection, (answer, pieces) = _lease(fd, mounts, mode, placement)
    except OSError as error:
        # With these modes only a copy takes memory.
        if copy is False and mode in _WHY_A_COPY and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _copy_ruled_out(name, mode) from None
        raise failure_of_mount(error, name) from None
    finally:
        os.close(fd)
    if answer.private and copy is False:
        close_all([piece.fd for piece in pieces])
        connection.detach(answer.id)
        raise _copy_ruled_out(name, mode)
    attachment = _map(absolute_name(name), (status.st_dev, status.st_ino), mode, connection, answer, pieces, reserve)
    return DeviceArray.of(attachment, attachment.placement)


def _copy_ruled_out(path: str, mode: Mode) -> ValueError:
    return ValueError(f"{path}: {_WHY_A_COPY[mode]}, and copy=False rules that out")


def _map(
    path: str,
    identity: tuple[int, int],
    mode: Mode,
    connection: Connection,
    answer: protocol.Attached,
    pieces: list[SharedPiece],
    reserve: int | None,
) -> Attachment:
    """Map what the daemon has answered. A failure ends the lease."""
    try:
        try:
            if reserve is not None and reserve < answer.size:
                raise ValueError(f"reserve: {reserve} is less than the {answer.size} bytes of {path}")
            wanted = max(_RESERVE_FACTOR * answer.size, _LEAST_RESERVE) if reserve is None else reserve
            wanted += answer.placement
            wanted = max(-(-wanted // GRANULE), 1) * GRANULE
            writable, private = mode == READ_WRITE, mode == COPY_ON_WRITE
            with as_failure_of_mount(path):
                mapping = Mapping(answer.driver, answer.pci_address, writable=writable, private=private, reserve=wanted)
        except BaseException:
            close_all([piece.fd for piece in pieces])
            raise
        try:
            if mode == READ and answer.driver == HOST:
                mapping.explain_accesses(_READ_ONLY_HERE.format(path=path))
            _add(mapping, pieces, answer, path)
            attachment = Attachment(path, identity, mode, connection, mapping, answer)
        except BaseException:
            mapping.close()
            raise
    except BaseException:
        connection.detach(answer.id)
        raise
    for watcher in _watchers:
        watcher(attachment)
    return attachment
