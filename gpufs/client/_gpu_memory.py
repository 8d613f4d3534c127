"""Passes on memory of a GPU that this process has allocated: by the vendor's handle, or by a descriptor.

The vendor's library is the one that the program uses already; what is called here has no effect on its contexts, except
that the memory's own is current during the calls.
"""

from __future__ import annotations

import ctypes
import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gpufs.client._shared_memory import MemoryShare
from gpufs.drivers import DRIVERS
from gpufs.protocol import HANDLE_BYTES, MAX_MEMORY_PIECES, MAX_PIECES, send_pieces
from gpufs.syscalls import close_all

# Attributes of a pointer; HIP has CUDA's numbers.
_CONTEXT: Final = 1
_MEMORY_TYPE: Final = 2
_IS_MANAGED: Final = 8
_DEVICE_ORDINAL: Final = 9
_IPC_CAPABLE: Final = 10
_ON_DEVICE: Final = 2
_DESCRIPTOR: Final = 1

_NOT_SHAREABLE: Final = (
    "this memory was allocated so that no other process can map it. If torch allocated it with expandable segments, "
    "start the program without TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=0, or without expandable_segments:True in "
    "PYTORCH_CUDA_ALLOC_CONF; memory of cudaMallocAsync (backend:cudaMallocAsync, or a stream-ordered pool) cannot be "
    "shared either"
)


class _IpcHandle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


class _Vendor:
    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._library = self._load(driver)

    @staticmethod
    def _load(driver: str) -> ctypes.CDLL:
        for name in DRIVERS[driver].libraries:
            try:
                return ctypes.CDLL(name)
            except OSError:
                continue
        raise OSError(errno.ENODEV, f"{DRIVERS[driver].libraries[0]} was not found")

    def call(self, name: str, *arguments: object) -> int:
        """The result code of a function that both vendors have; nonzero as well where the library lacks it."""
        symbol = DRIVERS[self._driver].prefix + name
        function = getattr(self._library, f"{symbol}_v2", None) or getattr(self._library, symbol, None)
        return int(function(*arguments)) if function is not None else -1

    def attribute(self, which: int, address: int) -> int | None:
        """An attribute of an address, None if the library does not know it."""
        value = ctypes.c_uint64(0)  # larger than any of them: the library writes a part of it
        code = self.call("PointerGetAttribute", ctypes.byref(value), ctypes.c_int(which), ctypes.c_uint64(address))
        return value.value if code == 0 else None

    @contextmanager
    def current(self, address: int) -> Iterator[None]:
        """The memory's context is current on this thread."""
        context = self.attribute(_CONTEXT, address) if self._driver == "cuda" else None
        if not context:  # HIP; and memory that is mapped belongs to none, but its program has one
            yield
            return
        if self._library.cuCtxPushCurrent_v2(ctypes.c_void_p(context)):
            raise OSError(errno.EIO, "the context of the memory cannot be made current")
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def share_gpu_memory(driver: str, address: int, size: int, *, writable: bool) -> MemoryShare:
    """How to pass on memory of a GPU. OSError EINVAL if that is impossible, with the reason and the remedy."""
    vendor = _Vendor(driver)
    if vendor.attribute(_IS_MANAGED, address):
        raise OSError(errno.EINVAL, "managed memory (cudaMallocManaged) cannot be shared: copy it to device memory")
    if vendor.attribute(_MEMORY_TYPE, address) not in (_ON_DEVICE, None):
        raise OSError(errno.EINVAL, "this is pinned memory of the host, which cannot be shared")
    with vendor.current(address):
        allocations = _allocations(vendor, address, size)
        start = allocations[0][0]
        offset, pci_address = address - start, _pci_address(vendor, address)
        handle = _IpcHandle()
        if (
            len(allocations) == 1
            and vendor.attribute(_IPC_CAPABLE, address) in (1, None)
            and vendor.call("IpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(start)) == 0
        ):
            return MemoryShare("ipc", -1, offset, writable, pci_address, bytes(handle.bytes))
        return MemoryShare("descriptor", _export_all(vendor, allocations), offset, writable, pci_address)


def _allocations(vendor: _Vendor, address: int, size: int) -> list[tuple[int, int]]:
    """Address and size of the allocations that the memory is in: torch's expandable segments have many in a row."""
    allocations = []
    at = address
    while at < address + size:
        start, length = ctypes.c_uint64(0), ctypes.c_size_t(0)
        if vendor.call("MemGetAddressRange", ctypes.byref(start), ctypes.byref(length), ctypes.c_uint64(at)):
            raise OSError(errno.EFAULT, f"{at:#x} is not an address of this process's memory on a GPU")
        allocations.append((start.value, length.value))
        at = start.value + length.value
    return allocations


def _pci_address(vendor: _Vendor, address: int) -> str:
    ordinal = vendor.attribute(_DEVICE_ORDINAL, address)
    text = ctypes.create_string_buffer(64)
    if ordinal is None or vendor.call("DeviceGetPCIBusId", text, ctypes.c_int(64), ctypes.c_int(ordinal)):
        return ""
    return text.value.decode().lower()


def _export_all(vendor: _Vendor, allocations: list[tuple[int, int]]) -> int:
    """A socket with descriptors of the physical memory of allocations, for the daemon to take."""
    if len(allocations) > MAX_MEMORY_PIECES:
        raise OSError(
            errno.E2BIG,
            f"the memory is in {len(allocations)} allocations, and at most {MAX_MEMORY_PIECES} can be shared: register "
            "parts of it",
        )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        offset = 0
        for start in range(0, len(allocations), MAX_PIECES):
            pieces: list[tuple[int, int]] = []
            try:
                for address, length in allocations[start : start + MAX_PIECES]:
                    fd = _export(vendor, address)
                    if fd is None:
                        raise OSError(errno.EINVAL, _NOT_SHAREABLE)
                    pieces.append((fd, length))
                offset = send_pieces(ours, offset, pieces)
            finally:
                close_all([fd for fd, _ in pieces])
        return theirs.detach()


def _export(vendor: _Vendor, address: int) -> int | None:
    """A descriptor of the physical memory behind an address, None if it was not allocated for that."""
    handle = ctypes.c_uint64(0)
    if vendor.call("MemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_uint64(address)):
        return None
    try:
        fd = ctypes.c_int(-1)
        code = vendor.call(
            "MemExportToShareableHandle", ctypes.byref(fd), handle, ctypes.c_int(_DESCRIPTOR), ctypes.c_uint64(0)
        )
        return fd.value if code == 0 and fd.value >= 0 else None
    finally:
        vendor.call("MemRelease", handle)
