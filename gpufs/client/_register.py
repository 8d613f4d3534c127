"""Shows memory of this program as a file on a mount: one array, and the registration of it."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from typing import Any

from gpufs import mounting
from gpufs._naming import named_in
from gpufs.client import _daemons
from gpufs.client._connection import Connection
from gpufs.client._gpu_memory import share_gpu_memory
from gpufs.client._shared_memory import MemoryShare, share_host_memory
from gpufs.drivers import HOST
from gpufs.engine._arrays import ArrayMemory, array_memory
from gpufs.exceptions import NotOnMount, failure_of_mount
from gpufs.formats.layout import TYPE_ATTRIBUTE, GivenType
from gpufs.new_file import remove_name
from gpufs.syscalls import Closing, closed_after

# The registrations that have not been closed. Their connections and arrays stay, also where the program drops them.
_registrations: set[Registration] = set()


@named_in("gpufs")
class Registration(Closing):
    """Memory of this program that is a file until :meth:`close`, or until the program ends.

    Attributes
    ----------
    path
        The file, as it was given to :func:`register`. It may have been renamed since.
    nbytes
        Its size in bytes.
    """

    def __init__(self, connection: Connection, number: int, path: str, memory: ArrayMemory) -> None:
        self.path = path
        self.nbytes = memory.bytes
        self._connection = connection
        self._number = number
        self._memory: ArrayMemory | None = memory  # kept allocated
        self._lock = threading.Lock()
        self._pid = os.getpid()
        _registrations.add(self)

    @property
    def closed(self) -> bool:
        """Whether the file no longer shows the memory."""
        return self._memory is None

    def close(self) -> None:
        """End the registration. A second call does nothing.

        The file loses its names, and descriptors and mappings of it that are still open fail with ESTALE. On return
        nothing reads or writes the memory through the file any more, so it can be freed or used for something else.

        Raises
        ------
        OSError
            ETIMEDOUT: a copy from or to the file does not end, for example because a disk hangs. The memory must stay
            allocated; close() can be called again.
        """
        if self._pid != os.getpid():
            return  # a forked child: the registration is its parent's
        with self._lock:
            if self._memory is None:
                return
            try:
                self._connection.unregister(self._number)
            except OSError as error:
                if error.errno == errno.ETIMEDOUT:
                    raise OSError(error.errno, error.strerror, self.path) from None
                # Otherwise the daemon has ended, and with it its use of the memory.
            _registrations.discard(self)
            self._memory = None

    def __repr__(self) -> str:
        return f"<gpufs.Registration {self.path} ({self.nbytes} bytes{', closed' if self.closed else ''})>"


def register_array(array: Any, name: str, size: int | None, mode: int) -> Registration:
    """Register one array, or ``size`` bytes at an address, as gpufs.register()."""
    memory = _memory_of(array, size)
    kind = GivenType.of_array(array)
    directory = os.path.dirname(name) or "."
    try:
        st_dev = os.stat(directory).st_dev
    except OSError as error:
        raise failure_of_mount(error, directory) from None
    mounts = mounting.by_device().get(st_dev)
    if mounts is None:
        raise NotOnMount(errno.EXDEV, "is not on a gpufs mount", directory)

    def ask() -> Registration:
        connection = _daemons.shared_connection(st_dev, mounts)
        share = _share(memory, connection.driver)
        try:
            return _create(connection, share, name, mode, memory, kind)
        finally:
            share.close()

    try:
        return _daemons.repeat_if_it_dies(ask)
    except OSError as error:
        raise failure_of_mount(error, os.fsdecode(error.filename or name)) from None


def _memory_of(array: Any, size: int | None) -> ArrayMemory:
    """The memory of an array, or of an address and a size in bytes. TypeError, ValueError."""
    if isinstance(array, int):
        if size is None:
            raise TypeError("an address needs a size in bytes")
        memory = ArrayMemory(array, size, read_only=False, keep=None, on_host=None)
    elif size is not None:
        raise TypeError("size is for addresses: an array has its own")
    elif hasattr(array, "data_ptr") and hasattr(array, "is_contiguous"):
        # A torch tensor: the protocols refuse those that require a gradient, and some element types.
        if array.device.type not in ("cpu", "cuda"):
            raise ValueError(f"a tensor on the device {array.device} has no memory that can be shared")
        if not array.is_contiguous():
            raise ValueError("the tensor is not contiguous: register a contiguous copy, or what it is a view of")
        on_host = array.device.type == "cpu"
        memory = ArrayMemory(array.data_ptr(), array.nbytes, read_only=False, keep=array, on_host=on_host)
    else:
        memory = array_memory(array)
    if memory.bytes <= 0:
        raise ValueError("the array is empty")
    if memory.address <= 0:
        raise ValueError(f"{memory.address:#x} is not an address")
    return memory


def _share(memory: ArrayMemory, driver: str) -> MemoryShare:
    if driver == HOST:
        if memory.on_host is False:
            raise OSError(errno.EINVAL, "the array is on a GPU, and this is a mount of host memory")
        return share_host_memory(memory.address, memory.bytes, writable=not memory.read_only)
    if memory.on_host:
        raise OSError(errno.EINVAL, "the array is in memory of the host, and this is a mount of GPUs")
    return share_gpu_memory(driver, memory.address, memory.bytes, writable=not memory.read_only)


def _create(
    connection: Connection, share: MemoryShare, path: str, mode: int, memory: ArrayMemory, kind: GivenType | None
) -> Registration:
    with closed_after(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)) as file:
        try:
            if kind is not None:
                with suppress(OSError):  # in a file that its owner may not write, or without memory for metadata
                    os.setxattr(file, TYPE_ATTRIBUTE, str(kind).encode("ascii", "replace"))
            number = connection.register(share, memory.bytes, file)
            return Registration(connection, number, path, memory)
        except BaseException:
            remove_name(file, path, None)
            raise
