"""gpufs restore: restores what gpufs save has saved, or checks it."""

from typing import Any

import click

from gpufs.cli import _copy_options
from gpufs.cli._main import complete_directories


@click.command(name="restore")
@click.argument("source", metavar="SAVE", shell_complete=complete_directories)
@click.argument("destination", metavar="[MOUNT|DIR]", required=False, shell_complete=complete_directories)
@click.option("--overwrite", is_flag=True, help="Replace files that exist. Without it they are in the way.")
@click.option(
    "--verify/--no-verify",
    default=None,
    help="Without MOUNT|DIR --verify only checks SAVE. Else each file is compared with its checksum before it gets its "
    "name, unless --no-verify is given.",
)
@_copy_options.jobs("restored")
@_copy_options.verbose
@click.option("--json", is_flag=True, help="Print what was restored, and how, as a JSON object.")
@_copy_options.progress
def command(source: str, destination: str | None, verify: bool | None, **options: Any) -> int:
    """Restore a save of `gpufs save` into a mount, or below a directory of one.

    What was in the saved directory is then in DIR, which is created if it does not exist. SAVE/tree/DIR restores that
    directory alone. Nothing is changed if a file of the save is missing, a name is in the way, or the space is too
    small. Each file gets its name when it is complete. A plain user's files are then the user's own. Exit codes: 0 all
    restored, 1 not all, 2 wrong options.
    """
    if destination is None and not verify:
        raise click.UsageError(
            "Missing argument 'MOUNT|DIR' (--verify alone checks SAVE).", click.get_current_context()
        )
    from gpufs.cli._save_run import SaveOptions, opened_save, restore  # help and completions need no client

    with opened_save(source) as save:
        return restore(save, destination, SaveOptions(command="restore", verify=verify is not False, **options)).end()
