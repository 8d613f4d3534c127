"""gpufs.mount(): a mount that belongs to the program that makes it, and ends with it."""

import os
import subprocess
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import EBUSY, ETIMEDOUT
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from gpufs import config, launching, mounting
from gpufs._naming import named_in
from gpufs.daemon.startup import MountRequest


@named_in("gpufs")
@dataclass(frozen=True, slots=True)
class DeviceDirectory:
    """A device of a mount.

    Attributes
    ----------
    path
        Its directory: a file there is memory of the device.
    description
        What it is, for example "NVIDIA H200" or "host memory".
    uuid
        "GPU-..." as the vendor's tools print it; None if it has none.
    total_bytes
        Bytes of memory that the mount may use.
    """

    path: Path
    description: str
    uuid: str | None
    total_bytes: int

    @property
    def free_bytes(self) -> int:
        """Bytes of memory that are free now."""
        space = os.statvfs(self.path)
        return space.f_bavail * space.f_frsize


@named_in("gpufs")
class OwnedMount:
    """A mount of this program, as :func:`gpufs.mount` returns it. A context manager, which unmounts at its end.

    Attributes
    ----------
    path
        The mountpoint, absolute and without symbolic links.
    driver
        "cuda", "hip" or "host".
    devices
        The devices, in order: gpu0, gpu1, ...
    """

    def __init__(self, process: "subprocess.Popen[bytes]", answer: Mapping[str, Any], timeout: float) -> None:
        self.path = Path(answer["mountpoint"])
        self.driver: str = answer["driver"]
        self.devices = tuple(
            DeviceDirectory(self.path / device["name"], device["description"], device["uuid"], device["total_bytes"])
            for device in answer["devices"]
        )
        self._identity: str = answer["identity"]
        self._process = process
        self._timeout = timeout
        self._owner = os.getpid()
        self._reaper: threading.Thread | None = None

    def unmount(self, *, detach: bool = False) -> None:
        """Unmount, and wait for the daemon's end. The files are gone then. Does nothing if already unmounted.

        Parameters
        ----------
        detach
            Also unmount if files are open or mapped, or a program has its working directory there. They stay usable,
            and their memory is released with the last of them; this function does not wait for that.

        Raises
        ------
        OSError
            EBUSY if the mount is in use and ``detach`` is false. ETIMEDOUT if the daemon does not end.
        """
        if self._owner != os.getpid():
            raise RuntimeError("the mount belongs to the process that made it, not to a forked one")
        detached = not self._is_mounted()
        if not detached:
            try:
                mounting.unmount(str(self.path))
            except OSError as failure:
                if self._is_mounted():  # else another process has unmounted it
                    detached = failure.errno == EBUSY and detach
                    if not detached:
                        busy = f"{self.path}: in use: close its files, or unmount(detach=True)"
                        raise OSError(failure.errno, busy if failure.errno == EBUSY else failure.strerror) from None
                    mounting.unmount(str(self.path), lazy=True)
        try:
            self._process.wait(0 if detached else self._timeout)
        except subprocess.TimeoutExpired:
            if not detached:
                text = f"{self.path}: unmounted, but the daemon ({self._process.pid}) has not ended"
                raise OSError(ETIMEDOUT, text) from None
            self._reap()

    def _reap(self) -> None:
        """Wait on a thread for the daemon, which ends with the last open file: it must not stay a zombie."""
        if self._reaper is None:
            self._reaper = threading.Thread(target=self._process.wait, name="gpufs-reaper", daemon=True)
            with suppress(RuntimeError):  # no thread can be started: subprocess reaps it when it starts the next one
                self._reaper.start()

    def _is_mounted(self) -> bool:
        """Return whether this mount is at its place. Once the daemon has ended, other mounts may have its numbers."""
        entry = mounting.entry_of(str(self.path)) if self._process.poll() is None else None
        return entry is not None and entry.identity == self._identity

    def __enter__(self) -> "OwnedMount":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._owner == os.getpid():  # a forked process leaves the block too
            self.unmount(detach=True)

    def __repr__(self) -> str:
        return f"<gpufs.OwnedMount at {str(self.path)!r}: {self.driver}, {len(self.devices)} devices>"


@named_in("gpufs")
def mount(
    path: "str | os.PathLike[str]",
    *,
    driver: Literal["auto", "cuda", "hip", "host"] | None = None,
    devices: "int | str | Sequence[int | str] | None" = None,
    memory: int | str | None = None,
    allow_other: bool | None = None,
    backing: "Mapping[str, str | os.PathLike[str]] | None" = None,
    config_file: "str | os.PathLike[str] | None" = None,
    **knobs: str | int | float | bool,
) -> OwnedMount:
    """Mount the devices' memory at a directory, for as long as this program runs.

    The mount ends with :meth:`OwnedMount.unmount`, at the end of the ``with`` block, or when this program ends,
    whatever ends it: the daemon notices SIGKILL, too. If it ends with the program, calls on files that other programs
    have open fail from then on. Use the command ``gpufs mount`` for a mount that outlives the program.

    Values that are not given come from the environment, the configuration files and the defaults, as on the command
    line (docs/knobs.md).

    Parameters
    ----------
    path
        An existing directory.
    driver
        "auto" takes the GPUs of the machine, and host memory only if it has none.
    devices
        "all", the number of devices, or a list of GPUs by number or UUID, in this order.
    memory
        Bytes of each device that the mount may use, or a text such as "4G".
    allow_other
        Whether other users may use the mount.
    backing
        Directories of the host to show below ``backing/``, by name.
    config_file
        A configuration file, instead of the usual ones.
    **knobs
        Any other knob of ``gpufs mount`` by its name, for example ``log_file="/tmp/log"``; times in seconds.

    Returns
    -------
    OwnedMount
        The mount, which answers already.

    Raises
    ------
    ValueError
        A value is not allowed.
    TypeError
        There is no such knob.
    OSError
        The mount failed, with the reason as ``strerror``: ENODEV if no GPU can be used, ENXIO if there is no such GPU,
        ENOENT, EACCES or EBUSY for the directory, ETIMEDOUT if the mount does not come up. Nothing is left behind, also
        not after KeyboardInterrupt.

    Warns
    -----
    UserWarning
        Host memory is used because the machine has no GPU; a variable of the environment is unknown.

    Examples
    --------
    >>> with gpufs.mount("/mnt/gpufs", driver="host", memory="1G") as mount:
    ...     (mount.devices[0].path / "weights").write_bytes(weights)
    """
    given: dict[str, Any] = {"driver": driver, "devices": devices, "memory": memory, "allow_other": allow_other}
    given["backing"] = None if backing is None else [f"{name}={os.fspath(place)}" for name, place in backing.items()]
    for name in knobs:
        if name not in config.BY_NAME or name == "foreground":
            raise TypeError(f"mount() has no knob {name!r}{config.suggestion(name, config.BY_NAME)}")
    file = None if config_file is None else os.fspath(config_file)
    mountpoint = mounting.absolute(os.fspath(path))
    chosen = config.load(given | knobs, config_file=file, mountpoint=mountpoint, origin_of=lambda knob: f"{knob.name}=")
    config.check_host(chosen.values)
    launching.check_mountpoint(os.fspath(path), mountpoint, non_empty=chosen["allow_non_empty"])
    values = {**chosen.values, "foreground": False}
    request = MountRequest(mountpoint, "gpufs", values, owner=os.getpid())
    process, answer = launching.launch(request, chosen["mount_timeout"])
    made = OwnedMount(process, answer, config.UMOUNT_TIMEOUT.default)
    try:
        for note in (*config.unknown_variables(), *answer["notes"]):
            warnings.warn(note, stacklevel=2)
    except BaseException:  # the program makes errors of warnings
        made.unmount(detach=True)
        raise
    return made
