"""gpufs: GPU memory as files.

Importing this package starts nothing: no thread, no socket, no device driver. What programs use is loaded when it is
first asked for, also the packages :mod:`gpufs.torch` and :mod:`gpufs.engine`. A device's driver is opened with an
:class:`gpufs.engine.Engine`.
"""

import importlib
from typing import TYPE_CHECKING

from gpufs._naming import lazy
from gpufs._version import __version__

if TYPE_CHECKING:
    from gpufs import client as client
    from gpufs import config as config
    from gpufs import engine as engine
    from gpufs import statistics as statistics
    from gpufs import torch as torch
    from gpufs.client import (
        Cancellation,
        CopyError,
        CopyProgress,
        CopyResult,
        copy,
        copy_files,
        copy_tree,
    )
    from gpufs.client._array import DeviceArray
    from gpufs.client._attach import attach
    from gpufs.client._attach_many import attach_many
    from gpufs.client._create import create
    from gpufs.client._follow import Follower, follow
    from gpufs.client._register import ModuleRegistration, Registration, register
    from gpufs.client._replace import replace
    from gpufs.client._sleep import sleep, wake, when_asked
    from gpufs.exceptions import DaemonDied, DeviceFull, NotOnMount, QuotaExceeded
    from gpufs.owned_mount import DeviceDirectory, OwnedMount, mount
    from gpufs.reports import DeviceStatus, MountStatus, mounts, status

# The names that each module has.
_MODULES = {
    "client": "Cancellation CopyError CopyProgress CopyResult copy copy_files copy_tree",
    "client._array": "DeviceArray",
    "client._attach": "attach",
    "client._attach_many": "attach_many",
    "client._create": "create",
    "client._follow": "Follower follow",
    "client._register": "ModuleRegistration Registration register",
    "client._replace": "replace",
    "client._sleep": "sleep wake when_asked",
    "exceptions": "DaemonDied DeviceFull NotOnMount QuotaExceeded",
    "owned_mount": "DeviceDirectory OwnedMount mount",
    "reports": "DeviceStatus MountStatus mounts status",
}

# The modules that `gpufs.torch` and the like import.
_PACKAGES = ("client", "config", "engine", "statistics", "torch")

__all__ = [
    "Cancellation",
    "CopyError",
    "CopyProgress",
    "CopyResult",
    "DaemonDied",
    "DeviceArray",
    "DeviceDirectory",
    "DeviceFull",
    "DeviceStatus",
    "Follower",
    "ModuleRegistration",
    "MountStatus",
    "NotOnMount",
    "OwnedMount",
    "QuotaExceeded",
    "Registration",
    "__version__",
    "attach",
    "attach_many",
    "copy",
    "copy_files",
    "copy_tree",
    "create",
    "follow",
    "mount",
    "mounts",
    "register",
    "replace",
    "sleep",
    "status",
    "wake",
    "when_asked",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    _load = lazy(globals(), _MODULES)

    def __getattr__(name):
        if name in _PACKAGES:
            try:
                return importlib.import_module(f"gpufs.{name}")
            except ModuleNotFoundError as error:
                if error.name != name:
                    raise
                # hasattr() and inspect.getmembers() go on then.
                raise AttributeError(f"gpufs.{name} needs {name}, which is not installed") from error
        return _load(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])
