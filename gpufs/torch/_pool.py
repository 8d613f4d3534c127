"""Torch's allocations in a file of a mount: a model that is built there is published without a copy."""

from __future__ import annotations

import functools
import operator
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from errno import EOPNOTSUPP
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils.dlpack import from_dlpack

from gpufs._naming import named_in
from gpufs.config.kinds import parse_size
from gpufs.engine import TORCH_ALLOCATOR, AddressPool, keep_for_ever
from gpufs.torch._tensor_file import TensorFile
from gpufs.units import bytes_text

_MIB = 1 << 20
_GRANULE = 2 * _MIB
# How torch's allocator asks for memory: 2 MiB for tensors of up to 1 MiB, 20 MiB for those below 10 MiB, else what a
# tensor takes; tensors take multiples of 512 bytes.
_SMALL = _MIB
_MIDDLE = 10 * _MIB
_MIDDLE_STEP = 20 * _MIB
_ROUNDING = 512
# For the header of the published file: 150 bytes for each tensor and more for their attributes.
_LEAST_HEADER = _MIB
_LARGEST_HEADER = 64 * _MIB
_HEADER_SHARE = 1024

# Pools that exist, and those whose tensors have outlived them.
_pools: weakref.WeakSet[PoolMemory] = weakref.WeakSet()
_released: list[PoolMemory] = []


class PoolMemory:
    """A pool's file, its bytes in this process, which are space for a header and what torch allocates, and these."""

    def __init__(self, path: Path, size: int) -> None:
        header = min(max(_LEAST_HEADER, size // _HEADER_SHARE), _LARGEST_HEADER)
        self.header_bytes = -(-header // _MIB) * _MIB
        self.published = False  # the file has a name
        self.file_bytes = -(-(self.header_bytes + size) // _GRANULE) * _GRANULE
        self.file = TensorFile(path)
        try:
            self.file.allocate(self.file_bytes)
            self.bytes: torch.Tensor | None = from_dlpack(self.file.attach())
            if not self.bytes.is_cuda:
                raise OSError(
                    EOPNOTSUPP,
                    "this mount's devices are host memory, where torch allocates by itself; "
                    "gpufs.torch.publish() writes tensors to it",
                    str(path),
                )
            self.device = self.bytes.device
            start = self.bytes.data_ptr() + self.header_bytes
            self.addresses = AddressPool(start, len(self.bytes) - self.header_bytes)
        except BaseException:
            self.bytes = None
            self.file.close()
            raise
        self.torch_pool: Any = torch.cuda.MemPool(_allocator())
        _pools.add(self)

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether all bytes of the tensor are here."""
        if self.bytes is None or tensor.device != self.device or not tensor.is_contiguous():
            return False
        offset = tensor.data_ptr() - self.bytes.data_ptr()
        return not tensor.nbytes or self.header_bytes <= offset <= len(self.bytes) - tensor.nbytes

    def release(self) -> None:
        """Give the memory back once no tensor uses it. Torch keeps freed memory in its cache until it is emptied."""
        self.torch_pool = None
        _released.append(self)
        release_unused()

    def close(self) -> bool:
        """Close the file if nothing is allocated in it."""
        if self.addresses.usage()[0]:
            return False
        self.addresses.close()
        self.bytes = None
        self.file.close()
        return True


def _bytes_of(size: int | str) -> int:
    """Return a pool's size in bytes. TypeError, ValueError."""
    try:
        count = parse_size(size) if isinstance(size, str) else operator.index(size)
    except ValueError:
        raise ValueError(f'size: {size!r} is neither a number of bytes nor a text such as "16G"') from None
    if count <= 0:
        raise ValueError(f"size: {size!r} is too small: a pool has at least one byte")
    return count


def _bytes_like(like: torch.nn.Module | Mapping[str, torch.Tensor]) -> int:
    """Return what torch takes for copies of these tensors, by the steps in which its allocator asks for memory."""
    if isinstance(like, torch.nn.Module):
        tensors = [*like.parameters(), *like.buffers()]  # tied ones once
    else:
        tensors = list({id(tensor): tensor for tensor in like.values()}.values())
    small = middle = large = 0
    for size in (tensor.nbytes for tensor in tensors):
        if size <= _SMALL:
            small += -(-size // _ROUNDING) * _ROUNDING
        elif size < _MIDDLE:
            middle += -(-size // _ROUNDING) * _ROUNDING
        else:
            large += -(-size // _GRANULE) * _GRANULE
    # A tensor does not begin in one step and end in the next. None is larger than half a step, so at most a third of
    # each stays unused. One step more is for the last tensors.
    middle, small = (size + size // 2 for size in (middle, small))
    return large + -(-middle // _MIDDLE_STEP) * _MIDDLE_STEP + -(-small // _GRANULE) * _GRANULE + _GRANULE


@functools.cache
def _allocator() -> Any:
    plugged: Any = torch.cuda.memory.CUDAPluggableAllocator(*TORCH_ALLOCATOR)
    # torch keeps a bare pointer to it and frees memory through it until the process has ended.
    keep_for_ever(plugged)
    return plugged.allocator()


def release_unused() -> None:
    """Release the memory of pools that are gone and whose tensors are gone as well."""
    if _released:
        torch.cuda.empty_cache()
    for memory in list(_released):
        if memory.close():
            _released.remove(memory)


def find_pool(tensors: Iterable[torch.Tensor], path: Path) -> PoolMemory | None:
    """Return the pool in which all these tensors are, and whose file can be published under this name."""
    every = list(tensors)
    if not any(tensor.nbytes for tensor in every):  # empty tensors would be in any pool
        return None
    for memory in _pools:
        if not memory.published and all(memory.contains(tensor) for tensor in every) and memory.file.can_be_named(path):
            return memory
    return None


class _PoolBlocks(threading.local):
    """The calling thread's `with` blocks of a pool, the innermost last: torch's context managers."""

    def __init__(self) -> None:
        self.uses: list[Any] = []


@named_in("gpufs.torch")
class pool:
    """Torch allocates from a file of a mount inside ``with``, on this thread.

    The file has a fixed size and no name. :func:`publish` gives it one without a copy, if all tensors that it is called
    with were made in this pool. The memory is released when the pool and all tensors in it are gone. Tensors that
    outlive the pool stay valid; their memory is released by the next ``torch.cuda.empty_cache()`` and call of
    ``pool``. While the pool exists and has not been published the mount counts as busy.

    Parameters
    ----------
    path : path
        A name in the directory of a GPU of the mount, where :func:`publish` will put the file.
    size : int or str
        Bytes for tensors, or a text such as "16G". Torch takes 2 MiB at once for tensors of up to 1 MiB, 20 MiB for
        those of up to 10 MiB, and rounds larger ones up to 2 MiB. All of it is allocated at once, and the published
        file keeps that size.
    like : torch.nn.Module or mapping of str to torch.Tensor
        Instead of a size: tensors whose copies are to fit, for example a model on the meta device.

    Raises
    ------
    OSError
        ENOSPC if the device has less memory. EOPNOTSUPP if the mount's devices are host memory.
    torch.OutOfMemoryError
        Inside ``with``: the pool is full. A note of the exception names the pool.

    Examples
    --------
    >>> with gpufs.torch.pool("/mnt/gpufs/gpu0/model.safetensors", "16G"):
    ...     model = build().cuda()
    >>> gpufs.torch.publish(model, "/mnt/gpufs/gpu0/model.safetensors")
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        size: int | str | None = None,
        *,
        like: torch.nn.Module | Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        if (size is None) == (like is None):
            raise TypeError("pool() takes either a size or like")
        self._bytes = _bytes_like(like) if like is not None else _bytes_of(size if size is not None else 0)
        release_unused()
        self.path = os.fspath(path)
        self._memory = PoolMemory(Path(path), self._bytes)
        self._entered = _PoolBlocks()
        weakref.finalize(self, self._memory.release).atexit = False

    @property
    def device(self) -> torch.device:
        """The GPU."""
        return self._memory.device

    @property
    def used(self) -> int:
        """Bytes that torch has taken for tensors, and for its cache of freed ones."""
        return self._memory.addresses.usage()[0]

    def __enter__(self) -> Self:
        using = torch.cuda.use_mem_pool(self._memory.torch_pool, device=self.device)
        self._memory.addresses.enter()
        try:
            using.__enter__()
        except BaseException:
            self._memory.addresses.leave()
            raise
        self._entered.uses.append(using)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            used, largest = self._memory.addresses.usage()
            error.add_note(
                f"the pool for {self.path} has {bytes_text(self._bytes)}: {bytes_text(used)} are used, and the largest "
                f"free part has {bytes_text(largest)}. Give gpufs.torch.pool() a larger size."
            )
        self._memory.addresses.leave()
        self._entered.uses.pop().__exit__(kind, error, traceback)
