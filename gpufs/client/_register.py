"""Shows memory of this program as a file on a mount: register() and the registrations it returns."""

from __future__ import annotations

import errno
import json
import os
import threading
from types import TracebackType
from typing import Any, Final, Self

from gpufs import mounting, protocol
from gpufs.client import _find
from gpufs.client._array_memory import ArrayMemory, memory_of
from gpufs.client._connection import Connection, IdleError
from gpufs.client._gpu_memory import share_gpu_memory
from gpufs.client._shared_memory import Share, share_host_memory

_STATUS: Final = ".gpufs/status"
_MOST_IDS: Final = (1 << 32) - 1


class Registration:
    """Memory of this program that is a file until :meth:`close`, or until the program ends.

    Attributes
    ----------
    path
        The file, as it was given to :func:`register`. It may have been renamed since.
    nbytes
        Its size in bytes.
    """

    def __init__(self, link: _Link, number: int, path: str, memory: ArrayMemory) -> None:
        self.path = path
        self.nbytes = memory.size
        self._link = link
        self._number = number
        self._memory: ArrayMemory | None = memory  # kept allocated

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
        if self._memory is not None and self._link.unregister(self._number, self.path):
            self._memory = None

    def __repr__(self) -> str:
        return f"<gpufs.Registration {self.path} ({self.nbytes} bytes{', closed' if self.closed else ''})>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Link:
    """The connection to one mount's daemon that keeps this process's registrations there."""

    def __init__(self, connection: Connection, driver: str) -> None:
        self.driver = driver
        self._connection = connection
        self._lock = threading.Lock()  # one request at a time; guards all below
        self._next = 1
        self._pid = os.getpid()
        self._registrations: dict[int, Registration] = {}  # keeps the arrays allocated until close()

    def ended(self) -> bool:
        return self._connection.ended()

    def close(self) -> None:
        """Also in a forked child, where the connection must not outlive the parent."""
        self._connection.close()

    def register(self, file: int, share: Share, path: str, memory: ArrayMemory) -> Registration:
        with self._lock:
            number = self._next
            self._next = self._next % _MOST_IDS + 1
            request = protocol.Register(
                number,
                share.kind,
                share.offset,
                memory.size,
                share.writable,
                share.whole,
                share.pci_address,
                share.handle,
            )
            descriptors = [file] if share.fd < 0 else [file, share.fd]
            try:
                answer = self._connection.request(request, descriptors, protocol.Registered)
            except BaseException as failure:
                if not isinstance(failure, OSError):  # interrupted: the daemon may have registered it
                    self._connection.send(protocol.Unregister(number))
                raise
            if answer.error:
                raise OSError(answer.error, answer.message)
            registration = Registration(self, number, path, memory)
            self._registrations[number] = registration
            return registration

    def unregister(self, number: int, path: str) -> bool:
        """True once the daemon does not use the memory any more."""
        if os.getpid() != self._pid:
            return False  # a forked child: the registration is its parent's
        with self._lock:
            try:
                answer = self._connection.request(protocol.Unregister(number), [], protocol.Unregistered)
            except OSError:
                self._registrations.pop(number, None)  # the daemon has ended, and with it what it had of us
                return True
            if answer.error == errno.ETIMEDOUT:
                raise OSError(answer.error, answer.message, path)
            self._registrations.pop(number, None)
            return True


_lock = threading.Lock()  # guards _links
_links: dict[int, _Link] = {}  # by the st_dev of the mount


def register(array: Any, path: str | os.PathLike[str], *, size: int | None = None, mode: int = 0o600) -> Registration:
    """Show memory of this program as a file, which any tool can read, and write if its mode allows.

    The file has the size of the array for good. It lives until the registration is closed or this program ends, however
    it ends; descriptors that are still open then fail with ESTALE. The array stays allocated until then.

    Parameters
    ----------
    array
        A torch, CuPy, numba or JAX array on a GPU (anything with ``__cuda_array_interface__`` or DLPack), contiguous;
        on a mount of host memory, an array in shared memory (``multiprocessing.shared_memory``, ``os.memfd_create``).
        Or the address of such memory.
    path
        The file to create on the mount, below the directory of the memory's GPU.
    size
        The size in bytes, for an address.
    mode
        The permission bits of the file, from which the umask is taken. Read-only arrays cannot be written by any mode.

    Returns
    -------
    Registration
        The registration. Without it, the file stays until the program ends.

    Raises
    ------
    OSError
        EEXIST: the file exists. EXDEV: ``path`` is not on a gpufs mount, or below the directory of another GPU.
        EINVAL: the memory cannot be shared; the message says what to change. EPERM, EBUSY: the daemon refuses.
    TypeError, ValueError
        ``array`` is not an array, is empty, or is not contiguous.

    Examples
    --------
    >>> activations = torch.randn(1 << 20, device="cuda")
    >>> with gpufs.register(activations, "/mnt/gpufs/gpu0/act7"):
    ...     subprocess.run(["sha256sum", "/mnt/gpufs/gpu0/act7"])
    """
    memory = memory_of(array, size)
    name = os.fspath(path)
    directory = os.path.dirname(name) or "."
    device = os.stat(directory).st_dev
    mounts = _find.mounts_by_device().get(device)
    if mounts is None:
        raise OSError(errno.EXDEV, "is not on a gpufs mount", directory)
    try:
        try:
            return _register(device, mounts, name, mode, memory)
        except IdleError:  # the daemon has just ended a connection without registrations
            return _register(device, mounts, name, mode, memory)
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, name) from None
        raise


def _register(
    device: int, mounts: list[mounting.MountEntry], path: str, mode: int, memory: ArrayMemory
) -> Registration:
    link = _link(device, mounts)
    share = _share(memory, link.driver)
    try:
        return _create(link, share, path, mode, memory)
    finally:
        share.close()


def _share(memory: ArrayMemory, driver: str) -> Share:
    if driver == "host":
        if memory.on_device:
            raise OSError(errno.EINVAL, "the array is on a GPU, and this is a mount of host memory")
        return share_host_memory(memory.address, memory.size, writable=memory.writable)
    if memory.on_device is False:
        raise OSError(errno.EINVAL, "the array is in memory of the host, and this is a mount of GPUs")
    return share_gpu_memory(driver, memory.address, memory.size, writable=memory.writable)


def _create(link: _Link, share: Share, path: str, mode: int, memory: ArrayMemory) -> Registration:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        try:
            return link.register(file, share, path, memory)
        except BaseException:
            if os.path.samestat(os.fstat(file), os.lstat(path)):
                os.unlink(path)
            raise
    finally:
        os.close(file)


def _link(device: int, mounts: list[mounting.MountEntry]) -> _Link:
    with _lock:
        link = _links.get(device)
        if link is not None and link.ended():
            link.close()
            link = None
        if link is None:
            with open(os.path.join(mounts[0].mountpoint, _STATUS)) as file:
                driver = json.load(file)["driver"]
            link = _links[device] = _Link(Connection(_find.connect(device, mounts)), driver)
        return link


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for link in _links.values():
        link.close()
    _links.clear()


os.register_at_fork(after_in_child=_after_fork)
