"""gpufs wake: files that sleep come back to their devices."""

from collections import Counter

import click

from gpufs.cli._main import complete_files
from gpufs.cli._parking import failed, files_below, report
from gpufs.client._daemons import bring_back


@click.command(name="wake")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, shell_complete=complete_files)
def command(paths: tuple[str, ...]) -> None:
    """Bring files that `gpufs sleep` or their programs have put to sleep back to their devices.

    A directory stands for all files below it. All of the files come back, or none. Programs that sleep and have called
    gpufs.when_asked() are asked to wake, also those that sleep on an older version of a file. Where the device is full,
    the message says how much is missing and which programs use the rest.
    """
    files = files_below(paths)
    try:
        bring_back({file.path: file.status for file in files})
    except OSError as error:
        raise failed(paths, files, error) from None
    changed = [file.parked or file.held for file in files if file.parked != 0]
    report("awake:", changed, +Counter({"awake before": len(files) - len(changed)}))
