"""Asks the engine on behalf of `gpufs doctor`, in a separate process."""

import os
import stat
from typing import Any

from gpufs import engine
from gpufs.units import bytes_text

_HOST_BYTES = 64 << 20


def _driver(name: str) -> dict[str, Any]:
    """{"devices": [names], "refusals": [names]}."""
    host = name == "host"
    with engine.Engine(name, devices=1 if host else 0, memory_bytes=_HOST_BYTES if host else 0) as opened:
        devices = [
            info.name
            + (f" ({bytes_text(info.total_bytes)}, {info.pci_address}, {info.uuid})" if info.pci_address else "")
            for info in (device.info for device in opened.devices)
        ]
        refusals = engine.fastpath_probe(name)
        if not refusals and devices and not any(device.info.fastpath_memory for device in opened.devices):
            refusals.append("memory_kind")
        return {"devices": devices, "refusals": refusals}


def _path(path: str) -> dict[str, Any]:
    """{"file_system", "device", "offset_align", "memory_align", "refusals"}. "device": the block device's "8:1"."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        with engine.Engine("host", devices=1, memory_bytes=_HOST_BYTES) as opened:
            with engine.BackingFile(opened, fd) as backing:
                info = backing.info
                status = os.fstat(fd)
                device = status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev
                return {
                    "file_system": "block device" if info.block_device else info.file_system,
                    "device": f"{os.major(device)}:{os.minor(device)}",
                    "offset_align": info.offset_align,
                    "memory_align": info.memory_align,
                    "refusals": list(info.fastpath_refusals),
                }
    finally:
        os.close(fd)


def answer(kind: str, name: str) -> dict[str, Any]:
    """What the engine says of a "driver" by its name, or of a file by its "path". OSError if it fails."""
    return _driver(name) if kind == "driver" else _path(name)
