"""Shows memory of this program as files on a mount: register()."""

from __future__ import annotations

import os
from typing import Any, overload

from gpufs._naming import named_in
from gpufs.client._register import Registration, register_array
from gpufs.client._register_module import Module, ModuleRegistration, register_module


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
        return register_array(array, os.fspath(path), size, mode)
    if size is not None:
        raise TypeError("size is for addresses: a module's tensors have their own")
    return register_module(array, os.fspath(path), mode)
