"""What README and docs name exists: files, commands, options, knobs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from gpufs import config
from gpufs.cli._main import COMMANDS, program

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What a page may name that the repository does not have: it is made, or stands somewhere else.
_MADE = ("build/", "/", "~", ".venv", "mnt/", "bench/results/")
# Up to where a command ends: a quote, a comment, the next command.
_SHOWN = rf"\bgpufs ({'|'.join(COMMANDS)})(?![\w-])([^`\n;|&#]*)"
_FOLDERS = ("gpufs/", "native/", "tests/", "docs/", "examples/", "scripts/", "mount_helpers/", "bench/")


def options_of(command: str) -> set[str]:
    context = click.Context(program)
    found = program.get_command(context, command)
    assert found is not None
    parts = [found, *found.commands.values()] if isinstance(found, click.Group) else [found]
    parameters = [parameter for part in parts for parameter in part.params]
    words = {word for parameter in parameters for word in (*parameter.opts, *parameter.secondary_opts)}
    return {word for word in words if word.startswith("-")} | {"-h", "--help"}


def page_id(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_that_are_named_exist(page: Path) -> None:
    for word in re.findall(r"`([\w./*-]+)`", page.read_text()):
        if word.startswith(_FOLDERS) and not word.startswith(_MADE):
            assert list(ROOT.glob(word.rstrip("/"))), word


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_and_options_that_are_shown_exist(page: Path) -> None:
    for command, rest in re.findall(_SHOWN, page.read_text()):
        known = options_of(command)
        for word in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", re.split(r"\s{3,}", rest)[0]):  # before a remark
            assert word in known, f"gpufs {command} has no {word}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_variables_that_are_named_exist(page: Path) -> None:
    known = {knob.variable for knob in config.KNOBS} | {config.CONFIG_VARIABLE}
    if page.name not in ("protocol.md", "offline.md"):
        assert set(re.findall(r"\bGPUFS_[A-Z_]+\b", page.read_text())) <= known


def test_every_command_is_in_the_table() -> None:
    rows = re.findall(r"^\| `gpufs ([a-z-]+)", (ROOT / "README.md").read_text(), re.M)
    hidden = {name for name in COMMANDS if getattr(program.get_command(click.Context(program), name), "hidden", False)}
    assert sorted(rows) == sorted(set(COMMANDS) - hidden)


def test_every_target_of_make_is_explained() -> None:
    makefile = (ROOT / "Makefile").read_text()
    head, _, rest = makefile.partition(".DEFAULT_GOAL")
    phony = re.search(r"^\.PHONY: (.*)$", rest, re.M)
    assert phony is not None
    for target in phony[1].split():
        assert re.search(rf"^{target}:", rest, re.M), target
        if target not in ("setup", "uninstall-helpers"):
            assert re.search(rf"\b(?:make )?{target}\b", head), target
    for target in re.findall(r"`make ([a-z-]+)`", (ROOT / "README.md").read_text()):
        assert target in phony[1].split(), target


def test_the_gpu_benchmark_shows_its_options_without_a_gpu() -> None:
    command = [str(ROOT / "scripts/bench-gpu"), "--help"]
    done = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--no-cold" in done.stdout
