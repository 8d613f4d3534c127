"""The file system ``gpufs://`` of fsspec, which finds it by the package's entry point."""

from __future__ import annotations

import errno
import os
import shutil
from functools import partial
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import isfilelike, stringify_path

from gpufs import mounting
from gpufs._naming import named_in
from gpufs.copying.calls import copy
from gpufs.copying.types import CopyProgress
from gpufs.exceptions import NotOnMount


@named_in("gpufs.integrations.fsspec")
class GpufsFileSystem(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The files of gpufs mounts, by absolute paths: ``gpufs:///mnt/gpufs/gpu0/weights``.

    As fsspec's LocalFileSystem, with two differences: ``put``, ``get`` and ``copy`` are :func:`gpufs.copy`, so the
    mount's daemon moves the bytes, and nothing is created outside of a mount. Where the mount is missing, files would
    otherwise fill the host's disk.

    Parameters
    ----------
    auto_mkdir : bool
        Whether a new file gets the directories that its path names, as in object stores.
    **options
        Those of every file system of fsspec.

    Examples
    --------
    >>> fs = fsspec.filesystem("gpufs")  # doctest: +SKIP
    >>> fs.put("train.parquet", "/mnt/gpufs/gpu0/data/")  # doctest: +SKIP
    >>> pandas.read_parquet("gpufs:///mnt/gpufs/gpu0/data/train.parquet")  # doctest: +SKIP
    """

    protocol = "gpufs"

    def __init__(self, auto_mkdir: bool = True, **options: Any) -> None:
        super().__init__(auto_mkdir=auto_mkdir, **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        name = stringify_path(path)
        if name.startswith("gpufs://"):  # libraries that join URLs lose the third slash
            name = "/" + name.removeprefix("gpufs://").lstrip("/")
        return super()._strip_protocol(name)

    # ---- what creates names ----

    def mkdir(self, path: Any, create_parents: bool = True, **options: Any) -> None:
        """Create a directory of a mount."""
        _check_place(self._strip_protocol(path))
        super().mkdir(path, create_parents, **options)

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Create a directory of a mount, and those above it."""
        _check_place(self._strip_protocol(path))
        super().makedirs(path, exist_ok)

    def touch(self, path: Any, truncate: bool = True, **options: Any) -> None:
        """Create an empty file, or empty one."""
        _check_place(self._strip_protocol(path))
        super().touch(path, truncate, **options)

    def _open(self, path: Any, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if mode.strip("bt") != "r":
            _check_place(self._strip_protocol(path))
        return super()._open(path, mode, block_size, **options)

    # ---- copies ----

    def cp_file(self, path1: Any, path2: Any, **options: Any) -> None:
        """Copy a file, or create the directory that a path is."""
        self.put_file(self._strip_protocol(path1), path2, **options)

    def put_file(self, lpath: Any, rpath: Any, callback: Any = None, **options: Any) -> None:
        """Copy a file of the host to a mount, or create the directory that a path is."""
        target = self._strip_protocol(rpath)
        _check_place(target)
        if os.path.isdir(lpath):
            self.makedirs(target, exist_ok=True)
            return
        if self.auto_mkdir:
            self.makedirs(self._parent(target), exist_ok=True)
        _copy(lpath, target, callback)

    def get_file(self, rpath: Any, lpath: Any, callback: Any = None, **options: Any) -> None:
        """Copy a file of a mount to the host, or create the directory that a path is."""
        source = self._strip_protocol(rpath)
        if isfilelike(lpath):
            super().get_file(source, lpath)
            return
        if os.path.isdir(source):
            os.makedirs(lpath, exist_ok=True)
            return
        os.makedirs(os.path.dirname(os.path.abspath(lpath)), exist_ok=True)
        _copy(source, lpath, callback)

    def mv(self, path1: Any, path2: Any, recursive: bool = True, **options: Any) -> None:
        """Move a file or a directory, also between devices."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        _check_place(target)
        if self.auto_mkdir:
            self.makedirs(self._parent(target), exist_ok=True)
        shutil.move(source, target, copy_function=partial(copy, preserve=True))


def _check_place(path: str) -> None:
    """Raise NotOnMount if a file of this name would not be on a mount."""
    place = path
    while not os.path.exists(place):
        place = os.path.dirname(place)
    if os.stat(place).st_dev not in mounting.by_device():
        raise NotOnMount(errno.EXDEV, "is not on a gpufs mount (gpufs status lists them)", path)


def _copy(source: str, target: str, callback: Any) -> None:
    def report(progress: CopyProgress) -> None:
        callback.set_size(progress.total)
        callback.absolute_update(progress.moved)

    if not os.path.lexists(source):  # the class by which fsspec knows a missing file
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
    copy(source, target, progress=None if callback is None else report)
