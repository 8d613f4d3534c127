"""A new file of a mount that gets its name when it is complete, and its bytes as a tensor."""

from __future__ import annotations

import os
from errno import EIO, EPERM, EXDEV
from pathlib import Path

import torch
from torch.utils.dlpack import from_dlpack

import gpufs
from gpufs import mounting
from gpufs.exceptions import NotOnMount, as_failure_of_mount, failure_of_mount
from gpufs.new_file import NewFile, remove_leftovers
from gpufs.syscalls import path_of

_ROOT_INODE = 1  # FUSE_ROOT_ID


class TensorFile:
    """A file that has no name until take_name(). close() or the end of ``with`` closes it.

    Where the kernel has no unnamed files on FUSE (before Linux 6.2) it has a temporary name from the beginning. Those
    that dead processes have left are removed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._check_place()
            remove_leftovers(self._directory)
            self._new = NewFile.create(self._directory)
        except BaseException:
            os.close(self._directory)
            raise

    def __enter__(self) -> TensorFile:
        return self

    def _check_place(self) -> None:
        """Raise OSError if the directory takes no files of a mount."""
        here = os.fstat(self._directory)
        entry = next((each for each in mounting.mounts() if each.st_dev == here.st_dev), None)
        if entry is None:
            raise NotOnMount(EXDEV, "is not on a gpufs mount: only files there can be published", str(self._path))
        if here.st_ino == _ROOT_INODE:
            text = f"the root of a mount takes no files: publish below {entry.mountpoint}/gpu0"
            raise OSError(EPERM, text, str(self._path))

    def allocate(self, size: int) -> None:
        try:
            os.posix_fallocate(self._new.fd, 0, size)
        except OSError as error:
            number = error.errno or EIO
            failure = OSError(number, f"{os.strerror(number)}; {size} bytes are needed")
            raise failure_of_mount(failure, str(self._path)) from None

    def write(self, data: bytes) -> None:
        """Write the whole contents, which are small."""
        with as_failure_of_mount(str(self._path)), open(self._new.fd, "wb", closefd=False) as file:
            file.write(data)

    @property
    def fd(self) -> int:
        return self._new.fd

    def attach(self, placement: int | None = None) -> gpufs.DeviceArray:
        with as_failure_of_mount(str(self._path)):
            return gpufs.attach(path_of(self._new.fd), mode="r+", placement=placement)

    def map(self) -> torch.Tensor:
        mapped: torch.Tensor = from_dlpack(self.attach())
        return mapped

    def can_be_named(self, path: Path) -> bool:
        """Return whether the file can take this name: whether both are in one directory of a device."""
        parent, own = os.stat(path.parent), os.fstat(self._directory)
        return (parent.st_dev, parent.st_ino) == (own.st_dev, own.st_ino)

    def take_name(self, path: Path | None = None) -> None:
        """Put the file in the place of the one with this name, its own by default, in its directory."""
        name = (path or self._path).name
        self._new.keep_attributes_of(name)
        self._new.complete(name)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Without a name it is gone. A second call does nothing."""
        if self._new.fd >= 0:
            self._new.close()
            os.close(self._directory)
