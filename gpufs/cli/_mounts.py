"""Finds the mounts of this machine and their daemons, without waiting for any of them."""

import math
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from errno import EACCES, EPERM
from typing import Any, Final, NamedTuple

from gpufs import mounting
from gpufs.cli._output import Failure, user_name
from gpufs.syscalls import trusted

# The seconds between checks whether a process has only threads left that cannot end.
_ZOMBIE_SECONDS: Final = 0.2
_NAMED: Final = 5  # what keeps a mount busy, in a message


def absolute(path: str) -> str:
    """Make a path absolute, as :func:`gpufs.mounting.absolute`. Failure if it is empty or that directory is gone."""
    if not path:
        raise Failure("an empty name is given where a directory belongs", 2)
    try:
        return mounting.absolute(path)
    except FileNotFoundError:
        raise Failure(f"{path}: the current directory has been removed") from None


def chosen(paths: Sequence[str] = ()) -> list[mounting.MountEntry]:
    """Return the mounts at the paths, as :func:`find`; without a path all, root's and the caller's own first.

    Each mount once, where its root can be seen: it may be bind-mounted elsewhere, also in parts.
    """
    if paths:
        return [find(path) for path in paths]
    roots: dict[str, mounting.MountEntry] = {}
    for entry in mounting.mounts():
        if entry.root == "/":
            roots.setdefault(entry.device, entry)
    return sorted(roots.values(), key=is_trusted, reverse=True)


def find(path: str) -> mounting.MountEntry:
    """Return the gpufs mount whose root is at a path. Failure if there is none."""
    entry = mounted_at(path)
    if entry.root != "/":
        raise Failure(f"{path}: only {entry.root} of a mount is bound there: give the directory that shows its root")
    return entry


def mounted_at(path: str) -> mounting.MountEntry:
    """Return the gpufs mount at a path, or the part of one that is bound there. Failure if there is none."""
    mountpoint = absolute(path)
    mounts = mounting.mounts()
    for entry in mounts:
        if entry.mountpoint == mountpoint:
            return entry
    for entry in mounts:
        if mountpoint.startswith(entry.mountpoint.rstrip("/") + "/"):
            raise Failure(f"{path}: is inside the mount at {entry.mountpoint}: give that path")
    if not os.path.lexists(mountpoint):
        raise Failure(f"{path}: there is no such directory")
    raise Failure(f"{path}: no gpufs is mounted there (gpufs status lists those that are)")


def is_trusted(entry: mounting.MountEntry) -> bool:
    """Return whether root or the caller mounted it."""
    return trusted(entry.uid)


def is_private(entry: mounting.MountEntry, failure: OSError) -> bool:
    """Return whether a mount did not answer because another user keeps it private."""
    return failure.errno in (EACCES, EPERM) and entry.uid != os.geteuid()


def private_text(entry: mounting.MountEntry) -> str:
    """Return the state of such a mount, for people."""
    return f"private (of {user_name(entry.uid)})"


def silent(entries: Sequence[mounting.MountEntry], answers: Sequence[Any], *, named: bool) -> list[tuple[str, object]]:
    """Return the mounts that did not answer, and why; other users' private ones only if they are named."""
    return [
        (entry.mountpoint, private_text(entry) if is_private(entry, answer) else answer.strerror)
        for entry, answer in zip(entries, answers, strict=True)
        if isinstance(answer, OSError) and (named or not is_private(entry, answer))
    ]


def daemons(mountpoint: str, entry: mounting.MountEntry | None = None) -> list[int]:
    """Find the daemons of a mountpoint that this user may inspect, including those that hang or lost their mount.

    A daemon belongs to the user who mounted and has /dev/fuse open: the command line alone proves nothing, since any
    user can imitate it. With the ``entry`` of a mount: only its daemons, and not that of an earlier mount at the same
    path, which may still be in use. Without it: only processes of the caller.
    """
    return [pid for pid in _processes() if _serves(pid, mountpoint, entry)]


def detached() -> list[tuple[str, int]]:
    """Find daemons whose mount is hidden but in use: its former path, and the process."""
    found = []
    for pid in _processes():
        try:
            words = _words(pid, os.stat(f"/proc/{pid}").st_uid)
            if b"gpufs.daemon" not in words[:-1]:
                continue
            held = _links(pid)
        except OSError:
            continue
        devices = _devices(held)
        if mounting.FUSE_DEVICE in held and devices:
            found.append((os.fsdecode(words[-1]), pid, devices))
    visible = {entry.device for entry in mounting.mounts()}  # last: a mount may just have appeared
    return [(path, pid) for path, pid, devices in found if not devices & visible]


def open_daemons(mountpoint: str, entry: mounting.MountEntry | None = None) -> AbstractContextManager[list["Process"]]:
    """Find daemons as :func:`daemons` does, and hold each until the context ends."""
    return _hold(lambda pid: _serves(pid, mountpoint, entry))


def open_keepers(entry: mounting.MountEntry) -> AbstractContextManager[list["Process"]]:
    """Find the keepers of a mount, and hold each until the context ends."""
    return _hold(lambda pid: _keeps(pid, entry))


def pause_text(entry: mounting.MountEntry) -> str | None:
    """Return why no daemon serves a mount at the moment, and when its keeper starts one. None if it says nothing."""
    with open_keepers(entry) as keepers:
        for keeper in keepers:
            with suppress(OSError, ValueError):
                deaths, start, reason = _keeper_state(keeper.pid).decode(errors="replace").split("\n", 2)
                seconds = max(0, math.ceil(int(start) / 1e9 - time.monotonic()))
                next_start = f"next start in {seconds} s" if int(start) else "not started again by itself"
                times = "once" if deaths == "1" else f"{deaths} times"
                restart = f"gpufs restart {entry.mountpoint} starts it now"
                return f"its daemon died {times}, {next_start}: {reason.strip() or 'unknown reason'}; {restart}"
    return None


def _keeper_state(pid: int) -> bytes:
    """Return the lines that a keeper has for us, see native/keeper/keeper.cc. OSError; b"" if a daemon works."""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        place = f"/proc/{pid}/fd/{fd}"
        with suppress(FileNotFoundError):
            if os.readlink(place).startswith("/memfd:gpufs-keeper-state"):
                with open(place, "rb") as file:
                    return file.read()
    return b""


@contextmanager
def _hold(is_wanted: Callable[[int], bool]) -> Iterator[list["Process"]]:
    with ExitStack() as held:
        processes = []
        for pid in filter(is_wanted, _processes()):
            with suppress(ProcessLookupError):
                process = Process(pid, os.pidfd_open(pid))
                held.callback(process.close)
                if is_wanted(pid):  # else another process has got the number
                    processes.append(process)
        yield processes


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _keeps(pid: int, entry: mounting.MountEntry) -> bool:
    try:
        words = _words(pid, entry.uid)
        named = os.path.basename(words[0]) == b"gpufs-keeper" and words[1:] == [os.fsencode(entry.mountpoint)]
        return named and mounting.FUSE_DEVICE in _links(pid)
    except OSError:
        return False


def _serves(pid: int, mountpoint: str, entry: mounting.MountEntry | None) -> bool:
    try:
        words = _words(pid, os.geteuid() if entry is None else entry.uid)
        if words[-1] != os.fsencode(mountpoint) or b"gpufs.daemon" not in words:
            return False
        held = _links(pid)
    except OSError:
        return False
    # The counters' file is missing if the runtime directory is not writable.
    served = _devices(held)
    return mounting.FUSE_DEVICE in held and (entry is None or not served or entry.device in served)


def _words(pid: int, uid: int) -> list[bytes]:
    """Return the command line of a user's process in our mount namespace; an empty word for any other. OSError."""
    if os.stat(f"/proc/{pid}").st_uid != uid or not _same_namespace(pid):
        return [b""]
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().rstrip(b"\0").split(b"\0")


def _links(pid: int) -> list[str]:
    """Return what the descriptors of a process are, without those that are closed at the same time. OSError."""
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return links


def _devices(links: Iterable[str]) -> set[str]:
    """Return the device numbers of the mounts whose counters are among the files: these are named after them."""
    from gpufs import statistics  # which mounts that answer do without

    return {device for link in links if (device := statistics.device_of(os.path.basename(link)))}


def devices_served(pid: int) -> set[str]:
    """Return the device numbers of the mounts that a daemon serves, as far as they are known."""
    try:
        return _devices(_links(pid))
    except OSError:
        return set()


def _same_namespace(pid: int) -> bool:
    """Return whether a process shares our mount namespace. True if that is hidden from us."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    except OSError:
        return True


class MountCopy(NamedTuple):
    """A copy of a mount, or of a part of it, in another mount namespace."""

    pid: int  # a process of the namespace, one that uses it if there is any
    program: str
    mountpoint: str  # as that process sees it


def copies(devices: Collection[str]) -> list[MountCopy]:
    """Find mounts with these device numbers in other mount namespaces, by one process of each that we may see."""
    places: dict[str, list[str]] = {os.readlink("/proc/self/ns/mnt"): []}  # by namespace
    elsewhere: dict[tuple[str, str], MountCopy] = {}
    for pid in sorted(_processes()):
        with suppress(OSError):
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            if namespace not in places:
                places[namespace] = [one.mountpoint for one in mounting.mounts(str(pid)) if one.device in devices]
            for place in places[namespace]:
                if _uses(pid, place) or (namespace, place) not in elsewhere:
                    elsewhere[namespace, place] = MountCopy(pid, _program(pid), place)
    return list(elsewhere.values())


def _program(pid: int) -> str:
    with open(f"/proc/{pid}/comm", errors="surrogateescape") as file:
        return file.read().strip()


def users(mountpoint: str) -> list[str]:
    """Return what keeps a mount busy and is visible to us: mounts below it, and other processes as "name (pid)".

    Processes of other mount namespaces, too, where a copy of the mount is at the same place.
    """
    prefix = f"{mountpoint.rstrip('/')}/"
    below = (entry.mountpoint for entry in mounting.listed() if entry.mountpoint.startswith(prefix))
    holders = [f"what is mounted at {path}" for path in below][:_NAMED]
    for pid in _processes():
        if len(holders) == _NAMED or pid == os.getpid():
            continue
        with suppress(OSError):
            if _uses(pid, mountpoint):
                holders.append(f"{_program(pid)} ({pid})")
    return holders


def _uses(pid: int, mountpoint: str) -> bool:
    """Return whether a process has something below a directory open, mapped or as its own directory. OSError."""
    prefix = f"{mountpoint.rstrip('/')}/"
    links = [f"/proc/{pid}/cwd", f"/proc/{pid}/root", f"/proc/{pid}/exe"]
    links += [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
    with open(f"/proc/{pid}/maps", errors="surrogateescape") as file:
        return prefix in file.read() or any(_points_below(link, prefix) for link in links)


def _points_below(link: str, prefix: str) -> bool:
    try:
        return (os.readlink(link) + "/").startswith(prefix)
    except OSError:
        return False


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger. It then handles no signal except SIGKILL."""
    return _state_of(pid) in (b"T", b"t")


def _state_of(pid: int) -> bytes:
    """Return the letter of a process's state in proc(5); empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1]
    except OSError:
        return b""


class Process(NamedTuple):
    """A process and a descriptor of it: a later process with the same number gets none of its signals."""

    pid: int
    fd: int

    def signal(self, number: signal.Signals) -> None:
        """Send a signal unless the process has ended. OSError EPERM for another user's."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, number)

    def close(self) -> None:
        os.close(self.fd)


def wait_for_end(processes: Sequence[Process], timeout: float) -> list[Process]:
    """Wait up to ``timeout`` seconds until the processes have ended; return those that have not.

    A process has also ended if its main thread has, and only threads are left that the kernel cannot end: they close a
    file of another file system that does not answer.
    """
    deadline = time.monotonic() + timeout
    left = list(processes)
    while left:
        poll = select.poll()
        for process in left:
            poll.register(process.fd, select.POLLIN)
        step = min(max(deadline - time.monotonic(), 0), _ZOMBIE_SECONDS)
        ended = {fd for fd, _ in poll.poll(step * 1000)}
        left = [process for process in left if process.fd not in ended and _state_of(process.pid) not in (b"", b"Z")]
        if time.monotonic() >= deadline:
            break
    return left
