"""The memory of a file that NIXL reads or writes in place, without a buffer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpufs.client._attach import attach
from gpufs.hosts.nixl import Region
from gpufs.modes import Mode
from gpufs.syscalls import path_of


@contextmanager
def attached_in_place(fd: int, size: int, mode: Mode) -> Iterator[Region | None]:
    """Attach an open file of ``size`` bytes. None if that is not possible without a copy."""
    try:
        array = attach(path_of(fd), mode, reserve=size, copy=False)
    except (OSError, ValueError):
        yield None
        return
    with array:
        device = None if array.device == "cpu" else array.__dlpack_device__()[1]
        yield Region(array.address, size, device) if array.nbytes == size else None
