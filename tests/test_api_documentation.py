"""Every public name of what programs import has a docstring, and the reference can be generated from them."""

import enum
import importlib
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
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


def test_every_public_name_exists() -> None:
    """The reference's page lists every module that programs import."""
    page = (ROOT / "docs/api.md").read_text()
    for name in PUBLIC:
        module = importlib.import_module(name)
        assert f"| `{name}` |" in page
        assert [public for public in public_names(module) if not hasattr(module, public)] == []
