"""gpufs unpin: files may leave their device again when it is full."""

import errno
import os

import click

from gpufs.cli._main import complete_files
from gpufs.cli._parking import change_each
from gpufs.new_file import PINNED


@click.command(name="unpin")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, shell_complete=complete_files)
def command(paths: tuple[str, ...]) -> None:
    """End what `gpufs pin` began, for files or all files below directories: for all of them, or none."""
    change_each(paths, "unpinned:", _unpin, lambda path: os.setxattr(path, PINNED, b""))


def _unpin(path: str) -> str:
    try:
        os.removexattr(path, PINNED)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        return "not pinned"
    return ""
