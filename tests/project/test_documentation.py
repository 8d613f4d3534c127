"""What README and docs name exists, and every public name of what programs import has a docstring."""

from __future__ import annotations

import enum
import importlib
import inspect
import os
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.pages import options_of

import gpufs
from gpufs import config, modes
from gpufs.cli._main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What a page may name that the repository does not have: it is made, or stands somewhere else.
_MADE = ("build/", "/", "~", ".venv", "mnt/", "bench/results/")
# Up to where a command ends: a quote, a comment, the next command.
_SHOWN = rf"\bgpufs ({'|'.join(COMMANDS)})(?![\w-])([^`\n;|&#]*)"
_FOLDERS = ("gpufs/", "native/", "tests/", "docs/", "examples/", "scripts/", "mount_helpers/", "bench/")


def page_id(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").rglob("*.svg")), ids=page_id)
def test_pictures_have_a_dark_and_a_light_look(picture: Path) -> None:
    text = picture.read_text()
    ElementTree.fromstring(text)
    assert "prefers-color-scheme" in text, "bench/looks.py adds it"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_that_are_named_exist(page: Path) -> None:
    for word in re.findall(r"`([\w./*-]+)`", page.read_text()):
        if word.startswith(_FOLDERS) and not word.startswith(_MADE):
            assert list(ROOT.glob(word.rstrip("/"))), word


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_and_options_that_are_shown_exist(page: Path) -> None:
    for command, rest in re.findall(_SHOWN, page.read_text()):
        known = options_of(command)
        words = re.split(r"\s{3,}", rest)[0]  # before a remark
        if command == "run":
            words = words.partition(" python")[0]  # what follows is for the program
        for word in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", words):
            bundle = not word.startswith("--") and {f"-{letter}" for letter in word[1:]} <= known  # as in -rL
            assert word in known or bundle, f"gpufs {command} has no {word}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_variables_that_are_named_exist(page: Path) -> None:
    known = {knob.variable for knob in config.KNOBS} | {
        config.CONFIG_VARIABLE,
        modes.IN_PLACE_VARIABLE,
        modes.REPORT_VARIABLE,
    }
    if page.name not in ("protocol.md", "offline.md"):
        assert set(re.findall(r"\bGPUFS_[A-Z_]+\b", page.read_text())) <= known


def test_readers_type_no_placeholders() -> None:
    """Until the project has an address, lines that a reader would type work in a checkout."""
    for file in (*PAGES, ROOT / "CHANGELOG.md", ROOT / "pyproject.toml"):
        assert not re.search(r"\bexample\.(?:org|com|net)/", file.read_text()), file


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_pages_name_no_package_index_for_gpufs() -> None:
    """Until gpufs is published nothing on an index has its name, and anybody could take it."""
    for file in (*PAGES, *sorted((ROOT / "gpufs").rglob("*.py"))):
        assert not re.search(r"pip install ['\"]?gpufs(?!-)\b", file.read_text()), file


def test_the_table_for_contributors_has_every_command() -> None:
    shown = re.findall(r"^\| (.*?) \| .*tests/", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    for name in COMMANDS:
        assert name == "mount-helper" or re.search(rf"`(?:gpufs )?{name}`", " ".join(shown)), name


def test_every_target_of_make_is_explained() -> None:
    makefile = (ROOT / "Makefile").read_text()
    head, _, rest = makefile.partition(".DEFAULT_GOAL")
    phony = re.search(r"^\.PHONY: (.*)$", rest, re.M)
    assert phony is not None
    for target in phony[1].split():
        assert re.search(rf"^{target}:", rest, re.M), target
        if target not in ("setup", "uninstall-helpers"):
            assert re.search(rf"\b(?:make )?{target}\b", head), target
    for page in PAGES:
        for target in re.findall(r"`make ([a-z-]+)`", page.read_text()):
            assert target in phony[1].split(), target


def test_the_gpu_benchmark_shows_its_options_without_a_gpu() -> None:
    command = [str(ROOT / "scripts/bench-gpu"), "--help"]
    done = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--no-cold" in done.stdout


SCRIPT = (ROOT / "scripts/docs").read_text()
MODULES = re.search(r"modules=\((.*)\)", SCRIPT)
assert MODULES is not None
PUBLIC = MODULES[1].split()


def public_names(module: types.ModuleType) -> list[str]:
    names: list[str] | None = getattr(module, "__all__", None)
    if names is not None:
        return names
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return [name for name in own if not name.startswith("_")]


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class of ours defines itself."""
    for name, value in vars(kind).items():
        if name.startswith("_") or isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)):
            continue
        if isinstance(value, (property, staticmethod, classmethod)) or inspect.isfunction(value):
            yield name, value


def documented(value: Any) -> bool:
    """Whether it has its own text: a dataclass without one shows its signature."""
    text = value.__doc__ if isinstance(value, type) else inspect.getdoc(value)  # not that of a base class
    if not text:
        return False
    return not (isinstance(value, type) and text.startswith(f"{value.__name__}("))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert f"| `{name}` |" in (ROOT / "docs/api.md").read_text()
    bare = [] if documented(module) else [name]
    names = public_names(module)
    assert names
    for public in names:
        value = getattr(module, public)
        if isinstance(value, type):
            if not documented(value):
                bare.append(f"{name}.{public}")
            if value.__module__.startswith("gpufs") and not issubclass(value, enum.Enum):
                bare += [f"{name}.{public}.{member}" for member, what in members(value) if not documented(what)]
        elif callable(value) and not documented(value):
            bare.append(f"{name}.{public}")
    assert not bare


@pytest.mark.parametrize("name", ["gpufs", "gpufs.torch", "gpufs.client", "gpufs.engine"])
def test_docstrings_say_what_goes_in_and_out(name: str) -> None:
    """The sections of NumPy's form, for what programs use most."""
    module = importlib.import_module(name)
    missing = []
    for public in public_names(module):
        value = getattr(module, public)
        if not callable(value) or getattr(value, "_is_protocol", False):
            continue
        if isinstance(value, type) and "__init__" not in vars(value):
            continue
        text = inspect.getdoc(value) or ""
        signature = inspect.signature(value)
        names = [parameter for parameter in signature.parameters if parameter != "self"]
        described = "Parameters\n---" in text or (isinstance(value, type) and "Attributes\n---" in text)
        if names and not described:
            missing.append(f"{public}: Parameters")
        if inspect.isfunction(value) and str(signature.return_annotation) != "None" and "Returns\n---" not in text:
            missing.append(f"{public}: Returns")
    assert not missing


@pytest.mark.parametrize("name", ["gpufs", "gpufs.torch", "gpufs.client"])
def test_types_of_fields_are_known_under_the_public_name(name: str) -> None:
    """Libraries that check or convert the fields of a dataclass look them up there."""
    module = importlib.import_module(name)
    for public in public_names(module):
        value = getattr(module, public)
        if isinstance(value, type):
            assert value.__module__ in ("gpufs", name), public
            typing.get_type_hints(value)


def test_a_missing_torch_is_a_missing_attribute() -> None:
    text = """
import sys
sys.modules["torch"] = None
import gpufs, inspect
print(hasattr(gpufs, "torch"), "attach" in dict(inspect.getmembers(gpufs)))
try:
    gpufs.torch
except AttributeError as error:
    print("not installed" in str(error), type(error.__cause__).__name__)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines() == ["False True", "True ModuleNotFoundError"]


def test_public_objects_have_the_names_that_programs_know() -> None:
    """Also before a program has asked for them: a failed copy raises a gpufs.CopyError."""
    text = """
import gpufs
try:
    gpufs.copy("/nowhere/a", "/nowhere/b")
except OSError as error:
    print(type(error).__module__)
print({"attach", "torch", "engine"} <= set(dir(gpufs)), [name for name in dir(gpufs) if name.startswith("_")])
print(gpufs.engine.Engine, gpufs.DeviceArray)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT, check=True)
    lines = done.stdout.splitlines()
    assert lines == [
        "gpufs",
        "True ['__version__']",
        "<class 'gpufs.engine.Engine'> <class 'gpufs.DeviceArray'>",
    ]


def test_unknown_names_are_errors_for_a_type_checker_too() -> None:
    """mypy reports a comment that is not needed: so it fails where it takes any name."""
    asked: tuple[Callable[[], object], ...] = (
        lambda: gpufs.nope,  # type: ignore[attr-defined]
        lambda: gpufs.client.nope,  # type: ignore[attr-defined]
        lambda: gpufs.config.nope,  # type: ignore[attr-defined]
        lambda: gpufs.torch.nope,  # type: ignore[attr-defined]
    )
    for ask in asked:
        with pytest.raises(AttributeError):
            ask()
