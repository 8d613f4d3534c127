"""gpufs pin: files stay on their device when it is full."""

import os

import click

from gpufs.cli._main import complete_files
from gpufs.cli._parking import change_each
from gpufs.new_file import PINNED


@click.command(name="pin")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, shell_complete=complete_files)
def command(paths: tuple[str, ...]) -> None:
    """Keep files on their device: a mount with --evict does not park them when the device is full.

    A directory stands for the files that are below it now. All of them are pinned, or none. `gpufs unpin` ends that.
    The pin is an extended attribute (user.gpufs-pinned) of the file, which copies with attributes and `gpufs save` take
    along.
    """
    change_each(paths, "pinned:", _pin, lambda path: os.removexattr(path, PINNED))


def _pin(path: str) -> str:
    try:
        os.setxattr(path, PINNED, b"", os.XATTR_CREATE)
    except FileExistsError:
        return "pinned before"
    return ""
