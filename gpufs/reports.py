"""Reports of this machine's mounts for programs: gpufs.mounts() and gpufs.status()."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from errno import EINVAL, EIO, EXDEV
from pathlib import Path
from typing import Any

from gpufs import config, mounting
from gpufs._naming import named_in
from gpufs.exceptions import NotOnMount
from gpufs.units import bytes_text


@named_in("gpufs")
@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """A device of a mount.

    Attributes
    ----------
    path
        Its directory: a file there is memory of the device.
    description
        What it is, for example "NVIDIA H200" or "host memory".
    uuid
        "GPU-..." as the vendor's tools print it; None if it has none.
    total_bytes, used_bytes, free_bytes
        Memory that the mount may use, that files hold, and that is free. Other programs may take memory, too.
    files
        The number of files.
    health
        "good", or why the device is out of service.
    """

    path: Path
    description: str | None
    uuid: str | None
    total_bytes: int
    used_bytes: int
    free_bytes: int
    files: int | None
    health: str | None


@named_in("gpufs")
@dataclass(frozen=True, slots=True, repr=False)
class MountStatus:
    """A mount, as `gpufs status` shows it.

    Attributes
    ----------
    path
        The mountpoint.
    state
        "ok", or why it is not: "dead", "no answer", "detached" (unmounted, and still in use), or another word of
        `gpufs status`. Unless it is "ok", other attributes may be unknown.
    error
        Why the state is not "ok"; None if it is.
    pid
        The process of the daemon; None if it is not known.
    driver
        "cuda", "hip" or "host"; None if it is not known.
    devices
        The devices, in order: gpu0, gpu1, ...
    details
        All that the mount reports, as `gpufs status --json` prints it.
    """

    path: Path
    state: str
    error: str | None
    pid: int | None
    driver: str | None
    devices: tuple[DeviceStatus, ...]
    details: dict[str, Any]

    @property
    def free_bytes(self) -> int:
        """Bytes that are free on all devices together; 0 if the state is not "ok"."""
        return sum(device.free_bytes for device in self.devices)

    def __repr__(self) -> str:
        total = sum(device.total_bytes for device in self.devices)
        memory = f"{bytes_text(self.free_bytes)} of {bytes_text(total)} free on {len(self.devices)} x {self.driver}"
        return f"<gpufs.MountStatus {str(self.path)!r}: {memory if self.state == 'ok' else self.error}>"


class _Lines(list[MountStatus]):
    """A list that is printed with one line for each item."""

    def __repr__(self) -> str:
        return "[" + ",\n ".join(map(repr, self)) + "]"


@named_in("gpufs")
def mounts(*, timeout: float | None = None) -> list[MountStatus]:
    """Return the status of all mounts of this machine that this program can see.

    Parameters
    ----------
    timeout
        Seconds to wait for mounts that do not answer; 2 by default. They are returned with the state "no answer".

    Returns
    -------
    list of MountStatus
        Those of root and of this program's user come first.

    Raises
    ------
    OSError
        EIO: the mounts cannot be listed.

    Examples
    --------
    >>> for mount in gpufs.mounts():  # doctest: +SKIP
    ...     print(mount.path, mount.state, mount.free_bytes)
    """
    return _Lines(_mount(report) for report in _ask([], timeout))


@named_in("gpufs")
def status(mountpoint: str | os.PathLike[str], *, timeout: float | None = None) -> MountStatus:
    """Return the status of a mount.

    Parameters
    ----------
    mountpoint
        Where it is mounted.
    timeout
        Seconds to wait for an answer; 2 by default.

    Returns
    -------
    MountStatus
        Of a mount that is dead or does not answer, too: see its ``state``.

    Raises
    ------
    NotOnMount
        No gpufs is mounted there.

    Examples
    --------
    >>> gpufs.status("/mnt/gpufs").devices[0].free_bytes  # doctest: +SKIP
    """
    try:
        report = _ask([os.fspath(mountpoint)], timeout)
    except OSError as error:
        if mounting.entry_of(os.path.realpath(mountpoint)) is None:
            raise NotOnMount(EXDEV, error.strerror) from None
        raise
    return _mount(report)


def _ask(mountpoints: list[str], timeout: float | None) -> Any:
    """Return the JSON that `gpufs status` prints: a process of its own can ask mounts that never answer."""
    limit = [] if timeout is None else [config.STATUS_TIMEOUT.option, f"{timeout:g}"]
    # -P: a module in the working directory may be another user's.
    command = [sys.executable, "-P", "-m", "gpufs", "status", "--json", *limit, "--", *mountpoints]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.stdout:
        return json.loads(done.stdout)
    text = done.stderr.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("gpufs: ")
    raise OSError(EINVAL if mountpoints else EIO, text or f"`gpufs status` ended with {done.returncode}")


def _mount(report: dict[str, Any]) -> MountStatus:
    path = Path(report["mountpoint"])
    devices = tuple(_device(path, device) for device in report["devices"])
    return MountStatus(path, report["state"], report["error"], report["pid"], report["driver"], devices, report)


def _device(mountpoint: Path, report: dict[str, Any]) -> DeviceStatus:
    return DeviceStatus(
        mountpoint / report["name"],
        report.get("description"),
        report.get("uuid"),
        report["total_bytes"],
        report["held_bytes"],
        report["free_bytes"],
        report.get("files"),
        report.get("health"),
    )
