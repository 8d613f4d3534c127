"""Creating: a new file of a mount, as an array."""

from __future__ import annotations

import errno
import math
import operator
import os
from collections.abc import Sequence

from gpufs import mounting
from gpufs._naming import named_in
from gpufs.client._array import DeviceArray
from gpufs.client._attach import attach
from gpufs.client._space import shortage
from gpufs.exceptions import failure_of_mount
from gpufs.formats.element_types import element_type
from gpufs.formats.layout import GivenType, note_type
from gpufs.new_file import remove_name


@named_in("gpufs")
def create(
    path: str | os.PathLike[str], shape: int | tuple[int, ...], dtype: object = "uint8", *, mode: int = 0o666
) -> DeviceArray:
    """Create a file of a mount and map its memory into this program, as :func:`attach` with "r+".

    The file has the elements alone, without a header, and they are zeros. It stays when the array is closed. The
    extended attribute ``user.tensor`` has the dtype and the shape, for `gpufs inspect` and `gpufs diff`.

    Parameters
    ----------
    path
        The file, below the directory of a device. It must not exist.
    shape
        The extents of the array.
    dtype
        The element type: a name ("float32", "bfloat16", "float8_e4m3fn") or a type of numpy or torch.
    mode
        The permission bits of the file, from which the umask is taken.

    Returns
    -------
    DeviceArray
        The elements, for reading and writing.

    Raises
    ------
    FileExistsError
        The name exists.
    NotOnMount
        ``path`` is not on a gpufs mount.
    DeviceFull, QuotaExceeded
        The device lacks memory, or that would exceed a limit. No file is left.
    DaemonDied
        The mount's daemon has died.
    TypeError, ValueError
        The element type is not known, or the extents are not a shape.

    Examples
    --------
    >>> cache = gpufs.create("/mnt/gpufs/gpu0/cache", (32, 4096), "bfloat16")  # doctest: +SKIP
    >>> torch.from_dlpack(cache)[0] = torch.arange(4096)  # doctest: +SKIP
    """
    extents = shape if isinstance(shape, tuple) else (operator.index(shape),)
    if any(extent < 0 for extent in extents):
        raise ValueError(f"shape: {extents} is not a shape")
    size = math.prod(extents) * element_type(dtype).bytes
    name = os.fsdecode(path)
    try:
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise
    except OSError as error:
        raise failure_of_mount(error, name) from None
    try:
        mounts = mounting.places_of(os.fstat(file).st_dev, name)
        if size:
            _allocate(file, size, mounts)
        note_type(file, GivenType(element_type(dtype).name, extents))
        return attach(name, "r+").view(dtype, extents)
    except BaseException as error:
        remove_name(file, name, None)
        if isinstance(error, OSError) and error.filename is None:  # of the allocation
            raise failure_of_mount(error, name) from None
        raise
    finally:
        os.close(file)


def _allocate(file: int, size: int, mounts: Sequence[mounting.MountEntry]) -> None:
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        lack = shortage(file, size, mounts) if error.errno == errno.ENOSPC else ""
        raise OSError(error.errno, f"{error.strerror}: {lack}" if lack else error.strerror) from None
