"""The commands and programs that pages of docs/ show, and a shell that runs them on a mount."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path

import click

from gpufs.cli._main import program
from support.mounting import REPOSITORY
from support.processes import run

DOCS = REPOSITORY / "docs"
PROGRAMS = "gpufs|df|ls|mkdir|cat|cp|dd|mv|xxd|sha256sum|cmp|printf"
MNT = "/mnt/gpufs"
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def blocks(page: str) -> list[str]:
    """The indented blocks of a page, also those in lists."""
    found = re.findall(r"(?:^(?: {4,}\S.*)?\n)+", (DOCS / page).read_text(), re.M)
    return [textwrap.dedent(text).strip("\n") + "\n" for text in found if text.strip()]


def commands(page: str) -> list[str]:
    """The lines of a page that are commands for a shell, without the remarks behind them."""
    lines = [line.strip().removeprefix("$ ") for text in blocks(page) for line in text.splitlines()]
    return [re.split(" {3,}", line)[0] for line in lines if re.match(rf"(?:{PROGRAMS}) ", line)]


def block(page: str, containing: str) -> str:
    """The block of a page that has this text."""
    (found,) = [text for text in blocks(page) if containing in text]
    return found


class Shell:
    """Runs a page's commands where the page says /mnt/gpufs, and keeps what they print."""

    def __init__(self, mountpoint: Path, directory: Path, **names: str) -> None:
        self.names = {MNT: str(mountpoint), "/data/": f"{directory}/", **names}
        self.directory = directory

    def here(self, text: str) -> str:
        for name, real in self.names.items():
            text = text.replace(name, real)
        return text

    def __call__(self, command: str) -> str:
        return run("bash", "-euc", self.here(command), cwd=self.directory, env=ENVIRONMENT).stdout


def options_of(command: str) -> set[str]:
    context = click.Context(program)
    found = program.get_command(context, command)
    assert found is not None
    parts = [found, *found.commands.values()] if isinstance(found, click.Group) else [found]
    parameters = [parameter for part in parts for parameter in part.params]
    words = {word for parameter in parameters for word in (*parameter.opts, *parameter.secondary_opts)}
    return {word for word in words if word.startswith("-")} | {"-h", "--help"}
