"""The knobs: every number and choice that a user can set, in ONE table.

The table makes the options of the command line, the environment variables, the keys of the configuration file and the
page docs/knobs.md (``python -m gpufs.config`` prints it). A value is looked for, first hit wins:

1. the command line,
2. the environment, ``GPUFS_<NAME>``,
3. the file that ``--config`` or ``GPUFS_CONFIG`` names; without that, ``~/.config/gpufs/config.toml``
   (``$XDG_CONFIG_HOME`` counts), then ``/etc/gpufs.toml``,
4. the default.

The user's file counts only where it and that directory are the user's or root's: with sudo, HOME may be another
user's.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from errno import ENOENT, ENOTDIR
from pathlib import Path
from typing import Any, Final

from gpufs.config import kinds, machine

SYSTEM_FILE: Final = Path("/etc/gpufs.toml")
CONFIG_VARIABLE: Final = "GPUFS_CONFIG"
GRANULE: Final = 2 << 20  # the least memory that a device can have

DRIVERS: Final = ("auto", "cuda", "hip", "host")
TRANSPORTS: Final = ("auto", "device")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")

_SHOWN: Final = 80  # characters of a wrong value in a message


class ConfigError(ValueError):
    """A value that is not allowed; the text is one line that says which, where it came from and what is allowed."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One line of the table."""

    name: str
    kind: kinds.Kind
    default: Any
    unit: str
    text: str
    default_text: str = ""  # where the default is more than a value
    commands: tuple[str, ...] = ("mount",)  # whose options have it
    hidden: bool = False  # in no help and on no page: for tests

    @property
    def option(self) -> str:
        """The option of the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "GPUFS_" + self.name.upper()

    def parse(self, text: str, origin: str) -> Any:
        """The value of a text. ConfigError names the knob, the origin and what is allowed."""
        try:
            return self.kind.parse(text)
        except ValueError:
            shown = repr(text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "...")
            raise ConfigError(f"{self.name}: {shown} ({origin}) is not allowed: {self.kind.allowed}") from None

    def describe_default(self) -> str:
        """The default as a reader of the help wants it."""
        if self.default_text:
            return self.default_text
        if self.kind.metavar == "SIZE":
            return kinds.size_text(self.default)
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


_LEAST_METADATA: Final = 16 << 20  # of the default

KNOBS: Final[tuple[Knob, ...]] = (
    Knob(
        "driver",
        kinds.choice(*DRIVERS),
        "auto",
        "",
        "Whose devices: auto takes GPUs where there are any, else host memory.",
    ),
    Knob(
        "devices",
        kinds.integer(0, 64),
        0,
        "",
        "How many devices: simulated ones (host), or the first N found (cuda, hip).",
        default_text="0: every GPU found, 1 with host",
    ),
    Knob(
        "memory",
        kinds.size(GRANULE, 1 << 46),
        None,
        "bytes",
        "Memory of each device that may be used.",
        default_text="host: half of the available memory divided by the devices; GPUs: all of it",
    ),
    Knob(
        "metadata",
        kinds.size(1 << 20, 1 << 46),
        None,
        "bytes",
        "Host memory that names, inodes, extended attributes and the targets of symbolic links may take; then ENOSPC.",
        default_text="a sixteenth of this machine's or container's memory",
    ),
    Knob(
        "slab_file_bytes",
        kinds.size(0, 1 << 20),
        64 << 10,
        "bytes",
        "Files up to this size share slabs of device memory instead of taking a granule each; 0: none do.",
    ),
    Knob(
        "keep_freed",
        kinds.duration(0, 3600),
        1.0,
        "seconds",
        "How long memory of removed files is kept for new ones before a GPU's driver gets it back; 0: not at all.",
        default_text="1s",
    ),
    Knob(
        "hip_memory",
        kinds.choice("auto", "virtual", "plain"),
        "auto",
        "",
        "How memory of an AMD GPU is taken. plain: one allocation for each file, which the fastpath reaches; it grows "
        "by a copy, and holes give nothing back. virtual: in pieces, which the fastpath does not reach. auto: plain if "
        "io_fastpath is require, or if it is auto and the kernel can move files to and from the GPU; otherwise "
        "virtual. Where ROCm's virtual memory does not work (checked when the mount starts) memory is always plain.",
    ),
    Knob(
        "lock_policy",
        kinds.choice("auto", "off", "mandatory"),
        "auto",
        "",
        "Memory for requests is locked for the devices (GPUs): where possible, never, or the mount fails.",
    ),
    Knob(
        "allow_other",
        kinds.BOOLEAN,
        False,
        "",
        "Let other users in; each file's mode and owner decide what they may do.",
    ),
    Knob(
        "backing",
        kinds.BACKINGS,
        None,
        "",
        "A directory of the host to show below backing/NAME. May be given several times.",
        default_text="none",
    ),
    Knob("foreground", kinds.BOOLEAN, False, "", "Stay in the foreground and log to standard error."),
    Knob(
        "log_file",
        kinds.PATH,
        None,
        "",
        "Where the mount's log goes.",
        default_text="nowhere; standard error with --foreground",
    ),
    Knob(
        "auto_unmount",
        kinds.BOOLEAN,
        True,
        "",
        "Take the mount away should its process die; costs a small process beside each mount.",
    ),
    Knob(
        "core_dumps",
        kinds.BOOLEAN,
        False,
        "",
        "Let a crash leave a core file, as far as ulimit -c allows; without files' data.",
    ),
    Knob("log_level", kinds.choice(*LOG_LEVELS), "info", "", "The least level that is logged."),
    Knob(
        "reader_threads",
        kinds.integer(0, 128),
        0,
        "",
        "Threads that answer the kernel's requests.",
        default_text="0: chosen by the number of CPUs",
    ),
    Knob(
        "worker_threads",
        kinds.integer(0, 256),
        0,
        "",
        "Most threads for each device's requests that may take long (allocation, truncation, copies within memory).",
        default_text="0: 64, started as they are needed",
    ),
    Knob(
        "reader_spin",
        kinds.duration(0, 0.01),
        100e-6,
        "seconds",
        "How long a thread looks for the next request, while they come that soon, before it sleeps; 0: never.",
        default_text="100us",
    ),
    Knob(
        "max_write",
        kinds.size(0, 16 << 20, 4096),
        0,
        "bytes",
        "The largest READ and WRITE that is asked of the kernel.",
        default_text="0: the engine's choice",
    ),
    Knob(
        "attribute_timeout",
        kinds.duration(0, 86400),
        1.0,
        "seconds",
        "How long the kernel may keep a file's attributes before it asks again.",
    ),
    Knob(
        "entry_timeout",
        kinds.duration(0, 86400),
        1.0,
        "seconds",
        "How long the kernel may keep a name before it asks again.",
    ),
    Knob(
        "transport",
        kinds.choice(*TRANSPORTS),
        "auto",
        "",
        "How requests come from the kernel: by the device file /dev/fuse, which auto takes, too.",
    ),
    Knob(
        "stats_interval",
        kinds.duration(0.1, 3600),
        1.0,
        "seconds",
        "How often a mount writes how its memory and pools stand beside its counters.",
    ),
    Knob(
        "mount_timeout",
        kinds.duration(0.1, 3600),
        60.0,
        "seconds",
        "How long `gpufs mount` waits until the mount answers.",
    ),
    Knob(
        "io_chunk_bytes",
        kinds.size(64 << 10, 64 << 20, power_of_two=True),
        4 << 20,
        "bytes",
        "One piece of work of a copy between a file and a device, and the size of a pinned slot.",
    ),
    Knob(
        "io_pinned_bytes",
        kinds.size(1 << 20, 1 << 40),
        192 << 20,
        "bytes",
        "Host memory that may be pinned at most, by all copies and the mount together.",
    ),
    Knob(
        "io_workers",
        kinds.integer(0, 256),
        0,
        "",
        "Threads that one client's copies have at most on a NUMA node.",
        default_text="0: chosen by the number of CPUs",
    ),
    Knob(
        "io_slots",
        kinds.integer(1, 16),
        3,
        "",
        "Pinned slots that each of these threads has at most. It takes one more where the device is behind it.",
    ),
    Knob(
        "io_fastpath",
        kinds.choice("auto", "off", "require"),
        "auto",
        "",
        "Copies directly between storage and device, by the vendor's way: where possible, never, or nothing else.",
    ),
    Knob(
        "io_file_systems",
        kinds.WORDS,
        "",
        "",
        "Types of file systems, separated by commas, that the fastpath may use beside ext4, xfs and block devices, as "
        "/proc/self/mountinfo names them: nfs4 (over RDMA), lustre, beegfs, ...; any: all. Whether one works is up to "
        "the vendor's library. A file that it refuses is copied through host memory, and the counters say so.",
        default_text="none",
    ),
    Knob(
        "io_fallback", kinds.choice("auto", "on", "off"), "auto", "", "Copies through pinned host memory; auto is on."
    ),
    Knob(
        "io_direct",
        kinds.choice("auto", "on", "off"),
        "auto",
        "",
        "O_DIRECT for copies through pinned memory; auto decides by what the page cache holds.",
    ),
    Knob(
        "umount_timeout",
        kinds.duration(0.1, 3600),
        30.0,
        "seconds",
        "How long `gpufs umount` waits for the end of the mount's process.",
        commands=("umount",),
    ),
    Knob(
        "status_timeout",
        kinds.duration(0.1, 3600),
        2.0,
        "seconds",
        "How long `gpufs status`, `gpufs df` and `gpufs stats` wait for a mount's answer.",
        commands=("status", "df", "stats"),
    ),
    Knob("mask_flags", kinds.flags(64), 0, "", "INIT flags to treat as not offered by the kernel.", hidden=True),
)

BY_NAME: Final[Mapping[str, Knob]] = {knob.name: knob for knob in KNOBS}


@dataclass(frozen=True, slots=True)
class Settings:
    """A value for every knob, and where each came from (in words: "--memory", "GPUFS_MEMORY", a file, "default")."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def user_file(environ: Mapping[str, str]) -> Path | None:
    """The calling user's configuration file; None where there is none, or where it or that directory is another user's.

    HOME may be another user's, as with sudo: files there do not configure what root does. Root's may configure anybody.
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


def _read_file(path: Path, required: bool) -> dict[str, str]:
    """The texts by knob in a TOML file; empty where a file that is not required does not exist."""
    import tomllib  # most starts have no file to read

    try:
        # One that is named may be a pipe; where none is, a pipe would be waited for by every command.
        if not required and path.exists() and not path.is_file():
            raise ConfigError(f"configuration file {path}: not a regular file")
        content = path.read_bytes().decode()
        table = tomllib.loads(content)
    except OSError as error:
        # Not a directory: of those who have none, the home may be /dev/null.
        if not required and error.errno in (ENOENT, ENOTDIR):
            return {}
        raise ConfigError(f"configuration file {path}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, not TOML
        raise ConfigError(f"configuration file {path} is not valid TOML: {error}") from None
    texts = {}
    for key, value in table.items():
        if key not in BY_NAME:
            import difflib  # for this message alone

            near = difflib.get_close_matches(key, BY_NAME, 1)
            raise ConfigError(
                f"configuration file {path}: unknown key {key!r}" + (f", is it {near[0]}?" if near else "")
            )
        if isinstance(value, bool):
            texts[key] = str(value).lower()
        elif isinstance(value, (str, int, float)):
            texts[key] = str(value)
        elif isinstance(value, list) and BY_NAME[key].kind is kinds.BACKINGS and all(isinstance(v, str) for v in value):
            texts[key] = kinds.join_backings(value)
        else:
            raise ConfigError(f"{key}: {value!r} ({path}) is not allowed: {BY_NAME[key].kind.allowed}")
    return texts


def load(
    arguments: Mapping[str, str | bool | None],
    environ: Mapping[str, str] = os.environ,
    config_file: str | None = None,
    *,
    system_file: Path = SYSTEM_FILE,
    said_by: Callable[[Knob], str] = lambda knob: knob.option,
    command: str | None = None,
) -> Settings:
    """The settings from the command line's ``arguments`` (None: not given), the environment and the files.

    ``said_by`` is how messages name an argument: by default as the option of the command line. ``command``: only its
    knobs are looked for, the others have their defaults, so that a wrong one does not keep a mount from being
    unmounted. ConfigError for a value that is not allowed, wherever it stands, and for a file that cannot be read.
    """
    layers: list[tuple[Callable[[Knob], str], Mapping[str, str]]] = []
    given = {name: str(value).lower() if isinstance(value, bool) else value for name, value in arguments.items()}
    layers.append((said_by, {name: text for name, text in given.items() if text is not None}))
    layers.append((lambda knob: knob.variable, {k.name: environ[k.variable] for k in KNOBS if k.variable in environ}))
    named = config_file or environ.get(CONFIG_VARIABLE)
    files = [Path(named)] if named else [file for file in (user_file(environ), system_file) if file]
    for file in files:
        layers.append((lambda _, file=file: str(file), _read_file(file, required=bool(named))))  # type: ignore[misc]

    values, origins = {}, {}
    for knob in KNOBS:
        values[knob.name], origins[knob.name] = knob.default, "default"
        if command is not None and command not in knob.commands:
            continue
        # From the weakest to the strongest, so that a bad value is found even where a better one hides it.
        for origin, texts in reversed(layers):
            if knob.name in texts:
                origins[knob.name] = origin(knob)
                values[knob.name] = knob.parse(texts[knob.name], origins[knob.name])
    settings = Settings(values, origins)
    _check_together(settings)
    return settings


def _check_together(settings: Settings) -> None:
    """ConfigError for values that are allowed each for itself, but not together."""
    origins = settings.origins
    chunk, pinned = settings["io_chunk_bytes"], settings["io_pinned_bytes"]
    if pinned < chunk:
        raise ConfigError(
            f"io_pinned_bytes: {kinds.size_text(pinned)} ({origins['io_pinned_bytes']}) does not hold one piece of "
            f"io_chunk_bytes: {kinds.size_text(chunk)} ({origins['io_chunk_bytes']})"
        )
    if settings["io_fastpath"] == settings["io_fallback"] == "off":
        raise ConfigError(
            f"io_fastpath ({origins['io_fastpath']}) and io_fallback ({origins['io_fallback']}) are both off: "
            "nothing could be copied"
        )


def metadata_memory(metadata: int | None) -> int:
    """Bytes that the metadata of a mount may take; ``metadata`` is what the user asked for, None: nothing."""
    return metadata or max(machine.memory().total_bytes // 16, _LEAST_METADATA)


def host_memory(memory: int | None, devices: int) -> int:
    """Bytes for each of ``devices`` (0: one) simulated devices; ``memory`` is what the user asked for, None: nothing.

    The default is half of the available memory divided by the devices, in whole granules. ConfigError when the sum is
    more than this machine (or this container) has, or too little is left for the default.
    """
    count = devices or 1
    has = machine.memory()
    if memory is None:
        share = has.available_bytes // 2 // count // GRANULE * GRANULE
        if share < GRANULE:
            raise ConfigError(
                f"memory: half of the available {kinds.size_text(has.available_bytes)} is too little for {count} "
                "devices: give fewer devices"
            )
        return share
    if memory * count > has.total_bytes:
        gib = float(1 << 30)
        raise ConfigError(
            f"memory: {count} x {kinds.size_text(memory)} is more than this machine has: "
            f"{has.total_bytes / gib:.1f} GiB, of which {has.available_bytes / gib:.1f} GiB are available"
        )
    return memory


def io_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs of transfers by the names that :func:`gpufs.engine.io_configure` has for them."""
    return {name.removeprefix("io_"): values[name] for name in BY_NAME if name.startswith("io_")}


def hip_memory(values: Mapping[str, Any]) -> Any:
    """The engine's ``hip_memory``. Whether the fastpath is wanted decides before the engine looks at the kernel."""
    wanted = {"off": "virtual", "require": "plain"}.get(values["io_fastpath"], "auto")
    return wanted if values["hip_memory"] == "auto" else values["hip_memory"]


def _page() -> Iterator[str]:
    yield "# Knobs\n"
    yield "Written by `python -m gpufs.config` from the table in `gpufs/config/__init__.py`; do not edit.\n"
    yield "Every knob is an option of the command named, an environment variable and a key of the configuration file."
    yield "A value is looked for in this order, and the first hit wins:\n"
    yield "1. the command line,"
    yield "2. the environment,"
    yield "3. the file that `--config` or `GPUFS_CONFIG` names; without that `~/.config/gpufs/config.toml`"
    yield "   (`$XDG_CONFIG_HOME` counts), then `/etc/gpufs.toml`,"
    yield "4. the default.\n"
    yield "The user's file counts only where it and that directory belong to the user who runs the command, or to root:"
    yield "with sudo, HOME may be another user's.\n"
    yield 'The files are TOML with the keys at the top level: `memory = "4G"`. A value that is not allowed is an error'
    yield "wherever it stands, and the message names the knob, where the value came from and what is allowed. Sizes"
    yield "take K, M, G and T (powers of 1024), times ms, s, m and h.\n"
    for knob in KNOBS:
        if knob.hidden:
            continue
        yield f"## {knob.name}\n"
        yield f"{knob.text}\n"
        yield "| | |"
        yield "|---|---|"
        yield f"| command | {', '.join(f'`gpufs {command}`' for command in knob.commands)} |"
        yield f"| option | `{knob.option}` |"
        yield f"| environment | `{knob.variable}` |"
        yield f"| file | `{knob.name}` |"
        yield f"| default | {knob.describe_default()} |"
        if knob.unit:
            yield f"| unit | {knob.unit} |"
        yield f"| allowed | {knob.kind.allowed} |\n"


def page() -> str:
    """The text of docs/knobs.md."""
    return "\n".join(_page()).rstrip("\n") + "\n"
