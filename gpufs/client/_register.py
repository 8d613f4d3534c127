"""Shows memory of this program as files on a mount: of one array, or of all tensors of a module."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from types import MappingProxyType
from typing import Any, Protocol, overload

from gpufs import mounting
from gpufs._naming import named_in
from gpufs.client import _daemons
from gpufs.client._connection import Connection
from gpufs.client._gpu_memory import share_gpu_memory
from gpufs.client._shared_memory import MemoryShare, share_host_memory
from gpufs.drivers import HOST
from gpufs.engine._arrays import ArrayMemory, array_memory
from gpufs.exceptions import as_failure_of_mount, failure_of_mount
from gpufs.formats.layout import GivenType, note_type
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


class Module(Protocol):
    """The methods of torch.nn.Module that are used here."""

    def named_parameters(self, *, remove_duplicate: bool = ...) -> Iterable[tuple[str, Any]]: ...
    def named_buffers(self, *, remove_duplicate: bool = ...) -> Iterable[tuple[str, Any]]: ...


@named_in("gpufs")
class ModuleRegistration(Closing):
    """The tensors of a module that are files until :meth:`close`, or until the program ends.

    Attributes
    ----------
    path : str
        The directory.
    tensors : mapping of str to Registration
        The file of each tensor, by its name in the module.
    """

    def __init__(self, path: str, tensors: dict[str, Registration], opened: ExitStack) -> None:
        self.path = path
        self.tensors: Mapping[str, Registration] = MappingProxyType(tensors)
        self._opened = opened

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(one.nbytes for one in {*self.tensors.values()})

    @property
    def closed(self) -> bool:
        """Whether no file shows a tensor any longer."""
        return all(one.closed for one in self.tensors.values())

    def close(self) -> None:
        """End the registrations as :meth:`Registration.close`. A second call does nothing.

        The directory is removed if :func:`register` has created it and nothing else is in it.

        Raises
        ------
        OSError
            ETIMEDOUT: a copy from or to a file does not end. The others are closed; close() can be called again.
        """
        failure = None
        for one in self.tensors.values():
            try:
                one.close()
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure
        self._opened.close()

    def __repr__(self) -> str:
        closed = ", closed" if self.closed else ""
        return f"<gpufs.ModuleRegistration {self.path} ({len(self.tensors)} tensors, {self.nbytes} bytes{closed})>"


@overload
def register(array: Module, path: str | os.PathLike[str], *, mode: int = 0o600) -> ModuleRegistration: ...
@overload
def register(
    array: Any, path: str | os.PathLike[str], *, size: int | None = None, mode: int = 0o600
) -> Registration: ...
@named_in("gpufs")
def register(
    array: Any, path: str | os.PathLike[str], *, size: int | None = None, mode: int = 0o600
) -> Registration | ModuleRegistration:
    """Show memory of this program as a file, which any tool can read, and write if its mode allows.

    Of a torch module all parameters and buffers become files of a directory, by their names. The directory is created
    if it is missing. Tied tensors are one file with several names; empty tensors have none.

    The file has the size of the array for good. It lives until the registration is closed or this program ends, however
    it ends; descriptors that are still open then fail with ESTALE. The array stays allocated until then.

    The extended attribute ``user.tensor`` has the dtype and the shape of an array, for `gpufs inspect` and
    `gpufs diff`. A file that its owner may not write has none, unless this program is root's.

    Parameters
    ----------
    array
        A torch, CuPy, numba or JAX array on a GPU (anything with ``__cuda_array_interface__`` or DLPack), contiguous;
        on a mount of host memory, an array in shared memory (``multiprocessing.shared_memory``, ``os.memfd_create``).
        Or the address of such memory, or a torch module of such tensors.
    path
        The file to create on the mount, below the directory of the memory's GPU; of a module, the directory.
    size
        The size in bytes, for an address.
    mode
        The permission bits of the file, from which the umask is taken. Read-only arrays cannot be written by any mode.

    Returns
    -------
    Registration or ModuleRegistration
        The registration. Without it, the files stay until the program ends.

    Raises
    ------
    NotOnMount
        ``path`` is not on a gpufs mount.
    DeviceFull, QuotaExceeded
        The memory would exceed a limit, or the device has none for the file's metadata.
    DaemonDied
        The mount's daemon has died.
    OSError
        EEXIST: the file exists. EXDEV: ``path`` is below the directory of another GPU than the memory's. EINVAL: the
        memory cannot be shared; the message says what to change. EPERM, EBUSY: the daemon refuses.
    TypeError, ValueError
        ``array`` is not an array, is empty, or is not contiguous. No file of a module is left then.

    Examples
    --------
    >>> activations = torch.randn(1 << 20, device="cuda")
    >>> with gpufs.register(activations, "/mnt/gpufs/gpu0/act7"):
    ...     subprocess.run(["sha256sum", "/mnt/gpufs/gpu0/act7"])

    >>> with gpufs.register(model, "/mnt/gpufs/gpu0/live"):
    ...     subprocess.run(["gpufs", "inspect", "--nan", "/mnt/gpufs/gpu0/live"])
    """
    if not hasattr(array, "named_parameters"):
        return _register_array(array, os.fspath(path), size, mode)
    if size is not None:
        raise TypeError("size is for addresses: a module's tensors have their own")
    return _register_module(array, os.fspath(path), mode)


# ---- one array ----


def _register_array(array: Any, name: str, size: int | None, mode: int) -> Registration:
    memory = _memory_of(array, size)
    kind = GivenType.of_array(array)
    directory = os.path.dirname(name) or "."
    with as_failure_of_mount(directory):
        st_dev = os.stat(directory).st_dev
        mounts = mounting.places_of(st_dev, directory)

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
    # O_NOATIME: the kernel does not cache the name, which the daemon removes at the end.
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOATIME
    with closed_after(os.open(path, flags, mode)) as file:
        try:
            if kind is not None:
                note_type(file, kind)
            number = connection.register(share, memory.bytes, file)
            return Registration(connection, number, path, memory)
        except BaseException:
            remove_name(file, path, None)
            raise


# ---- all tensors of a module ----


def _register_module(module: Module, directory: str, mode: int) -> ModuleRegistration:
    """Create a file for each parameter and buffer. After a failure there are none."""
    tensors: dict[str, Registration] = {}
    by_tensor: dict[int, Registration] = {}
    with ExitStack() as opened:
        try:
            os.mkdir(directory)
            opened.callback(_remove, directory)
        except FileExistsError:
            pass
        except OSError as error:
            raise failure_of_mount(error, directory) from None
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                if not tensor.numel():
                    continue
                path = os.path.join(directory, name)
                if (tied := by_tensor.get(id(tensor))) is not None:
                    os.link(tied.path, path)
                    tensors[name] = tied
                    continue
                try:
                    one = opened.enter_context(_register_array(tensor, path, None, mode))
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{name}: {error}") from None
                tensors[name] = by_tensor[id(tensor)] = one
        opened = opened.pop_all()
    return ModuleRegistration(directory, tensors, opened)


def _remove(directory: str) -> None:
    with suppress(OSError):  # something else is in it
        os.rmdir(directory)
