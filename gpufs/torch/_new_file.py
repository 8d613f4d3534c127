"""A new file of a mount that gets its name when it is complete."""

from __future__ import annotations

import fcntl
import os
import secrets
from errno import EIO, EOPNOTSUPP, EPERM, EXDEV
from pathlib import Path

import torch
from torch.utils.dlpack import from_dlpack

import gpufs
from gpufs import mounting
from gpufs.exceptions import NotOnMount, failure_of_mount

_PREFIX = ".publish-"
_ROOT_INODE = 1  # FUSE_ROOT_ID


class NewFile:
    """A file that has no name until take_name(). close() or the end of ``with`` closes it.

    Where the kernel has no unnamed files on FUSE (before Linux 6.2) it has a temporary name from the beginning. A
    temporary name belongs to a living process as long as the file is locked; others are removed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = f"{_PREFIX}{secrets.token_hex(8)}"
        self._named = False
        self._directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._check_place()
            self._remove_leftovers()
            self._file = self._open()
        except BaseException:
            os.close(self._directory)
            raise

    def __enter__(self) -> NewFile:
        return self

    def _open(self) -> int:
        try:
            file = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o666, dir_fd=self._directory)
        except OSError as error:
            if error.errno != EOPNOTSUPP:
                raise
            file = os.open(self._temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666, dir_fd=self._directory)
            self._named = True
        fcntl.flock(file, fcntl.LOCK_EX)
        return file

    def _check_place(self) -> None:
        """Raise OSError if the directory takes no files of a mount."""
        here = os.fstat(self._directory)
        entry = next((each for each in mounting.mounts() if each.st_dev == here.st_dev), None)
        if entry is None:
            raise NotOnMount(EXDEV, "is not on a gpufs mount: only files there can be published", str(self._path))
        if here.st_ino == _ROOT_INODE:
            text = f"the root of a mount takes no files: publish below {entry.mountpoint}/gpu0"
            raise OSError(EPERM, text, str(self._path))

    def _remove_leftovers(self) -> None:
        for name in os.listdir(self._directory):
            if not name.startswith(_PREFIX):
                continue
            try:
                file = os.open(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=self._directory)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name, dir_fd=self._directory)
                finally:
                    os.close(file)
            except OSError:
                pass  # locked by its writer, gone, or another user's

    def allocate(self, size: int) -> None:
        """Allocate the file's memory."""
        try:
            os.posix_fallocate(self._file, 0, size)
        except OSError as error:
            number = error.errno or EIO
            failure = OSError(number, f"{os.strerror(number)}; {size} bytes are needed")
            raise failure_of_mount(failure, str(self._path)) from None

    def write(self, data: bytes) -> None:
        """Write the whole contents, which are small."""
        try:
            with open(self._file, "wb", closefd=False) as file:
                file.write(data)
        except OSError as error:
            raise failure_of_mount(error, str(self._path)) from None

    def attach(self) -> gpufs.DeviceArray:
        """Return the file's bytes as an array."""
        try:
            return gpufs.attach(self._descriptor_path(), mode="r+")
        except OSError as error:
            raise failure_of_mount(error, str(self._path)) from None

    def map(self) -> torch.Tensor:
        """Return the file's bytes as a tensor."""
        mapped: torch.Tensor = from_dlpack(self.attach())
        return mapped

    def can_be_named(self, path: Path) -> bool:
        """Return whether the file can take this name: whether both are in one directory of a device."""
        parent, own = os.stat(path.parent), os.fstat(self._directory)
        return (parent.st_dev, parent.st_ino) == (own.st_dev, own.st_ino)

    def _descriptor_path(self) -> str:
        """Return a path by which this process opens the file, which has no name."""
        return f"/proc/self/fd/{self._file}"

    def take_name(self, path: Path | None = None) -> None:
        """Put the file in the place of the one with this name, its own by default, in its directory."""
        name = (path or self._path).name
        directory = self._directory
        try:
            mode = os.stat(name, dir_fd=directory).st_mode & 0o777
            os.fchmod(self._file, mode)
        except FileNotFoundError:
            pass
        if not self._named:
            # With a descriptor of the directory, Python follows the link in /proc.
            os.link(
                self._descriptor_path(),
                self._temporary,
                src_dir_fd=directory,
                dst_dir_fd=directory,
                follow_symlinks=True,
            )
            self._named = True
        os.rename(self._temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        self._named = False

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Without a name it is gone. A second call does nothing."""
        if self._file < 0:
            return
        if self._named:
            os.unlink(self._temporary, dir_fd=self._directory)
        os.close(self._file)
        os.close(self._directory)
        self._file = -1
