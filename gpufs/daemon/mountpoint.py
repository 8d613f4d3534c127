"""The daemon's mount in the kernel: making it, its settings, and its end."""

import errno
import fcntl
import functools
import logging
import os
import select
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import trio

from gpufs import engine, mounting, threads
from gpufs.daemon.startup import MountRequest, StartFailure
from gpufs.syscalls import closed_after

log = logging.getLogger("gpufs.daemon")

# Seconds to wait for another daemon that is mounting at the same place.
_LOCK_SECONDS = 5.0
# Seconds until a mount in use is detached instead of unmounted.
_BUSY_GRACE = 0.5
_BUSY_PAUSE = 0.05
# How much of a mapping to ask the kernel for at a time: one request, unless the kernel reads ahead less.
_READ_AHEAD_PIECE = 1 << 20


def refuse_itself(path: str, mountpoint: str) -> None:
    """Raise StartFailure if a directory to show below backing/ will be inside the mount."""
    if os.path.commonpath((os.path.realpath(path), mountpoint)) == mountpoint:
        raise StartFailure(errno.EDEADLK, f"backing: {path} is the mountpoint or below it; a mount cannot show itself")


@contextmanager
def _locked(mountpoint: str) -> Iterator[None]:
    """Keep other daemons from mounting here: of two that are started at the same time, one fails."""
    with ExitStack() as held:
        with suppress(OSError):  # the directory cannot be opened or locked
            directory = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, directory)
            deadline = time.monotonic() + _LOCK_SECONDS
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # a lock that stays has nothing to do with gpufs
                    time.sleep(_BUSY_PAUSE)
        yield


@contextmanager
def mounted(request: MountRequest) -> Iterator[tuple[int, mounting.MountEntry]]:
    """Mount; yield the descriptor of the connection and the mount's entry. Always unmount at the end."""
    try:
        with _locked(request.mountpoint):
            fd, entry = mounting.mount(
                request.mountpoint,
                source=request.source,
                allow_other=bool(request.config["allow_other"]),
                flags=request.flags,
            )
    except OSError as failure:
        raise StartFailure.of(failure) from None
    with unmounted_at_the_end(entry, fd):
        yield fd, entry


@contextmanager
def unmounted_at_the_end(entry: mounting.MountEntry, connection: int) -> Iterator[None]:
    """Unmounts at the end. ``connection``: the descriptor of the mount's connection."""
    # No other mount has this one's numbers until the kernel ends the connection. Afterwards the next mount gets them.
    with closed_after(os.dup(connection)) as own:
        try:
            yield
        finally:
            if (now := present(entry)) is not None:
                try:
                    if _has_ended(own):
                        mounting.unmount_dead(now)
                    else:
                        mounting.unmount(now.mountpoint, lazy=True)
                except OSError as failure:
                    if present(entry) is not None:  # else another process has unmounted it
                        log.warning("%s", failure.strerror or failure)


def _has_ended(connection: int) -> bool:
    """Return whether the kernel has ended a connection. Its mount is dead or gone; another one may have its numbers."""
    poll = select.poll()
    poll.register(connection, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def present(entry: mounting.MountEntry) -> mounting.MountEntry | None:
    """Return the mount's present entry, None if it is gone or hidden. The old entry if mountinfo cannot be read."""
    try:
        return mounting.entry_with(entry.identity)
    except OSError:
        return entry


def set_access_times(mount: engine.Mount, shown: frozenset[str], asked: frozenset[str] = frozenset()) -> None:
    """Follow the mount's flags for access times, which the kernel leaves to the daemon for FUSE."""
    if "noatime" in shown or "ro" in shown:
        policy = engine.NOATIME
    elif "relatime" in shown and "strictatime" not in asked:
        policy = engine.RELATIME
    else:
        policy = engine.STRICTATIME
    mount.set_access_times(policy, not_directories="nodiratime" in shown | asked)


def set_read_ahead(mount: engine.Mount, entry: mounting.MountEntry, size: int) -> None:
    """Set how many bytes the kernel reads ahead on the mount, and read ahead for it: both need root's rights.

    The kernel takes 128 KiB for every FUSE mount, so a scan through a mapping waits for many small requests.
    """
    try:
        Path(f"/sys/class/bdi/{entry.device}/read_ahead_kb").write_text(str(size >> 10))
        if size > 0:
            mount.read_ahead(entry.mountpoint, min(size, _READ_AHEAD_PIECE))
    except OSError as failure:  # a plain user, or /sys cannot be written
        log.info("read_ahead stays as the kernel has it: %s", failure)


async def unmount(entry: mounting.MountEntry) -> None:
    """Unmount, or detach the mount if it stays in use. Other mounts at the same place stay."""
    deadline = trio.current_time() + _BUSY_GRACE
    while (now := present(entry)) is not None:
        lazy = trio.current_time() >= deadline
        try:
            await threads.run(functools.partial(mounting.unmount, now.mountpoint, lazy=lazy), abandon_on_cancel=True)
            return
        except OSError as failure:
            if failure.errno != errno.EBUSY or lazy:
                if present(entry) is not None:  # else another process has unmounted it
                    log.warning("%s", failure.strerror or failure)
                return
        await trio.sleep(_BUSY_PAUSE)
