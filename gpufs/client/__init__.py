"""What other programs import to work with a mount.

:func:`copy` moves a file into or out of device memory at the engine's speed: it opens both ends itself, through the
kernel, and hands them to the mount's daemon. :func:`attach` maps the memory behind a file into this process, and
:func:`register` shows memory of this process as a file. Importing this starts nothing and loads no driver.
"""

from gpufs.client._array import DeviceArray
from gpufs.client._attach import attach
from gpufs.client._connection import Cancellation
from gpufs.client._copy import Copier, copy
from gpufs.client._outcome import CopyError, CopyProgress, CopyResult
from gpufs.client._register import Registration, register

__all__ = [
    "Cancellation",
    "Copier",
    "CopyError",
    "CopyProgress",
    "CopyResult",
    "DeviceArray",
    "Registration",
    "attach",
    "copy",
    "register",
]
