"""gpufs unpin: files may leave their device again when it is full."""

import errno
import os

import click

from gpufs.cli._files import held_bytes
from gpufs.cli._main import complete_files
from gpufs.cli._parking import each_file
from gpufs.new_file import PINNED


@click.command(name="unpin")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, shell_complete=complete_files)
def command(paths: tuple[str, ...]) -> None:
    """End what `gpufs pin` began, for files or all files below directories."""
    each_file(paths, _unpin, "unpinned:")


def _unpin(path: str, status: os.stat_result, _: int | None) -> int | str:
    try:
        os.removexattr(path, PINNED)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        return "not pinned"
    return held_bytes(status)
