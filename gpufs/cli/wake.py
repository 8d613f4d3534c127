"""gpufs wake: files that sleep come back to their devices."""

import click

from gpufs.cli._main import complete_files
from gpufs.cli._parking import each_file
from gpufs.client._daemons import bring_back


@click.command(name="wake")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, shell_complete=complete_files)
def command(paths: tuple[str, ...]) -> None:
    """Bring files that `gpufs sleep` or their programs have put to sleep back to their devices.

    A directory stands for all files below it. Programs that sleep and have called gpufs.when_asked() are asked to
    wake. Where the device is full, the message says how much is missing and which programs use the rest.
    """
    each_file(paths, bring_back, "awake:")
