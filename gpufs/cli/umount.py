"""gpufs umount: ends a mount and waits for its daemon."""

import functools
import os
import shlex
import signal
import time
from collections.abc import Sequence
from errno import EBUSY, EINVAL, EPERM
from typing import Any

import click

from gpufs import config, mounting, statistics
from gpufs.cli import _answers, _mounts, _queries
from gpufs.cli._main import complete_directories
from gpufs.cli._options import complete_mounts, for_each_mount, timeout_option
from gpufs.cli._output import Failure, complain, listed

_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_COPY_GRACE = 1.0  # seconds for the daemon to end where another mount namespace has a copy of the mount
_LEASES_TIMEOUT = 2.0  # seconds for the mount to name the programs that have memory attached
_BUSY_GRACE = 0.5  # seconds in which a process that has just been killed releases the mount
_BUSY_PAUSE = 0.05
_NOT_YOURS = "only root and the user who mounted it may unmount it"


@click.command(name="umount")
@click.argument("mountpoints", metavar="[MOUNTPOINT...]", nargs=-1, shell_complete=complete_mounts)
@click.option("-a", "--all", "every", is_flag=True, help="Unmount every mount of yours.")
@click.option(
    "--force", is_flag=True, help="Unmount even if in use: open files fail from now on. Also ends a mount that hangs."
)
@click.option("--lazy", is_flag=True, help="Detach the mount now; it ends when nobody uses it any more. Does not wait.")
@click.option(
    "--save",
    "save_as",
    metavar="DEST",
    shell_complete=complete_directories,
    help="Save the files first, as gpufs save does; if that fails, or one is changed in this time, do not unmount.",
)
@timeout_option(config.UMOUNT_TIMEOUT)
def command(
    mountpoints: tuple[str, ...], every: bool, force: bool, lazy: bool, save_as: str | None, timeout: float
) -> int:
    """Unmount MOUNTPOINT and wait for the end of its daemon.

    Its files are gone then: they are memory (--save keeps them). Refused while the mount is in use, unless --force or
    --lazy is given. Cleans up a mount whose daemon has died.
    """
    if save_as is not None:
        if every or lazy or len(mountpoints) != 1:
            raise click.UsageError("--save takes one MOUNTPOINT, and not --lazy: a program could change files later.")
        from gpufs.cli._save_run import SaveOptions, save  # which others do without

        _check_can_end(_mounts.find(mountpoints[0]), force=force)
        report = save(mountpoints[0], save_as, SaveOptions(command="save"), timeout, last=True)
        if not report.is_good:
            return report.end()
    work = functools.partial(umount, force=force, lazy=lazy, timeout=timeout)
    return for_each_mount(mountpoints, every, work)


def _check_can_end(entry: mounting.MountEntry, *, force: bool) -> None:
    """Raise Failure if the mount cannot be unmounted, before a save that would be useless."""
    if os.geteuid() not in (0, entry.uid):
        raise Failure(f"{entry.mountpoint}: {_NOT_YOURS}")
    if not force and (users := _mounts.users(entry.mountpoint)):
        raise Failure(f"{entry.mountpoint}: in use by {', '.join(users)}: nothing is saved")


def umount(path: str, *, force: bool, lazy: bool, timeout: float) -> None:
    """Unmount one mountpoint. Raise Failure."""
    try:
        entry = _mounts.mounted_at(path)
    except Failure as missing:
        _end_left_over(path, missing, force=force, timeout=timeout)
        return
    mountpoint = entry.mountpoint
    with _mounts.open_daemons(mountpoint, entry) as daemons:
        if force and not daemons and _is_shown({entry.device}, except_at=mountpoint):
            force, lazy = False, True  # cutting the connection would end the mount, with all its files
        leases = _leases_of(entry, daemons, timeout)
        if force:
            _signal(daemons, signal.SIGTERM)
            _wait(daemons, min(_GRACE, timeout))
            if mounting.entry_of(mountpoint) is not None:
                mounting.abort(entry)
                _unmount(mountpoint, force=True, lazy=lazy)
        else:
            _unmount(mountpoint, force=False, lazy=lazy)
        # The file of registered memory is gone, and its program has the memory.
        for text in _queries.by_program([lease for lease in leases if lease["mode"] != "registered"]):
            complain(f"{path}: still attached: {text}: the memory is released when that program ends")
        if lazy and not force:
            return
        # After --force the connection is aborted and the files are gone: SIGKILL loses nothing.
        if force:
            left = _kill(daemons, timeout)
        else:
            # Without allow_other nobody but the user who mounted may use the copies that this user cannot see.
            seen = os.geteuid() == 0 or "allow_other" not in entry.options.split(",")
            left = _wait_unless_used(daemons, mountpoint, {entry.device}, timeout, end_unused=seen and not leases)
        # In another process: the user who mounted owns the folder, and its file system may not answer.
        _answers.ask([functools.partial(statistics.remove_dead, entry.device, entry.uid)], str, timeout)
        if left and force:
            raise Failure(f"{path}: unmounted, but {_named(left)} has not ended within {timeout:g} seconds")
        if left and (copied := _copies({entry.device})):
            raise Failure(f"{path}: unmounted here, but {copied}")
        if left:
            text = f"{path}: unmounted, but {_named(left)} has not ended within {timeout:g} seconds"
            raise Failure(f"{text} (--force ends it)")


def _leases_of(entry: mounting.MountEntry, daemons: Sequence[_mounts.Process], timeout: float) -> list[dict[str, Any]]:
    """Return the mount's leases, none if it does not answer. Asking a stopped daemon would keep the mount busy."""
    if not daemons or any(_mounts.is_stopped(daemon.pid) for daemon in daemons):
        return []
    (leases,) = _queries.leases_of([entry], min(timeout, _LEASES_TIMEOUT))
    return [] if isinstance(leases, OSError) else leases


def _end_left_over(path: str, missing: Failure, *, force: bool, timeout: float) -> None:
    """End the daemon of a mount that is no longer visible. Raise ``missing`` if it has none."""
    with _mounts.open_daemons(_mounts.absolute(path)) as daemons:
        devices = {device for daemon in daemons for device in _mounts.devices_served(daemon.pid)}
        # Files of a mount that was detached lazily have no path, so it is not known whether they are in use.
        left = list(daemons)
        if not force:
            left = _wait_unless_used(daemons, path, devices, min(_GRACE, timeout), end_unused=False)
        if not left:
            raise missing
        if not force:
            text = f"{path}: no gpufs is mounted there any more, but "
            if copied := _copies(devices):
                raise Failure(text + copied)
            raise Failure(f"{text}{_named(left)} serves a detached mount in use (--force ends it)")
        _signal(left, signal.SIGTERM)
        if left := _kill(left, timeout):
            raise Failure(f"{path}: {_named(left)} has not ended")


def _named(processes: Sequence[_mounts.Process]) -> str:
    return f"its process ({', '.join(str(process.pid) for process in processes)})"


def _copies(devices: set[str]) -> str:
    """Return what other mount namespaces have of a mount, and how to end that; empty if nothing is known."""
    copies = _mounts.copies(devices)
    if not copies:
        return ""
    first = copies[-1]  # a bind mount comes after the copy that the namespace began with
    holders = listed(list(dict.fromkeys(f"{copy.program} ({copy.pid})" for copy in copies)))
    command = f"nsenter -t {first.pid} -m umount --lazy {shlex.quote(first.mountpoint)}"
    return f"used in another mount namespace, by {holders}: {command} ends one use, --force ends the mount"


def _wait_unless_used(
    daemons: Sequence[_mounts.Process], mountpoint: str, devices: set[str], timeout: float, *, end_unused: bool
) -> list[_mounts.Process]:
    """Wait for the daemons of a mount that is unmounted here. Return those that have not ended.

    Each mount namespace that begins while a mount exists has a copy of it, possibly for days. With ``end_unused``,
    copies that nobody uses do not keep the mount: its daemons get SIGTERM. A copy is unused if it is at the mount's own
    path and no process has a file or a directory there. The wait is brief while there are other copies.
    """
    left = _mounts.wait_for_end(daemons, min(_COPY_GRACE, timeout))
    if not left:
        return left
    copies = _mounts.copies(devices)
    used = _is_shown(devices) or any(copy.mountpoint != mountpoint for copy in copies) or _mounts.users(mountpoint)
    if end_unused and not used:
        _signal(left, signal.SIGTERM)
    elif copies:
        return left
    return _wait(left, timeout)


def _wait(processes: Sequence[_mounts.Process], timeout: float) -> list[_mounts.Process]:
    """Wait for processes that got SIGTERM, which a stopped one does not handle. Return those that have not ended."""
    stopped = [process for process in processes if _mounts.is_stopped(process.pid)]
    return stopped + _mounts.wait_for_end([process for process in processes if process not in stopped], timeout)


def _kill(processes: Sequence[_mounts.Process], timeout: float) -> list[_mounts.Process]:
    """Wait for processes that got SIGTERM, then send SIGKILL. Return those that have still not ended."""
    left = _wait(processes, min(_GRACE, timeout))
    _signal(left, signal.SIGKILL)
    return _mounts.wait_for_end(left, max(_GRACE, timeout))  # freeing its memory can take long


def _is_shown(devices: set[str], except_at: str = "") -> bool:
    """Return whether one of the mounts is at any place that we see, except that one."""
    return any(entry.device in devices and entry.mountpoint != except_at for entry in mounting.mounts())


def _unmount(mountpoint: str, *, force: bool, lazy: bool) -> None:
    deadline = time.monotonic() + _BUSY_GRACE
    while True:
        try:
            mounting.unmount(mountpoint, force=force, lazy=lazy)
            return
        except OSError as error:
            if error.errno == EBUSY and force and not lazy:
                lazy = True  # the connection is aborted; a working directory there only keeps the name busy
            elif error.errno != EBUSY:
                _explain(mountpoint, error)
                return
            elif (users := _mounts.users(mountpoint)) or time.monotonic() >= deadline:
                by = f" by {', '.join(users)}" if users else ""
                raise Failure(f"{mountpoint}: in use{by} (--lazy detaches it now, --force ends what runs)") from None
            else:
                time.sleep(_BUSY_PAUSE)


def _explain(mountpoint: str, error: OSError) -> None:
    """Raise Failure unless another process has unmounted it."""
    entry = mounting.entry_of(mountpoint)
    if error.errno == EINVAL and entry is None:
        return
    if error.errno == EPERM and (entry is None or entry.uid != os.geteuid()):
        raise Failure(f"{mountpoint}: {_NOT_YOURS}") from None
    raise Failure(f"{mountpoint}: {error.strerror or os.strerror(error.errno or EINVAL)}") from None


def _signal(processes: Sequence[_mounts.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.signal(number)
        except PermissionError:
            text = "serves the mount and belongs to another user: only that user and root may end it"
            raise Failure(f"process {process.pid} {text}") from None
