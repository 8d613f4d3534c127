"""Prints a page of the reference, made from code.

Usage: generate_reference.py knobs|commands     for docs/knobs.md and docs/commands.md
"""

import re
import sys
from collections.abc import Iterator

import click

from gpufs.cli._main import COMMANDS, program
from gpufs.config import KNOBS


def _knobs() -> Iterator[str]:
    yield "# Knobs\n"
    yield "Written by `make docs` from the table in `gpufs/config/knobs.py`; do not edit.\n"
    yield "Every knob is an option of `gpufs mount`, an environment variable, and by its name a key of the"
    yield 'configuration file: `memory` is `--memory`, `GPUFS_MEMORY` and `memory = "4G"`. In an option the name has'
    yield "`-` for `_`. A value is looked for in this order, and the first hit wins:\n"
    yield "1. the command line,"
    yield "2. the environment,"
    yield "3. the file that `--config` or `GPUFS_CONFIG` names; without that `~/.config/gpufs/config.toml`"
    yield "   (`$XDG_CONFIG_HOME` counts), then `/etc/gpufs.toml`,"
    yield "4. the default.\n"
    yield "The user's file counts only where it and that directory belong to the user who runs the command, or to root:"
    yield "with sudo, HOME may be another user's.\n"
    yield "The files are TOML with the keys at the top level. A value that is not allowed is an error."
    yield "Sizes are bytes, or take K, M, G and T (powers of 1024); times are seconds, or take ms, s, m and h.\n"
    yield "A table with the name of a mountpoint is for that mount alone, and goes before the keys at the top:\n"
    yield '    memory = "4G"\n'
    yield '    ["/mnt/gpufs"]'
    yield '    log_file = "/var/log/gpufs.log"\n'
    for knob in KNOBS:
        if knob.hidden:
            continue
        yield f"## {knob.name}\n"
        yield f"{knob.text}\n"
        # The words "such as ..." are for error messages: the page says above how sizes and times are written.
        allowed = re.sub(r"^(a size|a time) such as [^,]*, [^,]*? or [^,]*, ", r"\1 ", knob.kind.allowed)
        words = "" if allowed == "true or false" else f" Allowed: {allowed}."
        yield f"Default: {knob.describe_default()}.{words}\n"


def _commands() -> Iterator[str]:
    yield "# Commands\n"
    yield "Written by `make docs` from the texts of `gpufs COMMAND --help`, which also show the options; do not edit.\n"
    yield "| Command | What it does |\n|---|---|"
    context = click.Context(program, info_name="gpufs")
    for name in COMMANDS:
        command = program.get_command(context, name)
        assert command is not None
        if not command.hidden:
            usage = " ".join([name, *command.collect_usage_pieces(click.Context(command))]).replace("|", "\\|")
            summary = " ".join((command.help or "").split("\n\n")[0].split())
            yield f"| `gpufs {usage}` | {summary} |"


if __name__ == "__main__":
    print("\n".join({"knobs": _knobs, "commands": _commands}[sys.argv[1]]()).rstrip("\n"))
