"""The mounts of this machine and the processes that serve them, found without waiting for any of them."""

import os
import select
import signal
import time
from collections.abc import Sequence
from errno import ENOTCONN, ETIMEDOUT
from typing import Final

from gpufs import mounting, statistics
from gpufs.cli._errors import Failure

STATUS_FILE: Final = ".gpufs/status"


def absolute(path: str) -> str:
    """The path without symbolic links, except that a mount which does not answer is never asked.

    The kernel may wait for ever for the attributes of a mount's root; those of the directory above it come from
    another file system. Failure for an empty path, and a relative one where the current directory is gone.
    """
    if not path:
        raise Failure("an empty name is given where a directory belongs", 2)
    try:
        path = os.path.abspath(path)
    except FileNotFoundError:
        raise Failure(f"{path}: the current directory has been removed") from None
    parent, name = os.path.split(path)
    if not name:
        return path
    candidate = os.path.join(os.path.realpath(parent), name)
    if any(entry.mountpoint == candidate for entry in mounting.mounts()):
        return candidate
    return os.path.realpath(path)


def find(path: str) -> "mounting.MountEntry":
    """The gpufs mount at a path. Failure where there is none."""
    mountpoint = absolute(path)
    mounts = mounting.mounts()
    for entry in mounts:
        if entry.mountpoint == mountpoint:
            return entry
    for entry in mounts:
        if mountpoint.startswith(entry.mountpoint.rstrip("/") + "/"):
            raise Failure(f"{path}: lies in the mount at {entry.mountpoint}: name that")
    if not os.path.lexists(mountpoint):
        raise Failure(f"{path}: there is no such directory")
    raise Failure(f"{path}: no gpufs is mounted there (gpufs status lists those that are)")


def daemons(mountpoint: str, device: str | None = None) -> list[int]:
    """The processes that serve a mountpoint, by their command lines: also those that hang or have lost their mount.

    With the ``device`` ("major:minor") of a mount those that, as far as can be seen, serve this one: an earlier one at
    the same place may live on where it is still in use.
    """
    wanted = os.fsencode(mountpoint)
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().rstrip(b"\0").split(b"\0")
        except OSError:
            continue
        if words[-1] != wanted or b"gpufs.daemon" not in words or not _same_namespace(name):
            continue
        if device is None or _device_of(name) in (device, None):
            found.append(int(name))
    return found


def _device_of(pid: str) -> str | None:
    """Which mount a daemon serves, by the name of the counters' file that it has open; None where that is not known."""
    try:
        names = [os.path.basename(os.readlink(f"/proc/{pid}/fd/{fd}")) for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return None
    return next((device for device in map(statistics.device_of, names) if device is not None), None)


def _same_namespace(pid: str) -> bool:
    """Whether a process sees our mounts, as far as we may know."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    except OSError:
        return True


def other_places(device: str) -> list[str]:
    """Where else a mount is, by its device number: bound to other paths, or copied into other mount namespaces.

    Paths for our own namespace, "PATH in the mount namespace of NAME (PID)" for one process of each other one, as far
    as we may look.
    """
    found = []
    seen = set()
    for pid in ["self", *filter(str.isdigit, os.listdir("/proc"))]:
        try:
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            if namespace in seen:
                continue
            paths = [entry.mountpoint for entry in mounting.mounts(pid) if entry.device == device]
            with open(f"/proc/{pid}/comm", errors="surrogateescape") as file:
                name = file.read().strip()
        except OSError:
            continue
        seen.add(namespace)
        where = "" if pid == "self" else f" in the mount namespace of {name} ({pid})"
        found += [path + where for path in paths]
    return found


def users(mountpoint: str, most: int = 5) -> list[str]:
    """What keeps a mount busy, as far as we may look: mounts below it, and other processes, as "name (pid)"."""
    prefix = mountpoint.rstrip("/") + "/"
    found = [f"what is mounted at {path}" for path in mounting.mountpoints() if path.startswith(prefix)][:most]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if len(found) == most or pid == str(os.getpid()):
            continue
        links = [f"/proc/{pid}/cwd", f"/proc/{pid}/root", f"/proc/{pid}/exe"]
        try:
            links += [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
            with open(f"/proc/{pid}/maps", errors="surrogateescape") as file:
                mapped = prefix in file.read()
            with open(f"/proc/{pid}/comm", errors="surrogateescape") as file:
                name = file.read().strip()
        except OSError:
            continue
        if mapped or any(_points_below(link, prefix) for link in links):
            found.append(f"{name} ({pid})")
    return found


def _points_below(link: str, prefix: str) -> bool:
    try:
        return (os.readlink(link) + "/").startswith(prefix)
    except OSError:
        return False


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped, by a signal or a debugger: no other signal reaches it, save SIGKILL."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in (b"T", b"t")
    except OSError:
        return False


def wait_for_end(pids: Sequence[int], timeout: float) -> list[int]:
    """Waits until the processes have ended; returns those that have not when the time (in seconds) is over."""
    deadline = time.monotonic() + timeout
    left = []
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
                left.append(pid)
        finally:
            os.close(fd)
    return left


def read_files(paths: Sequence[str], timeout: float) -> list[bytes | OSError]:
    """The contents of files that may never answer, all asked at once; OSError ETIMEDOUT for those that do not.

    Each is read by a process of its own: one that waits for a hung mount cannot always be ended, not even by SIGKILL,
    and we must be able to go.
    """
    readers: list[tuple[int, int]] = []  # of what is still asked: the process, and the pipe from it
    deadline = time.monotonic() + timeout
    results: list[bytes | OSError] = []
    try:
        for path in paths:
            source, sink = os.pipe2(os.O_CLOEXEC)
            pid = os.fork()
            if pid == 0:
                try:
                    _read(path, sink)
                finally:
                    os._exit(0)  # also where it is interrupted: what comes behind this is the parent's
            os.close(sink)
            readers.append((pid, source))
        for path in paths:
            pid, source = readers[0]
            content = _receive(source, deadline)
            del readers[0]
            os.close(source)
            if content is None:
                _end(pid)
                results.append(OSError(ETIMEDOUT, os.strerror(ETIMEDOUT), path))
                continue
            os.waitpid(pid, 0)
            error = content[0] if content else ENOTCONN
            results.append(OSError(error, os.strerror(error), path) if error else content[1:])
    finally:  # where we are interrupted
        for pid, source in readers:
            os.close(source)
            _end(pid)
    return results


def _end(pid: int) -> None:
    """Ends a child of ours, as far as that can be, and does not wait for it."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, os.WNOHANG)


def _read(path: str, sink: int) -> None:
    """In the child: sends the errno as a byte, then the content."""
    try:
        with open(path, "rb", buffering=0) as file:
            message = b"\0" + file.read()
    except OSError as error:
        message = bytes([(error.errno or ENOTCONN) & 0xFF])
    while message:
        message = message[os.write(sink, message) :]


def _receive(source: int, deadline: float) -> bytes | None:
    poll = select.poll()
    poll.register(source, select.POLLIN)
    content = b""
    while poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        part = os.read(source, 1 << 16)
        if not part:
            return content
        content += part
    return None
