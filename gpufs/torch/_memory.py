"""The memory of a file as tensors, each with a storage of its own.

Libraries decide by the storage what belongs together: tensors of one storage are saved, copied, pickled and moved
together, or taken for the same weight. So each tensor of a file has a storage over its own bytes, as safetensors gives
it one. All of them keep the file attached.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Final, Self

import torch
from torch.utils.dlpack import from_dlpack

from gpufs.client._array import DeviceArray
from gpufs.client._attach import attach
from gpufs.drivers import HOST
from gpufs.engine import bytes_capsule
from gpufs.formats.checkpoint import link_error
from gpufs.formats.placement import LOAD_BYTES, file_placement
from gpufs.modes import READ, Mode
from gpufs.torch._report import loading

_log: Final = logging.getLogger("gpufs")
_lock = threading.Lock()
_files: weakref.WeakSet[FileMemory] = weakref.WeakSet()  # those that are attached; guarded by _lock


class FileMemory:
    """The attached memory of one file. It stays attached until this object and all its tensors are gone."""

    def __init__(self, array: DeviceArray) -> None:
        self.aligned = True  # the contents begin where they should
        self.size = array.size
        self.private = array.private
        self.mode = array.mode
        self.attached = array.attached
        self._driver = self.attached.driver
        self.address = array.address
        self._number = array.__dlpack_device__()[1]
        self.device = torch.device("cpu" if self._driver == HOST else f"cuda:{self._number}")  # cuda: also for HIP
        self.counts = loading.opened(array.path)
        with _lock:
            _files.add(self)

    @classmethod
    def attach(cls, path: str, mode: Mode) -> Self:
        """Attach a file where its tensors are aligned, as far as others who use it leave that possible."""
        try:
            # The header is read before, not in place: of programs that start together one would keep it from moving.
            placement = file_placement(path)
            memory = cls(attach(path, mode=mode, placement=placement))
        except OSError as error:
            raise link_error(error, path) from None
        memory.aligned = placement is None or (memory.address - placement) % LOAD_BYTES == 0
        if not memory.aligned:
            _log.warning(
                "%s: its tensors are not aligned, which makes computing slower: another program uses the file's memory "
                "as it lies, or the device is full",
                path,
            )
        return memory

    def tensor(self, offset: int, count: int) -> torch.Tensor:
        """Return ``count`` bytes from ``offset`` on as a tensor that is all of its storage."""
        return self._tensor(offset, count, _CountedTensor(self, count))

    def aligned_tensor(self, offset: int, count: int, itemsize: int, *, copy: bool = False) -> torch.Tensor:
        """Return the same, or a copy if the address does not suit elements of this size, or ``copy``."""
        data = self.tensor(offset, count)
        if copy or data.data_ptr() % itemsize:
            data = data.clone()
            self.counts.copied("alignment", count)
        return data

    def moved(self, tensor: torch.Tensor, device: torch.device | str | int | None) -> torch.Tensor:
        """Return a tensor of this file, or a copy on the device that is asked for."""
        moved = tensor if device is None else tensor.to(device)
        self.counts.became(tensor.dtype, tensor.device, moved)
        return moved

    def _tensor(self, offset: int, count: int, owner: object) -> torch.Tensor:
        if not count:  # at no address, as torch has it: the address is that of the next tensor
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        address = self.address + offset
        tensor: torch.Tensor = from_dlpack(bytes_capsule(owner, self._driver, self._number, address, count))
        return tensor

    def read(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes from ``offset`` on, after the current stream's work."""
        return self.uncounted(offset, count).cpu().numpy().tobytes()

    def uncounted(self, offset: int, count: int) -> torch.Tensor:
        """Make a tensor as tensor() does, which the program does not get."""
        return self._tensor(offset, count, self)

    def separate(self, part: torch.Tensor) -> torch.Tensor:
        """Return the same elements in a storage that has no others than those between its first and last."""
        if not part.numel():
            return part.clone()
        last = sum((extent - 1) * stride for extent, stride in zip(part.shape, part.stride(), strict=True))
        count = (last + 1) * part.itemsize
        offset = part.data_ptr() - self.address
        if not 0 <= offset <= self.size - count:  # a copy, or a part of one
            return part if part.untyped_storage().nbytes() == count else part.clone()
        return self.tensor(offset, count).view(part.dtype).as_strided(part.shape, part.stride())

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is memory of this file."""
        end = self.address + self.size
        return tensor.device.type == self.device.type and self.address <= tensor.data_ptr() < end


def read_only_on_gpus() -> list[str]:
    """Return the files on GPUs that this program may not write to."""
    with _lock:
        return sorted({file.counts.path for file in _files if file.mode == READ and file.device.type != "cpu"})


class _CountedTensor:
    """An object that a tensor in place keeps alive, so that the report knows of it."""

    __slots__ = ("_file", "_number")

    def __init__(self, file: FileMemory, nbytes: int) -> None:
        self._file = file
        self._number = file.counts.take(nbytes)

    def __del__(self) -> None:
        self._file.counts.drop(self._number)


def file_of(tensor: torch.Tensor) -> FileMemory | None:
    """Return the file whose memory a tensor is; None for other tensors, also for those that have no memory."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return None
    with _lock:
        files = list(_files)
    try:
        return next((file for file in files if file.contains(tensor)), None)
    except RuntimeError:  # a tensor that only wraps others
        return None
