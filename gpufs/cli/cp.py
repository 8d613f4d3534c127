"""gpufs cp: copies files into device memory, out of it, and between devices.

This is its help and its complaints about wrong words; `gpufs.cli._copying` does the work, and when the words are right
it is called without coming through here.
"""

from typing import Any

import click

from gpufs.cli._copying import copy
from gpufs.cli._cp_options import OPTIONS
from gpufs.cli._main import complete_directories, complete_files


def _with_options(function: Any) -> Any:
    for option in reversed(OPTIONS):
        if option.is_flag and option.value is True:
            given = click.option(*option.names, is_flag=True, help=option.text, hidden=bool(option.refused))
        elif option.is_flag:
            given = click.option(*option.names, option.name, flag_value=option.value, default=None, help=option.text)
        elif option.choices is None:
            given = click.option(
                *option.names, metavar=option.metavar, help=option.text, shell_complete=complete_directories
            )
        else:
            choice = click.Choice(option.choices)
            given = click.option(
                *option.names,
                type=choice,
                metavar=option.metavar,
                default=option.default,
                show_default=True,
                help=option.text,
            )
        function = given(function)
    return function


@click.command(name="cp")
@click.argument("names", metavar="SOURCE... DEST", nargs=-1, required=True, shell_complete=complete_files)
@_with_options
def command(names: tuple[str, ...], **options: Any) -> int:
    """Copy SOURCE to DEST, or several SOURCEs into the directory DEST, at the engine's speed.

    One side is on a gpufs mount, or both are. The files of the host may be anywhere: they are opened by this command,
    with your rights, and the mount's daemon moves the bytes. An interrupted copy leaves as many bytes as were really
    copied. A progress bar is drawn on a terminal. Exit codes: 0 all copied, 1 not all, 2 wrong options.
    """
    if len(names) == 1 and options["target_directory"] is None:
        raise click.UsageError("Missing argument 'DEST'.", click.get_current_context())
    return copy({**options, "names": list(names)})
