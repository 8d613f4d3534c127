"""gpufs wake: files that sleep come back to their devices."""

import os

import click

from gpufs.cli._files import held_bytes
from gpufs.cli._main import complete_files
from gpufs.cli._parking import each_file
from gpufs.client._daemons import bring_back


@click.command(name="wake")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, shell_complete=complete_files)
def command(paths: tuple[str, ...]) -> None:
    """Bring files that `gpufs sleep` or their programs have put to sleep back to their devices.

    A directory stands for all files below it. Programs that sleep and have called gpufs.when_asked() are asked to
    wake, also those that sleep on an older version of the file. Where the device is full, the message says how much is
    missing and which programs use the rest.
    """
    each_file(paths, _wake, "awake:")


def _wake(path: str, status: os.stat_result, before: int | None) -> int | str:
    bring_back(path)
    if before == 0:
        return "awake before"
    return before or held_bytes(status)
