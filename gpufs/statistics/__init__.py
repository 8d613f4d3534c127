"""Counters of a mount: reads them without asking the mount, also after its process was killed.

A mount keeps its counters in a file that the engine maps and counts in. The process holds a lock on the file for as
long as it lives. docs/internals/statistics-file.md describes the file. `parse`, and the functions that read, return the
dictionary that ``.gpufs/stats`` and ``gpufs stats --json`` show as JSON (docs/statistics.md). Nothing here needs the
engine.
"""

from gpufs.statistics._files import (
    device_of,
    file_name,
    find,
    folders,
    read,
    read_left_behind,
    read_mount,
    remove_dead,
    sweep,
    temporary_folders,
)
from gpufs.statistics._format import DETAILS, DEVICE_GAUGES, ENGINE_GAUGES, VERSION, StatisticsError, parse

__all__ = [
    "DETAILS",
    "DEVICE_GAUGES",
    "ENGINE_GAUGES",
    "VERSION",
    "StatisticsError",
    "device_of",
    "file_name",
    "find",
    "folders",
    "parse",
    "read",
    "read_left_behind",
    "read_mount",
    "remove_dead",
    "sweep",
    "temporary_folders",
]
