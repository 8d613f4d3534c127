"""Finds the directory of a device on a mount, for a program that uses that device."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from gpufs import mounting


class NoDirectoryError(Exception):
    """No mount has a directory for the device, or several have."""


def is_on_mount(path: str | os.PathLike[str]) -> bool:
    """Whether a file or directory, or what a link leads to, lies on a gpufs mount."""
    device = os.stat(path).st_dev
    return any(entry.st_dev == device for entry in mounting.mounts())


def device_directory(device: torch.device, near: str | os.PathLike[str], mountpoint: str | None = None) -> Path:
    """Returns the directory of a mount in which files are memory of the device.

    Parameters
    ----------
    device : torch.device
        A GPU, or the CPU for mounts of host memory.
    near : path
        A directory. If it lies on a mount, only that one counts.
    mountpoint : str, optional
        The one mount that counts.

    Raises
    ------
    NoDirectoryError
        No mount has the device, or several have it.
    """
    entries = [entry for entry in mounting.mounts() if entry.root == "/"]
    if mountpoint is not None:
        wanted = mounting.absolute(mountpoint)
        entries = [entry for entry in entries if entry.mountpoint == wanted]
        if not entries:
            raise NoDirectoryError(f"{mountpoint} is not a gpufs mount")
    real = Path(os.path.realpath(near))
    near_device = os.stat(real).st_dev if real.exists() else -1
    entries = [entry for entry in entries if entry.st_dev == near_device] or entries
    found = {
        entry.mountpoint: directories for entry in entries if (directories := _directories(entry.mountpoint, device))
    }
    if not found:
        raise NoDirectoryError(f"no gpufs mount here has a directory for {_name(device)}")
    if len(found) > 1:
        raise NoDirectoryError(f"{_name(device)} is on several gpufs mounts ({', '.join(found)}): choose one")
    (directories,) = found.values()
    return next((directory for directory in directories if directory in real.parents), directories[0])


def _directories(mountpoint: str, device: torch.device) -> list[Path]:
    """The directories of a mount whose memory the device uses."""
    try:
        status = json.loads(Path(mountpoint, ".gpufs/status").read_bytes())
    except (OSError, ValueError):
        return []  # closed to this user, or its daemon is dead
    if device.type == "cpu":
        return [Path(mountpoint, entry["name"]) for entry in status["devices"] if status["driver"] == "host"]
    own = _pci_of(device)
    return [
        Path(mountpoint, entry["name"])
        for entry in status["devices"]
        if entry["pci_address"] and _pci_numbers(entry["pci_address"]) == own
    ]


def _pci_of(device: torch.device) -> tuple[int, int, int]:
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs leave these out
    return properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id


def _pci_numbers(address: str) -> tuple[int, int, int]:
    """Domain, bus and device of an address such as 0000:1b:00.0."""
    domain, bus, rest = address.split(":")
    return int(domain, 16), int(bus, 16), int(rest.split(".")[0], 16)


def _name(device: torch.device) -> str:
    return "host memory" if device.type == "cpu" else f"the GPU {torch.cuda.get_device_name(device)} ({device})"
