"""What `gpufs inspect` and `gpufs diff` have in common on the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from gpufs.formats.layout import TensorPlace

# Formats whose tensors are read; see gpufs.formats.layout and gpufs.formats.typed.
READ_FORMATS: Final = ("safetensors", "npy", "npz", "GGUF", "torch.save", "raw")


def type_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that give the type of files without a header."""
    shape = click.option("--shape", metavar="NxM", help="Shape of the elements, with --dtype, for example 256x128.")
    dtype = click.option("--dtype", metavar="TYPE", help="The file is elements of this type alone, such as float32.")
    return dtype(shape(command))


def shape_text(place: TensorPlace) -> str:
    """The shape as a user reads it."""
    return ("x".join(map(str, place.shape)) or "scalar") + (" fortran" if place.fortran_order else "")
