"""Writes the manual page gpufs(1) from the texts that `gpufs --help` shows. Usage: generate_manual.py [OUTPUT]"""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from gpufs import __version__
from gpufs.cli._main import COMMANDS, program


def _escape(text: str) -> str:
    """Plain text as roff: no line of it is taken for a request."""
    text = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text.startswith((".", "'")) else text


def _paragraphs(text: str) -> Iterator[str]:
    for index, paragraph in enumerate(text.strip().split("\n\n")):
        if index:
            yield ".PP"
        yield _escape(paragraph)


def _options(command: click.Command, ctx: click.Context) -> Iterator[str]:
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record:
            yield ".TP"
            yield f"\\fB{_escape(record[0])}\\fR"
            yield _escape(record[1])


def manual() -> str:
    """The page, in the man macros of roff."""
    root = click.Context(program, info_name="gpufs")
    lines = [
        f'.TH GPUFS 1 "" "gpufs {__version__}" "User Commands"',
        ".SH NAME",
        "gpufs \\- GPU memory as files",
        ".SH SYNOPSIS",
        ".B gpufs",
        "\\fICOMMAND\\fR [\\fIOPTION\\fR]... [\\fIARGUMENT\\fR]...",
        ".SH DESCRIPTION",
        *_paragraphs(program.help or ""),
        ".SH COMMANDS",
    ]
    for name in COMMANDS:
        command = program.get_command(root, name)
        assert command is not None
        if command.hidden:
            continue
        ctx = click.Context(command, info_name=name, parent=root)
        lines.append(f".SS gpufs {_escape(name)} {_escape(' '.join(command.collect_usage_pieces(ctx)))}")
        lines.extend(_paragraphs(command.help or ""))
        lines.extend(_options(command, ctx))
    lines += [
        ".SH FILES",
        ".TP",
        "\\fB~/.config/gpufs/config.toml\\fR, \\fB/etc/gpufs.toml\\fR",
        _escape('Every option as a key: memory = "4G". The command line and the environment go before them.'),
        ".TP",
        "\\fB/etc/fstab\\fR",
        _escape("gpufs  /mnt/gpufs  gpufs  memory=4G,allow_other,nofail  0  0"),
        ".SH SEE ALSO",
        "mount(8), fusermount3(1), fuse(4)",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(manual(), encoding="utf-8")
    else:
        print(manual(), end="")
