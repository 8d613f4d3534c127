"""Replacing a file by a new version of it, which programs that follow the file take over in place."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

from gpufs import mounting, safe_path
from gpufs._naming import named_in
from gpufs.exceptions import NotOnMount, failure_of_mount, text_of
from gpufs.formats.versions import FileLayout
from gpufs.new_file import KeptAttributes, has_name, temporary_name
from gpufs.syscalls import path_of, renameat2

_NOREPLACE: Final = 1  # of renameat2(2)


@named_in("gpufs")
def replace(new: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Give a file's name to a new version of it, in one step.

    Programs that follow the file (`gpufs.follow`, `gpufs.torch.follow`) take over the new version at their next safe
    point. Others keep the memory of the old one until they release it; whoever opens the name gets the new one.

    Parameters
    ----------
    new
        The complete new version. It loses this name, and gets the owner, where this user may set that, the mode, the
        access control list and the pin (`gpufs pin`) of the old one.
    path
        The file that it replaces. Both are on one device of one mount. Their sizes are equal; and for files whose
        tensors gpufs finds (safetensors, GGUF, npy, npz, torch.save), names, types, shapes and offsets of all tensors;
        for files of `gpufs.torch.publish` strides and ties, too.

    Raises
    ------
    ValueError
        The layouts differ; the text has the first difference. Nothing has changed.
    NotOnMount
        One of the files is not on a mount.
    OSError
        As of open(2), chmod(2) and rename(2); EXDEV if the files are on two mounts or devices, EBUSY if another program
        has put another file at the name of the new version meanwhile. Nothing has changed.

    Examples
    --------
    >>> gpufs.replace("/mnt/gpufs/gpu0/step-2.safetensors", "/mnt/gpufs/gpu0/policy.safetensors")  # doctest: +SKIP
    """
    source = target = os.fsdecode(new)
    try:
        target = safe_path.real(os.fsdecode(path))  # a link stays, and leads to the new version
        with ExitStack() as opened:
            old, new_version = _open(target, opened), _open(source, opened)
            if os.path.samestat(os.fstat(old.fd), os.fstat(new_version.fd)):
                raise OSError(errno.EINVAL, f"is the same file as {target}", source)
            if old.place != new_version.place:
                text = f"is on {new_version.place[1]} and {target} on {old.place[1]}: copy it there first"
                raise OSError(errno.EXDEV, text, source)
            # Both by the name that the new version will have: some names decide the format.
            FileLayout.of_file(old.fd, target).check(FileLayout.of_file(new_version.fd, target, source), target)
            _rename(new_version, old)
    except NotOnMount:
        raise
    except OSError as error:
        raise failure_of_mount(error, os.fsdecode(error.filename or target)) from None


@dataclass(frozen=True, slots=True)
class _Opened:
    """An open file and its name. ``directory``: that of the name, open; ``place``: its mount's number and its device's
    directory.
    """

    path: str
    directory: int
    fd: int
    place: tuple[int, str]

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


def _open(path: str, opened: ExitStack) -> _Opened:
    """Open a file of a mount and its directory, until ``opened`` ends."""

    def keep(fd: int) -> int:
        opened.callback(os.close, fd)
        return fd

    # Opening a FIFO or a device in another way has effects. Of a link not the file but the link would get the name.
    directory = keep(safe_path.open_path(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY))
    try:
        named = keep(os.open(os.path.basename(path) or ".", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory))
        status = os.fstat(named)
        mounts = mounting.places_of(status.st_dev, path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", path)
        place = mounting.place_of(named, mounts)
        fd = keep(os.open(path_of(named), os.O_RDONLY | os.O_CLOEXEC))
    except NotOnMount:
        raise
    except OSError as error:
        raise OSError(error.errno or errno.EIO, text_of(error), path) from None
    return _Opened(path, directory, fd, (status.st_dev, place))


def _rename(new: _Opened, old: _Opened) -> None:
    """Rename the new version over the old one, with the attributes of that."""
    before = KeptAttributes.of(new.fd)
    try:
        # By the descriptor: by now another user may have put a link to any file at the name.
        KeptAttributes.of(old.fd).give_to(new.fd)
        _move(new, old)
    except OSError:
        before.restore(new.fd)
        raise


def _move(new: _Opened, old: _Opened) -> None:
    """Rename, and only the file that is open.

    rename(2) takes names. Another user who may write into the directory can put another file at the name. Therefore the
    file first gets a random name in the directory of the old version, and is checked there. A user who can exchange it
    there, too, could replace the old version directly.
    """
    with suppress(OSError):  # has a lock already
        fcntl.flock(new.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else it counts as what a dead process has left
    temporary = temporary_name()
    moved = False
    try:
        os.rename(new.name, temporary, src_dir_fd=new.directory, dst_dir_fd=old.directory)
        moved = True
        if not has_name(new.fd, temporary, old.directory):
            raise OSError(errno.EBUSY, "is another file now than the one whose layout was checked: try again")
        os.rename(temporary, old.name, src_dir_fd=old.directory, dst_dir_fd=old.directory)
    except OSError as error:
        text = text_of(error)
        try:
            if moved:
                renameat2(old.directory, temporary.encode(), new.directory, os.fsencode(new.name), _NOREPLACE)
        except OSError as failure:
            where = os.path.join(os.path.dirname(old.path), temporary)
            text += f"; it is {where} now, and cannot go back ({text_of(failure)})"
        raise OSError(error.errno or errno.EIO, text, new.path) from None
