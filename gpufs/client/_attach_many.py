"""Attaching many files at once: small ones come as one copy, which costs a moment instead of a lease for each."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from gpufs import mounting
from gpufs._naming import named_in
from gpufs.client import _daemons
from gpufs.client._array import DeviceArray
from gpufs.client._attach import GRANULE, attach
from gpufs.drivers import HOST
from gpufs.engine import Buffer, Engine, Lease, Mapping
from gpufs.exceptions import as_failure_of_mount
from gpufs.modes import READ, READ_WRITE, Mode, check_mode
from gpufs.mounting import MountEntry
from gpufs.syscalls import closed_after

_ALIGNMENT: Final = 256  # of each file in the copy, as allocations of the vendors have it
_GATHERED_BYTES: Final = 64 << 20  # in one piece of memory, about

_Mounts = dict[int, list[MountEntry]]  # by st_dev
_Place = tuple[int, str]  # st_dev of the mount, and the directory of a device


@dataclass(eq=False, slots=True)
class GatheredFile:
    """The copy of one file, in memory that the copies of others share. All of it ends with the last of them."""

    path: str
    mode: Mode
    driver: str
    size: int
    placement: int
    mapping: Mapping
    private: bool = True

    def refresh(self) -> NoReturn:
        """Fails: a copy does not follow the file."""
        raise OSError(errno.EOPNOTSUPP, "a private copy does not follow the file: attach it again", self.path)


@dataclass(slots=True)
class _Small:
    """A small file that has been read."""

    number: int  # in the order of the caller
    path: str
    place: _Place
    content: bytes


@named_in("gpufs")
def attach_many(paths: Iterable[str | os.PathLike[str]], mode: Mode = READ) -> list[DeviceArray]:
    """Attach many files, of which the small ones are copied together.

    A file of less than 2 MiB is read into memory of this program, on the device that it lies on: thousands of them take
    a fraction of a second and little memory, where a lease for each would take seconds and 2 MiB. Larger files are
    attached as by `gpufs.attach`, and so are all with mode "r+".

    Parameters
    ----------
    paths
        The files, on any gpufs mounts.
    mode
        "r", "c" or "r+", as for `gpufs.attach`. What is written to the copy of a small file ("c") stays in this
        program.

    Returns
    -------
    list of DeviceArray
        The bytes of each file, in the order of ``paths``. A copy has ``private`` set, and does not follow the file. The
        memory of copies ends when none of the arrays that share it is left.

    Raises
    ------
    OSError
        As `gpufs.attach`, for the first file that cannot be attached; nothing stays attached then.
    ValueError
        ``mode`` is none of "r", "r+" and "c".

    Examples
    --------
    >>> shards = gpufs.attach_many(sorted(Path("/mnt/gpufs/gpu0/samples").iterdir()))  # doctest: +SKIP
    """
    check_mode(mode)
    names = [os.fsdecode(path) for path in paths]
    if mode == READ_WRITE:
        return [attach(name, mode) for name in names]
    arrays: list[DeviceArray | None] = [None] * len(names)
    mounts = mounting.by_device()
    waiting: dict[_Place, list[_Small]] = {}
    sizes: Counter[_Place] = Counter()  # of what waits
    directories: dict[str, bool] = {}
    with _Devices(mounts) as devices:
        # One thread reads. Several threads are no faster, since each waits for the interpreter's lock.
        for number, name in enumerate(names):
            small = _read(number, name, mounts, directories)
            if small is None:
                continue
            waiting.setdefault(small.place, []).append(small)
            sizes[small.place] += len(small.content)
            if sizes[small.place] >= _GATHERED_BYTES:
                _gather(waiting.pop(small.place), mode, devices, arrays)
                del sizes[small.place]
        for together in waiting.values():
            _gather(together, mode, devices, arrays)
    return [attach(name, mode) if array is None else array for name, array in zip(names, arrays, strict=True)]


# ---- reading ----


def _read(number: int, name: str, mounts: _Mounts, directories: dict[str, bool]) -> _Small | None:
    """A file with its contents, None if it is to be attached itself."""
    with as_failure_of_mount(name):
        fd = _open(name, mounts, directories)
        if fd < 0:
            return None
        with closed_after(fd):
            status = os.fstat(fd)
            if not _is_small(status, mounts):
                return None
            place = mounting.place_of(fd, mounts[status.st_dev])
            content = os.read(fd, status.st_size + 1)
            if len(content) > status.st_size:  # the file grows just now
                return None
    return _Small(number, name, (status.st_dev, place), content)


def _open(name: str, mounts: _Mounts, directories: dict[str, bool]) -> int:
    """Open what may be a small file; -1 for what is not. ``directories``: those on our mounts, as far as known.

    Looks first what it is, except in directories on our mounts: opening a device, say, has effects.
    """
    directory = os.path.dirname(name)
    if directory not in directories:
        directories[directory] = os.stat(directory or ".").st_dev in mounts
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    if directories[directory]:
        try:
            return os.open(name, flags | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno != errno.ELOOP:  # a link, perhaps to elsewhere
                raise
    return os.open(name, flags) if _is_small(os.stat(name), mounts) else -1


def _is_small(status: os.stat_result, mounts: _Mounts) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size < GRANULE and status.st_dev in mounts


# ---- the copy ----


class _Devices:
    """The devices of copies, each opened once for a call of attach_many()."""

    def __init__(self, mounts: _Mounts) -> None:
        self._mounts = mounts
        self._stack = ExitStack()
        self._found: dict[_Place, tuple[Engine, int]] = {}
        self._reports: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> _Devices:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def find(self, place: _Place) -> tuple[Engine, int]:
        """The device behind a directory of a mount: an engine of this process, and the number there."""
        if place not in self._found:
            self._found[place] = self._open(place)
        return self._found[place]

    def _open(self, place: _Place) -> tuple[Engine, int]:
        mount, directory = place
        if mount not in self._reports:
            root = mounting.root_of(self._mounts[mount])
            if root is None:
                raise OSError(errno.ENOENT, "the root of the mount is not visible here")
            self._reports[mount] = _daemons.control_file(root, "status")
        report = self._reports[mount]
        wanted = next((device for device in report["devices"] if device["name"] == directory), None)
        if wanted is None:
            raise OSError(errno.EINVAL, "no device memory is behind the file")
        if report["driver"] == "host":
            return self._stack.enter_context(Engine("host", devices=1, memory_bytes=2 * _GATHERED_BYTES)), 0
        chosen = [wanted["uuid"]] if wanted["uuid"] else 0
        # Plain memory, which HIP takes where the kernel moves files, cannot be mapped by its descriptor.
        engine = self._stack.enter_context(Engine(report["driver"], devices=chosen, hip_memory="virtual"))
        for index, visible in enumerate(engine.devices):
            if visible.info.pci_address == wanted["pci_address"]:
                return engine, index
        raise OSError(errno.ENODEV, f"this process does not see the GPU of {directory}")


def _gather(files: list[_Small], mode: Mode, devices: _Devices, arrays: list[DeviceArray | None]) -> None:
    """Put the contents of files of one device into one piece of its memory, and make their arrays."""
    ends = itertools.accumulate(-(-len(file.content) // _ALIGNMENT) * _ALIGNMENT for file in files)
    offsets = [0, *ends]
    contents = bytearray(max(offsets[-1], 1))
    for file, offset in zip(files, offsets, strict=False):
        contents[offset : offset + len(file.content)] = file.content
    with as_failure_of_mount(files[0].path):
        engine, index = devices.find(files[0].place)
        mapping = _copy(contents, engine, index, mode)
    for file, offset in zip(files, offsets, strict=False):
        copy = GatheredFile(file.path, mode, engine.driver, len(file.content), offset, mapping)
        arrays[file.number] = DeviceArray.of(copy, offset)


def _copy(contents: bytearray, engine: Engine, index: int, mode: Mode) -> Mapping:
    reserve = -(-len(contents) // GRANULE) * GRANULE
    address = engine.devices[index].info.pci_address
    with Buffer(engine, index) as buffer:
        buffer.write(0, contents)
        with Lease(buffer) as lease:
            mapping = Mapping(engine.driver, address, writable=False, private=mode != READ, reserve=reserve)
            mapping.add(lease.pieces())
            if mode == READ and engine.driver == HOST:
                mapping.explain_accesses(
                    "a file of attach_many() is read-only in this program, which has written to it; "
                    'mode="c" keeps changes private'
                )
            return mapping
