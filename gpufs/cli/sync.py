"""gpufs sync: makes a directory the copy of another, and copies only what differs."""

from typing import Any

import click

from gpufs.cli import _copy_options
from gpufs.cli._main import complete_directories


@click.command(name="sync")
@click.argument("source", shell_complete=complete_directories)
@click.argument("destination", metavar="DEST", shell_complete=complete_directories)
@click.option("--delete", is_flag=True, help="First remove from DEST what SOURCE does not have.")
@click.option("-c", "--checksum", is_flag=True, help="Compare contents instead of times.")
@click.option("--include", metavar="GLOB", multiple=True, help="Only files that match this, or another --include.")
@click.option("--exclude", metavar="GLOB", multiple=True, help="Not files and directories that match.")
@click.option("-n", "--dry-run", is_flag=True, help="Change nothing, and print what would be copied and deleted.")
@click.option("-L", "--dereference", is_flag=True, help="Copy the files that symbolic links lead to.")
@click.option("--partial", is_flag=True, help="Copy as much as fits; go on with an incomplete file of a URL.")
@click.option("--inplace", is_flag=True, help="Overwrite files: for a device without space for two versions of one.")
@_copy_options.verify
@_copy_options.fsync
@_copy_options.jobs("copied")
@_copy_options.shell
@_copy_options.remote_gpufs
@_copy_options.verbose
@_copy_options.quiet
@click.option("--json", is_flag=True, help="Print what was copied, and how, as a JSON object.")
@_copy_options.progress
def command(source: str, destination: str, inplace: bool, **options: Any) -> int:
    """Make the directory DEST the copy of the directory SOURCE. Files that have not changed are skipped.

    SOURCE or DEST is on a gpufs mount; the other may be a directory of this machine, a URL, or HOST:PATH. With and
    without a slash at its end SOURCE means what is in it. A file is skipped if its copy has the same size and time, or
    the version that a store names, so the command can run again at any time, and goes on where it was interrupted:

    \b
      gpufs sync --delete s3://models/Qwen3-8B /mnt/gpufs/gpu0/Qwen3-8B

    Modes and times are kept, except with URLs. A file that has changed is replaced by a new one when this is complete:
    programs that have the old one open or attached keep that. --delete comes first, so that the memory it frees can be
    used, and does nothing if SOURCE cannot be read. Exit codes: 0 both are the same, 1 not all was copied, 2 wrong
    options.
    """
    from gpufs.cli._cp_run import CpOptions, run
    from gpufs.copying.entries import kind_of

    kind = kind_of([source, destination])
    if inplace and kind != "file":
        raise click.UsageError("--inplace takes files of this machine alone.", click.get_current_context())
    kept = kind != "url"
    if kept and source and not source.endswith(("/", ":")):
        source = f"{source}/"  # the directory, also by the name of a link to it
    options |= {"recursive": True, "exact": True, "update": True, "preserve": kept, "replace": not inplace}
    return run([source, destination], [], CpOptions(command="sync", **options))
