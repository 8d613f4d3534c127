"""The real sources of model servers, imported without what they need: all other modules are replaced by stand-ins."""

from __future__ import annotations

import importlib.abc
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


def download_wheel(requirement: str, folder: Path) -> Path:
    """Downloads and unpacks a wheel once; returns the folder of its packages."""
    unpacked = folder / requirement
    if not (unpacked / "complete").exists():
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:", requirement]
        subprocess.run([*command, "--dest", str(folder)], check=True, timeout=1800)
        (wheel,) = folder.glob(requirement.replace("==", "-") + "-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked, [name for name in archive.namelist() if name.endswith(".py")])
        (unpacked / "complete").touch()
    return unpacked


class _AnythingType(type):
    """A class that can stand for whatever a module imports: it can be called, subscripted and inherited from."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnythingType(name, (), {})

    def __getitem__(cls, key: object) -> _AnythingType:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__

    def __bool__(cls) -> bool:
        return False

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        # As a decorator it changes nothing.
        is_decorator = len(arguments) == 1 and not named and isinstance(arguments[0], (FunctionType, type))
        return arguments[0] if is_decorator else _AnythingType(cls.__name__, (), {})


class _StandInLoader(importlib.abc.Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
        module.__getattr__ = lambda name: getattr(_AnythingType(module.__name__, (), {}), name)  # type: ignore[method-assign]


class SourceFinder(importlib.abc.MetaPathFinder):
    """Imports the named modules from a folder, and stand-ins for all others that are not installed.

    missing: other packages that may be replaced; a name that is not among them fails as usual.
    """

    def __init__(self, folder: Path, package: str, modules: Sequence[str], missing: Sequence[str]) -> None:
        self._folder = folder
        self._package = package
        self._modules = modules
        self._missing = missing

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name in self._modules:
            file = self._folder.joinpath(*name.split("."))
            file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        if name.partition(".")[0] in (self._package, *self._missing):
            return ModuleSpec(name, _StandInLoader(), is_package=True)
        return None
