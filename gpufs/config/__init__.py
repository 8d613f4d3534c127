"""The settings of a mount: the table of knobs, where their values come from, and what they mean to the engine."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpufs._naming import lazy
from gpufs.config.knobs import BY_NAME, GRANULE, KNOBS, SLEEP_TIMEOUT, STATUS_TIMEOUT, UMOUNT_TIMEOUT, ConfigError, Knob

if TYPE_CHECKING:
    from gpufs.config.loading import CONFIG_VARIABLE, SYSTEM_FILE, Settings, load, suggestion, unknown_variables
    from gpufs.config.memory import check_host, host_devices, host_memory, is_memory_limited, metadata_memory, numbers

# Names that are loaded on first use: commands that only need the table of knobs do without.
_MODULES = {
    "loading": "CONFIG_VARIABLE SYSTEM_FILE Settings load suggestion unknown_variables",
    "memory": "check_host host_devices host_memory is_memory_limited metadata_memory numbers",
}

__all__ = [
    "BY_NAME",
    "CONFIG_VARIABLE",
    "GRANULE",
    "KNOBS",
    "SLEEP_TIMEOUT",
    "STATUS_TIMEOUT",
    "SYSTEM_FILE",
    "UMOUNT_TIMEOUT",
    "ConfigError",
    "Knob",
    "Settings",
    "check_host",
    "hip_memory",
    "host_devices",
    "host_memory",
    "io_options",
    "is_memory_limited",
    "load",
    "metadata_memory",
    "numbers",
    "suggestion",
    "unknown_variables",
]


def io_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs of transfers by the names that :func:`gpufs.engine.io_configure` has for them."""
    return {name.removeprefix("io_"): values[name] for name in BY_NAME if name.startswith("io_")}


def hip_memory(values: Mapping[str, Any]) -> Any:
    """Return the engine's ``hip_memory``. If it is auto, ``io_fastpath`` decides before the kernel's abilities do."""
    wanted = {"off": "virtual", "require": "plain"}.get(values["io_fastpath"], "auto")
    return wanted if values["hip_memory"] == "auto" else values["hip_memory"]


if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__ = lazy(globals(), _MODULES)
