"""gpufs save: saves a mount or a directory, so that it outlives the mount."""

from typing import Any

import click

from gpufs import config
from gpufs.cli import _copy_options
from gpufs.cli._main import complete_directories
from gpufs.cli._options import timeout_option


@click.command(name="save")
@click.argument("source", metavar="MOUNT|DIR", shell_complete=complete_directories)
@click.argument("destination", metavar="DEST", shell_complete=complete_directories)
@click.option("--include", metavar="GLOB", multiple=True, help="Save only files that match this, or another --include.")
@click.option("--exclude", metavar="GLOB", multiple=True, help="Leave out files and directories that match.")
@click.option("--verify", is_flag=True, help="Read the save from disk again and compare it with its checksums.")
@_copy_options.jobs("saved")
@_copy_options.verbose
@click.option("--json", is_flag=True, help="Print what was saved as a JSON object.")
@_copy_options.progress
@timeout_option(config.STATUS_TIMEOUT)
def command(source: str, destination: str, timeout: float, **options: Any) -> int:
    """Save the files of a mount, or below a directory of one, as the directory DEST.

    DEST/tree has the files; DEST/manifest.jsonl has their attributes and checksums, and the limits of a mount. `gpufs
    restore` restores them. DEST is replaced if it is a save. It is complete, or as it was before: also if this is
    killed. A file that changes while it is saved ends the save. Exit codes: 0 saved, 1 not saved, 2 wrong options.
    """
    from gpufs.cli._save_run import SaveOptions, save  # help and completions need no client

    return save(source, destination, SaveOptions(command="save", **options), timeout).end()
