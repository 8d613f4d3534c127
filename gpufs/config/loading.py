"""Finds the value of each knob. The first hit wins:

1. the command line,
2. the environment, ``GPUFS_<NAME>``,
3. the file that ``--config`` or ``GPUFS_CONFIG`` names; without that, ``~/.config/gpufs/config.toml``
   (``$XDG_CONFIG_HOME`` counts), then ``/etc/gpufs.toml``; in each of them first the table with the mount's name,
4. the default.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from errno import ENOENT, ENOTDIR
from pathlib import Path
from typing import Any, Final

from gpufs.config import kinds
from gpufs.config.knobs import BY_NAME, KNOBS, SLEEP_TIMEOUT, STATUS_TIMEOUT, UMOUNT_TIMEOUT, ConfigError, Knob
from gpufs.modes import IN_PLACE_VARIABLE, REPORT_VARIABLE

SYSTEM_FILE: Final = Path("/etc/gpufs.toml")
CONFIG_VARIABLE: Final = "GPUFS_CONFIG"


@dataclass(frozen=True, slots=True)
class Settings:
    """A value for every knob, and where each came from: "--memory", "GPUFS_MEMORY", a file's name or "default"."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def user_file(environ: Mapping[str, str]) -> Path | None:
    """Return the calling user's configuration file; None if it is missing, or it or its directory is another user's.

    With sudo, HOME may be another user's: files there must not configure what root does.
    """
    trusted = (os.geteuid(), 0)
    for variable, name in (("XDG_CONFIG_HOME", "gpufs/config.toml"), ("HOME", ".config/gpufs/config.toml")):
        if folder := environ.get(variable):
            path = Path(folder) / name
            try:
                return path if os.stat(folder).st_uid in trusted and path.stat().st_uid in trusted else None
            except OSError:
                return None
    return None


def _read_file(path: Path, required: bool) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the values by knob in a TOML file, unchecked, and those in the tables of mounts, by mountpoint.

    Both are empty if a file that is not required does not exist.
    """
    try:
        # A file that the user names may be a pipe. Otherwise a pipe would block every command.
        if not required and path.exists() and not path.is_file():
            raise ConfigError(f"configuration file {path}: not a regular file")
        content = path.read_bytes().decode()
        import tomllib  # most machines have no file

        table = tomllib.loads(content)
    except OSError as error:
        # ENOTDIR: the home of a system user may be /dev/null.
        if not required and error.errno in (ENOENT, ENOTDIR):
            return {}, {}
        raise ConfigError(f"configuration file {path}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, not TOML
        raise ConfigError(f"configuration file {path} is not valid TOML: {error}") from None
    of_mounts = {key: table.pop(key) for key in list(table) if key.startswith("/") and isinstance(table[key], dict)}
    for keys in (table, *of_mounts.values()):
        for key in keys:
            if key not in BY_NAME:
                raise ConfigError(f"configuration file {path}: unknown key {key!r}{suggestion(key, BY_NAME)}")
    return table, {os.path.normpath(name): values for name, values in of_mounts.items()}


def load(
    arguments: Mapping[str, object],
    environ: Mapping[str, str] = os.environ,
    config_file: str | None = None,
    *,
    mountpoint: str = "",
    system_file: Path = SYSTEM_FILE,
    origin_of: Callable[[Knob], str] = lambda knob: knob.option,
) -> Settings:
    """Load the settings from ``arguments`` of a command line or a program (None: not given), environment and files.

    ``mountpoint``: of the mount that they are for, an absolute path; files may have a table with its name.
    ``origin_of`` is how messages name an argument, by default as the option of the command line.
    ConfigError for a value that is not allowed, in whatever place, and for a file that cannot be read.
    """
    layers: list[tuple[Callable[[Knob], str], Mapping[str, object]]] = []
    layers.append((origin_of, {name: value for name, value in arguments.items() if value is not None}))
    layers.append((lambda knob: knob.variable, {k.name: environ[k.variable] for k in KNOBS if k.variable in environ}))
    named = config_file or environ.get(CONFIG_VARIABLE)
    files = [Path(named)] if named else [file for file in (user_file(environ), system_file) if file]
    for file in files:
        general, of_mounts = _read_file(file, required=bool(named))
        if mountpoint in of_mounts:
            layers.append((lambda _, name=f'{file}, ["{mountpoint}"]': name, of_mounts[mountpoint]))  # type: ignore[misc]
        layers.append((lambda _, name=str(file): name, general))  # type: ignore[misc]

    values, origins = {}, {}
    for knob in KNOBS:
        values[knob.name], origins[knob.name] = knob.default, "default"
        # From the weakest to the strongest, so that a bad value is found even if another one overrides it.
        for origin, given in reversed(layers):
            if knob.name in given:
                origins[knob.name] = origin(knob)
                values[knob.name] = knob.coerce(given[knob.name], origins[knob.name])
    settings = Settings(values, origins)
    _check_together(settings)
    return settings


def unknown_variables() -> list[str]:
    """Return a line for each unknown variable of the environment that begins as a knob's does, with a suggestion."""
    known = [
        CONFIG_VARIABLE,
        IN_PLACE_VARIABLE,
        REPORT_VARIABLE,
        *(knob.variable for knob in (*KNOBS, SLEEP_TIMEOUT, STATUS_TIMEOUT, UMOUNT_TIMEOUT)),
    ]
    return [
        f"the environment variable {name} is unknown and has no effect{suggestion(name, known)}"
        for name in os.environ
        if name.startswith("GPUFS_") and name not in known
    ]


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about a wrong word: which of the known ones is meant, if one is close."""
    import difflib

    near = difflib.get_close_matches(word, known, 1)
    return f", is it {near[0]}?" if near else ""


def _check_together(settings: Settings) -> None:
    origins = settings.origins
    chunk, pinned = settings["io_chunk_bytes"], settings["io_pinned_bytes"]
    if pinned < chunk:
        raise ConfigError(
            f"io_pinned_bytes: {kinds.size_text(pinned)} ({origins['io_pinned_bytes']}) is less than "
            f"io_chunk_bytes: {kinds.size_text(chunk)} ({origins['io_chunk_bytes']})"
        )
