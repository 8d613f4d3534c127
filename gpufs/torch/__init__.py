"""Torch tensors that lie in files of a mount, and safetensors files that are used where they are.

The functions have the names and signatures of ``safetensors`` and ``safetensors.torch``. The tensors they return are
views of the file's memory: nothing is copied, every process that maps the file uses the same memory, and a view keeps
that memory until it is freed. Views are read-only unless ``mode`` is "r+" or "c". torch does not know this: writing to
a read-only view ends the program (SIGSEGV in host memory, a fatal error of the context on a GPU).

:func:`use_in_place` makes the libraries that are built on safetensors do the same. :func:`publish` writes such a file
from tensors that are in device memory already.
"""

from typing import TYPE_CHECKING

from gpufs._naming import lazy
from gpufs.formats import FormatError
from gpufs.in_place import use_in_place
from gpufs.torch._file import load_file, safe_open

if TYPE_CHECKING:
    from gpufs.torch._follow import follow
    from gpufs.torch._load import load
    from gpufs.torch._module import attach_module, load_model
    from gpufs.torch._pool import pool
    from gpufs.torch._publish import Published, publish
    from gpufs.torch._report import Amount, FileReport, LoadReport, last_report
    from gpufs.torch._sleep import sleep, wake

# Names that are loaded on first use: programs that load files in place need none of it.
_MODULES = {
    "_follow": "follow",
    "_load": "load",
    "_module": "attach_module load_model",
    "_pool": "pool",
    "_publish": "Published publish",
    "_report": "Amount FileReport LoadReport last_report",
    "_sleep": "sleep wake",
}

__all__ = [
    "Amount",
    "FileReport",
    "FormatError",
    "LoadReport",
    "Published",
    "attach_module",
    "follow",
    "last_report",
    "load",
    "load_file",
    "load_model",
    "pool",
    "publish",
    "safe_open",
    "sleep",
    "use_in_place",
    "wake",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__ = lazy(globals(), _MODULES)
