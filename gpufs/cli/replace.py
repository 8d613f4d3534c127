"""gpufs replace: a new version of a file, or of a model's directory, takes its place."""

import os

import click

from gpufs.cli._main import complete_files
from gpufs.cli._output import Failure, bytes_text, printable
from gpufs.client._replace import replace
from gpufs.exceptions import text_of
from gpufs.formats import FormatError


@click.command(name="replace")
@click.argument("new", metavar="NEW", shell_complete=complete_files)
@click.argument("file", metavar="FILE", shell_complete=complete_files)
def command(new: str, file: str) -> None:
    """Give the name of FILE to NEW, a complete new version of it on the same device, in one step.

    FILE may be the directory of a model of safetensors files. The two directories are exchanged then: NEW is the
    version before, which you may remove, or bring back by the same command. What follows holds for each of its files.

    Both must have the same layout: the same size, and for files whose tensors gpufs finds (safetensors, GGUF, npy, npz,
    torch.save) the same names, types, shapes and offsets. Metadata may differ. NEW gets FILE's mode, access
    control list and pin, and its owner if you may set that.

    Programs that follow FILE (gpufs.torch.follow(), gpufs.follow()) take over NEW at their next safe point, at the same
    addresses. Others keep the memory of the old version until they end or release it.
    """
    try:
        replace(new, file)
    except OSError as error:
        raise Failure(f"{os.fsdecode(error.filename or file)}: {text_of(error)}") from None
    except FormatError as error:
        raise Failure(str(error)) from None
    after = f"{printable(new)} is the version before" if os.path.isdir(file) else bytes_text(os.stat(file).st_size)
    print(f"replaced: {printable(file)}, {after}")
