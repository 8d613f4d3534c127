"""gpufs umount: ends a mount and waits for its process."""

import functools
import os
import signal
from errno import EBUSY, EINVAL, EPERM
from typing import Any

import click

from gpufs import mounting, statistics
from gpufs.cli import _mounts
from gpufs.cli._errors import Failure, complain
from gpufs.cli._knobs import complete_mounts, knob_options, settings

_GRACE = 5.0  # seconds that a process which was asked to end has for that


@click.command(name="umount")
@click.argument("mountpoints", metavar="MOUNTPOINT...", nargs=-1, required=True, shell_complete=complete_mounts)
@click.option("--force", is_flag=True, help="End what runs: open files fail from now on. Also for a mount that hangs.")
@click.option("--lazy", is_flag=True, help="Detach it now; it ends when the last user has gone. Does not wait.")
@knob_options("umount")
def command(mountpoints: tuple[str, ...], force: bool, lazy: bool, **arguments: Any) -> int:
    """Unmount MOUNTPOINT and wait for the end of its process.

    The files in it are gone then: they are memory. Refused while somebody uses it, unless --force or --lazy is given.
    A mount whose process has died is cleaned up.
    """
    timeout: float = settings("umount", arguments)["umount_timeout"]
    code = 0
    for mountpoint in mountpoints:
        try:
            umount(mountpoint, force=force, lazy=lazy, timeout=timeout)
        except Failure as failure:
            # One that stays is no reason to leave the others.
            complain(str(failure))
            code = code or failure.code
    return code


def umount(path: str, *, force: bool, lazy: bool, timeout: float) -> None:
    """Unmounts one mountpoint. Failure, with one line, where that cannot be."""
    try:
        entry = _mounts.find(path)
    except Failure as missing:
        _end_left_over(path, missing, force=force, timeout=timeout)
        return
    mountpoint = entry.mountpoint
    pids = _mounts.daemons(mountpoint, entry)
    if force:
        _signal(pids, signal.SIGTERM)
        # One that is stopped cannot hear it.
        _mounts.wait_for_end([pid for pid in pids if not _mounts.is_stopped(pid)], min(_GRACE, timeout))
        if _is_mounted(mountpoint):
            mounting.abort(entry)
            _unmount(mountpoint, force=True, lazy=lazy)
    else:
        _unmount(mountpoint, force=False, lazy=lazy)
    if lazy and not force:
        return
    # By force its connection is cut and its files are gone: there is nothing left that it could lose.
    left = _kill(pids, timeout) if force else _mounts.wait_for_end(pids, timeout)
    # By another process: the folder is the mount's user's, and may be on a file system that does not answer.
    _mounts.ask([functools.partial(_forget_counters, entry)], timeout)
    if left:
        text = f"{path}: unmounted, but {_named(left)} has not ended within {timeout:g} seconds"
        raise Failure(text if force else f"{text} (--force ends it)")


def _forget_counters(entry: mounting.MountEntry) -> bytes:
    statistics.remove_dead(entry.device, entry.uid)
    return b""


def _end_left_over(path: str, missing: Failure, *, force: bool, timeout: float) -> None:
    """Where no mount can be seen: the process of one that lives on elsewhere. ``missing`` without such a process."""
    pids = _mounts.daemons(_mounts.absolute(path))
    if not force:
        pids = _mounts.wait_for_end(pids, min(_GRACE, timeout))
    if not pids:
        raise missing
    if not force:
        raise Failure(
            f"{path}: no gpufs is mounted there any more, but {_named(pids)} serves one that was and is still in use "
            "(--force ends it)"
        )
    _signal(pids, signal.SIGTERM)
    if left := _kill(pids, timeout):
        raise Failure(f"{path}: {_named(left)} has not ended")


def _named(pids: list[int]) -> str:
    return f"its process ({', '.join(map(str, pids))})"


def _kill(pids: list[int], timeout: float) -> list[int]:
    """Ends processes that were asked to end, those that are stopped at once. Returns those that it did not end."""
    left = [pid for pid in pids if _mounts.is_stopped(pid)]
    left += _mounts.wait_for_end([pid for pid in pids if pid not in left], min(_GRACE, timeout))
    _signal(left, signal.SIGKILL)
    return _mounts.wait_for_end(left, max(_GRACE, timeout))  # the system may be long about freeing its memory


def _is_mounted(mountpoint: str) -> bool:
    return any(entry.mountpoint == mountpoint for entry in mounting.mounts())


def _unmount(mountpoint: str, *, force: bool, lazy: bool) -> None:
    try:
        mounting.unmount(mountpoint, force=force, lazy=lazy)
    except OSError as error:
        if error.errno == EBUSY and force and not lazy:
            # Its connection has been cut; who still stands in it only keeps the name busy.
            _unmount(mountpoint, force=True, lazy=True)
            return
        if error.errno == EBUSY:
            users = _mounts.users(mountpoint)
            by = f" by {', '.join(users)}" if users else ""
            raise Failure(f"{mountpoint}: in use{by} (--lazy detaches it now, --force ends what runs)") from None
        if error.errno == EINVAL and not _is_mounted(mountpoint):
            return  # somebody else was faster
        if error.errno == EPERM:
            raise Failure(f"{mountpoint}: only root and the user who mounted it may unmount it") from None
        raise Failure(f"{mountpoint}: {error.strerror or os.strerror(error.errno or EINVAL)}") from None


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            raise Failure(
                f"process {pid} serves the mount and is another user's: only he and root may end it"
            ) from None
