"""gpufs cp: copies files into device memory, out of it, and between devices.

This is its help and its complaints about wrong words; `gpufs.cli._copying` does the work, and when the words are right
it is called without coming through here.
"""

from typing import Any

import click

from gpufs.cli._copying import copy
from gpufs.cli._cp_options import OPTIONS
from gpufs.cli._main import complete_files


def _with_options(function: Any) -> Any:
    for option in reversed(OPTIONS):
        if option.choices is None:
            given = click.option(*option.names, is_flag=True, help=option.text)
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
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, shell_complete=complete_files)
@click.argument("destination", metavar="DEST", shell_complete=complete_files)
@_with_options
def command(sources: tuple[str, ...], destination: str, **options: Any) -> int:
    """Copy SOURCE to DEST, or several SOURCEs into the directory DEST, at the engine's speed.

    One side is on a gpufs mount, or both are. The files of the host may be anywhere: they are opened by this command,
    with your rights, and the mount's daemon moves the bytes. An interrupted copy leaves as many bytes as were really
    copied. A progress bar is drawn on a terminal. Exit codes: 0 all copied, 1 not all, 2 wrong options.
    """
    return copy({**options, "names": [*sources, destination]})
