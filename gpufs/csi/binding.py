"""Binds directories of the mount into the directories of pods, read-only, and removes them.

The kubelet names the place of a volume. It is used only below the kubelet's own directory, and no symbolic link is
followed there: a pod may write to some directories in it.

A volume is a bind of the model's directory. Two things in it let programs attach: ``.gpufs/socket`` is the mount's
control file of this name, and ``.gpufs/run`` the directory of the mount's socket, which shows no other mount. Both are
binds, too, so that they change with the daemon.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from gpufs import mounting, syscalls
from gpufs.csi.errors import CallError
from gpufs.mounting import MountEntry
from gpufs.syscalls import closed_after, path_of

CONTROL: Final = ".gpufs"  # in the directory of a model
SOCKET: Final = f"{CONTROL}/socket"
RUN: Final = f"{CONTROL}/run"

_DETACH: Final = 2 | 8  # MNT_DETACH, and UMOUNT_NOFOLLOW
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NOT_THERE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # of the directory that has a target


class Targets:
    """The places of volumes below the kubelet's directory."""

    def __init__(self, kubelet: str) -> None:
        self._named = os.path.normpath(kubelet)
        self._kubelet = os.path.realpath(kubelet)

    def path_of(self, target: str) -> str:
        """Return the path as the kernel lists it. CallError INVALID_ARGUMENT outside of the kubelet's directory."""
        for prefix in {self._named, self._kubelet}:
            if target.startswith(f"{prefix}/"):
                below = target.removeprefix(f"{prefix}/")
                parts = below.split("/")
                if len(parts) >= 2 and not {"", ".", ".."}.intersection(parts):
                    return f"{self._kubelet}/{below}"
        text = f"target_path {target!r} is not a path of a volume below {self._named}"
        raise CallError("INVALID_ARGUMENT", text[:1000])

    @contextmanager
    def _parent(self, target: str) -> Iterator[tuple[int, str]]:
        """Open the directory of a target, without a symbolic link on the way; also yields the target's name in it.

        OSError: ENOENT if it is not there, ELOOP for a link.
        """
        folder, name = os.path.split(self.path_of(target))
        below = os.path.relpath(folder, self._kubelet)
        with closed_after(os.open(self._kubelet, _DIRECTORY)) as kubelet:
            fd = syscalls.open_beneath(kubelet, os.fsencode(below), _DIRECTORY)
        with closed_after(fd):
            yield fd, name

    def has_parent(self, target: str) -> bool:
        """Return whether the kubelet still has the directory of a target, which it removes with the pod."""
        try:
            with self._parent(target):
                return True
        except OSError as error:
            if error.errno in _NOT_THERE:
                return False
            raise

    def bind(self, target: str, model: int, mount: MountEntry, sockets: str) -> None:
        """Show a directory of the mount at a target, over what gpufs has shown there before.

        What was there stays below it until :meth:`unbind`: a running container has a bind of it, and only what is
        mounted upon it reaches the container. ``model``: the directory, open. ``sockets``: that of the mount's
        socket. OSError or CallError if that fails; then nothing more is bound than before.
        """
        with self._parent(target) as (parent, name):
            if not self.over(target):
                with suppress(FileNotFoundError):
                    os.rmdir(name, dir_fd=parent)
                os.mkdir(name, 0o750, dir_fd=parent)
            with closed_after(os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)) as end:
                is_new = _bind(model, end)
            try:
                with closed_after(os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)) as shown:
                    for source, below in ((os.path.join(mount.mountpoint, SOCKET), SOCKET), (sockets, RUN)):
                        with (
                            closed_after(os.open(source, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) as file,
                            closed_after(syscalls.open_beneath(shown, below.encode(), os.O_PATH)) as end,
                        ):
                            _bind(file, end)
            except BaseException:
                if is_new:
                    syscalls.umount2(os.fsencode(f"{path_of(parent)}/{name}"), _DETACH)
                raise

    def over(self, target: str) -> list[MountEntry]:
        """Return what is mounted at a target. CallError FAILED_PRECONDITION if the uppermost is not of gpufs."""
        place = self.path_of(target)
        over = [entry for entry in mounting.listed() if entry.mountpoint == place]
        if over and over[-1].fstype != mounting.FILESYSTEM_TYPE:
            text = f"{target}: a {over[-1].fstype} file system is mounted there, which is not of gpufs"
            raise CallError("FAILED_PRECONDITION", text)
        return over

    def unbind(self, target: str) -> None:
        """Remove what is bound at a target, and its directory. Does nothing if it is not there.

        CallError FAILED_PRECONDITION if something else is mounted there, OSError if there are files.
        """
        try:
            with self._parent(target) as (parent, name):
                while self.over(target):  # what is bound inside of it goes with it
                    syscalls.umount2(os.fsencode(f"{path_of(parent)}/{name}"), _DETACH)
                with suppress(FileNotFoundError):
                    os.rmdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise


def _bind(source: int, end: int) -> bool:
    """Show an open file or directory at another one. Return False if a plug-in that was killed has done it before."""
    if syscalls.identity(source) == syscalls.identity(end):
        return False
    syscalls.bind_read_only(source, end)
    return True


def is_bound(place: str, mount: MountEntry, path: str) -> bool:
    """Return whether a target shows a path of the mount as it should. Asks no file system.

    ``place``: as :meth:`Targets.path_of` returns it.
    """
    found = {one.mountpoint: one for one in mounting.listed()}  # the last one of a place is the uppermost
    here, socket, run = (found.get(one) for one in (place, f"{place}/{SOCKET}", f"{place}/{RUN}"))
    if here is None or socket is None or run is None or "ro" not in here.flags:
        return False
    return here.device == socket.device == mount.device and (below(mount, here), below(mount, socket)) == (path, SOCKET)


def below(mount: MountEntry, entry: MountEntry) -> str:
    """Return the path below the mount of what an entry of its device shows."""
    return entry.root.removeprefix(mount.root.rstrip("/")).lstrip("/")
