"""What other programs import to work with a mount.

:func:`copy` moves a file into or out of device memory at the engine's speed: it opens both ends itself, through the
kernel, and passes them to the mount's daemon. :func:`copy_to_each` copies a file to several GPUs. :func:`attach` maps
the memory behind a file into this process, and :func:`register` shows memory of this process as a file. Importing this
starts nothing and loads no driver.
"""

from typing import TYPE_CHECKING

from gpufs.client._connection import Cancellation
from gpufs.client._copy import Copier, copy, copy_to_each
from gpufs.client._outcome import CopyError, CopyProgress, CopyResult

if TYPE_CHECKING:
    from gpufs.client._array import DeviceArray
    from gpufs.client._attach import attach
    from gpufs.client._register import Registration, register

# Loaded when they are first asked for: `gpufs cp` needs none of them.
_MODULES = {
    "DeviceArray": "_array",
    "Registration": "_register",
    "attach": "_attach",
    "register": "_register",
}

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
    "copy_to_each",
    "register",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        from importlib import import_module

        value: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
