"""gpufs restart: hands mounts over to the installed version of gpufs."""

import os
import signal
import time

import click

from gpufs import config, mounting
from gpufs._version import __version__
from gpufs.cli import _mounts, _queries
from gpufs.cli._options import complete_mounts, for_each_mount, timeout_option
from gpufs.cli._output import Failure, complain, printable

_PAUSE = 0.02  # seconds between two questions to the mount


@click.command(name="restart")
@click.argument("mountpoints", metavar="[MOUNTPOINT...]", nargs=-1, shell_complete=complete_mounts)
@click.option("-a", "--all", "every", is_flag=True, help="Restart every mount of yours that survives it.")
@timeout_option(config.UMOUNT_TIMEOUT)
def command(mountpoints: tuple[str, ...], every: bool, timeout: float) -> int:
    """Serve MOUNTPOINT by a new daemon of the installed version.

    Files, names, open files and attached memory stay as they are; programs wait for a moment. Refused before anything
    stops if the mount does not survive its daemon, or if the installed version cannot continue it. Where daemons fail
    one after the other, the next one waits for up to a minute: this command starts it now.
    """

    def work(mountpoint: str) -> None:
        try:
            _restart(mountpoint, timeout)
        except _WouldNotSurvive as failure:
            if not every:
                raise
            complain(str(failure))

    return for_each_mount(mountpoints, every, work)


class _WouldNotSurvive(Failure):
    """The mount goes on in its daemon."""


def _restart(path: str, timeout: float) -> None:
    entry = _mounts.mounted_at(path)
    began = time.monotonic()
    while (former := _ask_to_restart(path, entry, timeout)) is None:
        # Its daemon has just died, or been replaced: the next one answers in a moment.
        if time.monotonic() - began > timeout:
            raise Failure(f"{path}: its process is not found, although the mount answers")
        time.sleep(_PAUSE)
    while True:
        left = timeout - (time.monotonic() - began)
        if left <= 0:
            hangs = f", or kill -9 {former} ends one that hangs, and the next one takes over" if former else ""
            text = f"no daemon has taken over within {timeout:g} seconds: the log gives the reason{hangs}"
            raise Failure(f"{path}: {text}")
        (status,) = _queries.statuses([entry], lambda _: [], left)
        if status["state"] == "ok" and status["pid"] != former:
            seconds = time.monotonic() - began
            text = f"process {status['pid']} serves the mount with version {status['version']}, {seconds:.1f} s"
            if status["version"] != __version__:
                raise Failure(f"{path}: {text}: it is of another installation than this gpufs {__version__}")
            print(f"{printable(path)}: {text}")
            return
        time.sleep(_PAUSE)


def _ask_to_restart(path: str, entry: mounting.MountEntry, timeout: float) -> int | None:
    """Signal the mount's daemon, or its keeper where no daemon answers. Raise Failure.

    Return the number of the daemon's process, 0 for none. None if it was not found.
    """
    (status,) = _queries.statuses([entry], lambda _: [], timeout)
    if status["state"] == "ok":
        _check(path, status)
        # The process that the mount names does not count: another user may serve it.
        holding, number = _mounts.open_daemons(entry.mountpoint, entry), signal.SIGUSR2
    else:
        holding, number = _mounts.open_keepers(entry), signal.SIGUSR1
    with holding as processes:
        if not processes and status["state"] != "ok":
            raise Failure(f"{path}: {status['error']}")
        if not processes and os.geteuid() in (0, entry.uid):
            return None
        try:
            if not processes:
                raise PermissionError
            for process in processes:
                process.signal(number)
        except PermissionError:
            raise Failure(f"{path}: only root and the user who mounted it may restart it") from None
    return status["pid"] or 0


def _check(path: str, status: dict[str, object]) -> None:
    """Raise Failure, or _WouldNotSurvive, unless the installed version can continue the mount."""
    from gpufs.engine import journal_format  # takes long

    if "survives" not in status:
        raise _WouldNotSurvive(f"{path}: version {status.get('version')} serves it, whose mounts end with their daemon")
    if not status["survives"]:
        raise _WouldNotSurvive(f"{path}: not restarted, it would not survive: {status.get('survival_obstacle', '-')}")
    if status["journal_format"] != journal_format():
        raise Failure(
            f"{path}: its journal has format {status['journal_format']}, the installed version continues format "
            f"{journal_format()}: unmount, and mount again"
        )
