"""Replacing a file, or a sharded model, by a new version of it, which programs that follow it take over in place."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

from gpufs import mounting, safe_path
from gpufs._naming import named_in
from gpufs.exceptions import NotOnMount, failure_of_mount, text_of
from gpufs.formats import FormatError
from gpufs.formats.checkpoint import find_files
from gpufs.formats.versions import FileLayout
from gpufs.new_file import KeptAttributes, has_name, temporary_name
from gpufs.syscalls import close_all, path_of, renameat2

_NOREPLACE: Final = 1  # of renameat2(2)
_EXCHANGE: Final = 2


@named_in("gpufs")
def replace(new: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Give the name of a file, or of a model's directory, to a new version of it, in one step.

    Programs that follow it (`gpufs.follow`, `gpufs.torch.follow`) take over the new version at their next safe
    point. Others keep the memory of the old one until they release it; whoever opens the name gets the new one.

    Parameters
    ----------
    new
        The complete new version. It loses this name, and gets the owner, where this user may set that, the mode, the
        access control list and the pin (`gpufs pin`) of the old one.
    path
        The file that it replaces, or the directory of a model of safetensors files, each of which is then such a pair,
        while other files may differ. Directories are exchanged: the old one has the name of the new one afterwards.

        Both are on one device of one mount. Their sizes are equal; and for files whose tensors gpufs finds
        (safetensors, GGUF, npy, npz, torch.save), names, types, shapes and offsets of all tensors; for files of
        `gpufs.torch.publish` strides and ties, too.

    Raises
    ------
    ValueError
        The layouts, or the names of the models' files, differ; the text has the first difference. Nothing has changed.
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
            are_directories = os.path.isdir(target)
            old, new_version = (_open(each, opened, is_directory=are_directories) for each in (target, source))
            if os.path.samestat(os.fstat(old.fd), os.fstat(new_version.fd)):
                raise OSError(errno.EINVAL, f"is the same as {target}", source)
            if old.place != new_version.place:
                text = f"is on {new_version.place[1]} and {target} on {old.place[1]}: copy it there first"
                raise OSError(errno.EXDEV, text, source)
            files = []
            if are_directories:
                files = _files_of(new_version, old, opened)
            else:
                _check_layout(new_version, old)
            move = _exchange if are_directories else _move
            _rename([(new_version.fd, old.fd), *files], lambda: move(new_version, old))
    except NotOnMount:
        raise
    except OSError as error:
        raise failure_of_mount(error, os.fsdecode(error.filename or target)) from None


@dataclass(frozen=True, slots=True)
class _Opened:
    """An open file or directory and its name. ``directory``: that of the name, open; ``place``: its mount's number and
    its device's directory.
    """

    path: str
    directory: int
    fd: int
    place: tuple[int, str]

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


def _open(path: str, opened: ExitStack, *, is_directory: bool = False, called: str = "") -> _Opened:
    """Open a file or directory of a mount and the directory of its name, until ``opened`` ends.

    ``called``: its name in errors, if that is another one.
    """
    path = path.rstrip("/") if is_directory else path
    called = called or path

    def keep(fd: int) -> int:
        opened.callback(os.close, fd)
        return fd

    # Opening a FIFO or a device in another way has effects. Of a link not the file but the link would get the name.
    try:
        directory = keep(safe_path.open_path(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY))
        named = keep(os.open(os.path.basename(path) or ".", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory))
        status = os.fstat(named)
        mounts = mounting.places_of(status.st_dev, called)
        if not (stat.S_ISDIR if is_directory else stat.S_ISREG)(status.st_mode):
            raise OSError(errno.EINVAL, f"is not a {'directory' if is_directory else 'regular file'}")
        place = mounting.place_of(named, mounts)
        fd = keep(os.open(path_of(named), os.O_RDONLY | os.O_CLOEXEC))
    except NotOnMount:
        raise
    except OSError as error:
        raise OSError(error.errno or errno.EIO, text_of(error), called) from None
    return _Opened(called, directory, fd, (status.st_dev, place))


def _check_layout(new: _Opened, old: _Opened) -> None:
    """Raise FormatError if the layouts differ. Both by the name of the old one: some names decide the format."""
    FileLayout.of_file(old.fd, old.path).check(FileLayout.of_file(new.fd, old.path, new.path), old.path)


def _files_of(new: _Opened, old: _Opened, opened: ExitStack) -> list[tuple[int, int]]:
    """Return the files of the models in two directories, which have equal layouts, open until ``opened`` ends."""
    names = []
    for each in (new, old):
        folder = path_of(each.fd)
        try:
            names.append([os.path.relpath(path, folder) for path in find_files(folder).files])
        except OSError as error:
            raise OSError(error.errno or errno.EIO, text_of(error), each.path) from None
    if others := sorted(set(names[0]) ^ set(names[1])):
        which = new.path if others[0] in names[0] else old.path
        raise FormatError(f"{old.path} cannot be replaced in place: only {which} has {others[0]}")
    pairs = []
    for name in names[0]:
        with ExitStack() as here:  # which leaves two descriptors of each pair
            new_file, old_file = (
                _open(os.path.join(path_of(each.fd), name), here, called=os.path.join(each.path, name))
                for each in (new, old)
            )
            _check_layout(new_file, old_file)
            kept = os.dup(new_file.fd), os.dup(old_file.fd)
        opened.callback(close_all, kept)
        pairs.append(kept)
    return pairs


def _rename(pairs: Sequence[tuple[int, int]], move: Callable[[], None]) -> None:
    """Give open new versions the attributes of their old ones, and then the name by ``move``."""
    before = [(new, KeptAttributes.of(new)) for new, _ in pairs]
    try:
        for new, old in pairs:
            # By the descriptor: by now another user may have put a link to any file at the name.
            KeptAttributes.of(old).give_to(new)
        move()
    except OSError:
        for fd, attributes in before:
            attributes.restore(fd)
        raise


def _exchange(new: _Opened, old: _Opened) -> None:
    """Exchange two directories, and only those that are open."""

    def exchange() -> None:
        renameat2(new.directory, os.fsencode(new.name), old.directory, os.fsencode(old.name), _EXCHANGE)

    try:
        exchange()
        if not (has_name(new.fd, old.name, old.directory) and has_name(old.fd, new.name, new.directory)):
            exchange()
            raise OSError(errno.EBUSY, "is another directory now than the one that was checked: try again")
    except OSError as error:
        raise OSError(error.errno or errno.EIO, text_of(error), new.path) from None


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
