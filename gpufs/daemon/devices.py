"""Chooses the driver of a mount and opens its devices.

As a program, ``python -m gpufs.daemon.devices DRIVER DEVICES``, it finds out whether another process can open them.
"""

import errno
import json
import os
import resource
import sys
from typing import Any

from gpufs import config, engine
from gpufs.daemon.startup import PYTHON, StartFailure
from gpufs.drivers import DRIVERS, HOST
from gpufs.units import bytes_text


def open_engine(values: dict[str, Any], statistics_path: str, *, again: bool) -> tuple[engine.Engine, list[str]]:
    """Return the engine for the values of the knobs, and notes for the user. StartFailure if no driver can be used.

    The driver ``auto`` takes host memory only if the machine has no GPU and none is asked for by name. ``again``: for a
    mount that is taken over, whatever memory the machine has now.
    """
    wanted: str = values["driver"]
    reasons: dict[str, engine.EngineError] = {}
    for driver in DRIVERS if wanted == "auto" else (wanted,):
        if reasons and driver == HOST:
            _refuse_host_memory(values["devices"], reasons)
        try:
            opened = _open(driver, values, statistics_path, again)
        except config.ConfigError as failure:
            raise StartFailure(errno.EINVAL, str(failure)) from None
        except engine.EngineError as failure:
            if wanted == "auto" and failure.errno in (errno.ENODEV, errno.ENXIO) and driver != HOST:
                reasons[driver] = failure
                continue
            remedy = _remedy() if failure.errno == errno.ENODEV else ""
            raise StartFailure(failure.errno or errno.EIO, _text(failure) + remedy) from None
        break
    notes = []
    if wanted == "auto" and opened.driver == HOST:
        devices = [device for device in opened.devices if not device.info.host_tier]
        each = bytes_text(devices[0].info.total_bytes) + f" on each of {len(devices)} devices" * (len(devices) > 1)
        notes.append(f"no GPU was found: the files are in host memory, {each} (--driver host is the same without this)")
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest != resource.RLIM_INFINITY:
        notes.append(f"no file on the mount can have more than {bytes_text(largest)} (ulimit -f)")
    return opened, notes


def _open(driver: str, values: dict[str, Any], statistics_path: str, again: bool) -> engine.Engine:
    devices, memory = values["devices"], values["memory"] or 0
    if driver == HOST:
        devices = config.host_devices(devices)
        if not again or not memory:
            memory = config.host_memory(values["memory"], devices)
    return engine.Engine(
        driver,
        devices=devices,
        memory_bytes=memory,
        slab_file_bytes=values["slab_file_bytes"],
        statistics_path=statistics_path,
        keep_freed=values["keep_freed"],
        lock_policy=values["lock_policy"],
        hip_memory=config.hip_memory(values),
        host_memory_bytes=values["host_memory"],
    )


def _refuse_host_memory(devices: int | list[str], reasons: dict[str, engine.EngineError]) -> None:
    """Raise StartFailure if the user has a GPU or asks for one, and so does not expect host memory."""
    if wrong := [reason for reason in reasons.values() if reason.errno == errno.ENXIO]:
        raise StartFailure(errno.ENXIO, "; ".join(map(_text, wrong)))
    paths = {name: driver.kernel_device for name, driver in DRIVERS.items() if driver.kernel_device}
    present = {name: path for name, path in paths.items() if os.access(path, os.F_OK)}
    if present:
        what = f"this machine has a GPU ({', '.join(present.values())}) that cannot be used: "
    elif not isinstance(devices, int):
        what = f"the GPUs {','.join(devices)} are asked for, but this machine has no GPU: "
    else:
        return
    texts = [_text(reason) for driver, reason in reasons.items() if driver in present or not present]
    raise StartFailure(errno.ENODEV, what + "; ".join(texts) + _remedy() + "; --driver host uses host memory instead")


def _remedy() -> str:
    names = [name for driver in DRIVERS.values() for name in driver.hiding]
    hiding = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    may_hide = f"; {' and '.join(hiding)} may hide it" if hiding else ""
    return f"{may_hide}; gpufs doctor says what to do"


def _text(failure: engine.EngineError) -> str:
    return failure.strerror or str(failure)


def probe_command(driver: str, values: dict[str, Any]) -> list[str]:
    """Return the command that exits with 0 if another process can open the devices of a mount of GPUs."""
    return [*PYTHON, "-m", __name__, driver, json.dumps(values["devices"])]


if __name__ == "__main__":
    try:
        engine.Engine(sys.argv[1], devices=json.loads(sys.argv[2])).close()
    except engine.EngineError as failure:
        sys.exit(failure.strerror)
