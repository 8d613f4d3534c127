"""Replacing a file by a new version of it, which programs that follow the file take over in place."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from gpufs import mounting
from gpufs._naming import named_in
from gpufs.exceptions import NotOnMount, failure_of_mount
from gpufs.formats.versions import FileLayout
from gpufs.new_file import PERMISSIONS, take_owner_and_mode
from gpufs.syscalls import path_of


@named_in("gpufs")
def replace(new: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Give a file's name to a new version of it, in one step.

    Programs that follow the file (`gpufs.follow`, `gpufs.torch.follow`) take over the new version at their next safe
    point. Others keep the memory of the old one until they release it; whoever opens the name gets the new one.

    Parameters
    ----------
    new
        The complete new version. It loses this name, and gets the owner, where this user may set that, and the mode of
        the old one.
    path
        The file that it replaces. Both are on one device of one mount. Their sizes are equal; and for files whose
        tensors gpufs finds (safetensors, GGUF, npy, npz, torch.save), names, types, shapes and offsets of all tensors.

    Raises
    ------
    ValueError
        The layouts differ; the text has the first difference. Nothing has changed.
    NotOnMount
        One of the files is not on a mount.
    OSError
        As of open(2), chmod(2) and rename(2); EXDEV if the files are on two mounts or devices.

    Examples
    --------
    >>> gpufs.replace("/mnt/gpufs/gpu0/step-2.safetensors", "/mnt/gpufs/gpu0/policy.safetensors")  # doctest: +SKIP
    """
    source, target = os.fsdecode(new), os.path.realpath(os.fsdecode(path))  # a link stays, and leads to the new version
    try:
        old_fd, old_place = _open(target)
        try:
            new_fd, new_place = _open(source)
            try:
                if os.path.samestat(os.fstat(old_fd), os.fstat(new_fd)):
                    raise OSError(errno.EINVAL, f"is the same file as {target}", source)
                if old_place != new_place:
                    text = f"is on {new_place[1]} and {target} on {old_place[1]}: copy it there first"
                    raise OSError(errno.EXDEV, text, source)
                # Both by the name that the new version will have: some names decide the format.
                FileLayout.of_file(old_fd, target).check(FileLayout.of_file(new_fd, target, source), target)
                _rename(source, target, new_fd, os.fstat(old_fd))
            finally:
                os.close(new_fd)
        finally:
            os.close(old_fd)
    except NotOnMount:
        raise
    except OSError as error:
        raise failure_of_mount(error, os.fsdecode(error.filename or target)) from None


def _open(path: str) -> tuple[int, tuple[int, str]]:
    """Open a file of a mount; returns its descriptor, the mount's number and the device's directory."""
    # Opening a FIFO or a device in another way has effects. Of a link not the file but the link would get the name.
    named = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(named)
        mounts = mounting.by_device().get(status.st_dev)
        if mounts is None:
            raise NotOnMount(errno.EXDEV, "is not on a gpufs mount", path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", path)
        place = mounting.place_of(named, mounts)
        return os.open(path_of(named), os.O_RDONLY | os.O_CLOEXEC), (status.st_dev, place)
    finally:
        os.close(named)


def _rename(source: str, target: str, fd: int, old: os.stat_result) -> None:
    """Rename the new version, which is open, over the old one, with the owner and the mode of that."""
    new = os.fstat(fd)
    try:
        # By the descriptor: by now another user may have put a link to any file at the name.
        take_owner_and_mode(fd, old)
        os.rename(source, target)
    except OSError:
        with suppress(OSError):
            os.fchmod(fd, new.st_mode & PERMISSIONS)
        with suppress(OSError):
            os.fchown(fd, new.st_uid, new.st_gid)
        raise
