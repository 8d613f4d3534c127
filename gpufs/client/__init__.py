"""The package that programs import to copy into and out of a mount.

:func:`copy` moves a file into or out of device memory at the engine's speed: it opens both ends itself, through the
kernel, and passes them to the mount's daemon. :func:`copy_files` copies many files, also to several GPUs,
:func:`copy_tree` a directory. :mod:`gpufs` has the functions that map the memory behind a file, and
that show memory as a file: `gpufs cp` does not load them. Importing this starts nothing and loads no driver.
"""

from typing import TYPE_CHECKING

from gpufs._naming import lazy

if TYPE_CHECKING:
    from gpufs.client._cancellation import Cancellation
    from gpufs.copying.calls import Copier, copy, copy_files, copy_tree
    from gpufs.copying.types import CopyError, CopyProgress, CopyResult

# A module whose name begins with a dot is beside this package.
_MODULES = {
    ".copying.calls": "Copier copy copy_files copy_tree",
    ".copying.types": "CopyError CopyProgress CopyResult",
    "_cancellation": "Cancellation",
}

__all__ = [
    "Cancellation",
    "Copier",
    "CopyError",
    "CopyProgress",
    "CopyResult",
    "copy",
    "copy_files",
    "copy_tree",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__ = lazy(globals(), _MODULES)
