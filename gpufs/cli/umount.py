"""gpufs umount: ends a mount and waits for its daemon."""

import functools
import os
import signal
from errno import EBUSY, EINVAL, EPERM
from typing import Any

import click

from gpufs import config, mounting, statistics
from gpufs.cli import _answers, _leases, _mounts
from gpufs.cli._errors import Failure, complain
from gpufs.cli._knobs import complete_mounts, timeout_option

_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_LEASES_TIMEOUT = 2.0  # seconds for the mount to name the programs that have memory attached


@click.command(name="umount", short_help="Unmount, and wait for the end of the mount.")
@click.argument("mountpoints", metavar="[MOUNTPOINT...]", nargs=-1, shell_complete=complete_mounts)
@click.option("-a", "--all", "every", is_flag=True, help="Unmount every mount of yours.")
@click.option(
    "--force", is_flag=True, help="Unmount even if in use: open files fail from now on. Also ends a mount that hangs."
)
@click.option("--lazy", is_flag=True, help="Detach the mount now; it ends when nobody uses it any more. Does not wait.")
@timeout_option(config.UMOUNT_TIMEOUT)
def command(mountpoints: tuple[str, ...], every: bool, force: bool, lazy: bool, timeout: float) -> int:
    """Unmount MOUNTPOINT and wait for the end of its daemon.

    Its files are gone then: they are memory. Refused while the mount is in use, unless --force or --lazy is given.
    Cleans up a mount whose daemon has died.
    """
    if every == bool(mountpoints):
        raise click.UsageError("Give either a MOUNTPOINT or --all.")
    if every:
        # A mount inside another one comes later in the list and keeps the other one busy.
        mine = [entry for entry in mounting.mounts() if entry.uid == os.geteuid()]
        mountpoints = tuple(entry.mountpoint for entry in reversed(mine))
    code = 0
    for mountpoint in mountpoints:
        try:
            umount(mountpoint, force=force, lazy=lazy, timeout=timeout)
        except Failure as failure:
            # The others are unmounted all the same.
            complain(str(failure))
            code = code or failure.code
    return code


def umount(path: str, *, force: bool, lazy: bool, timeout: float) -> None:
    """Unmounts one mountpoint. Raises Failure."""
    try:
        entry = _mounts.mounted_at(path)
    except Failure as missing:
        _end_left_over(path, missing, force=force, timeout=timeout)
        return
    mountpoint = entry.mountpoint
    pids = _mounts.daemons(mountpoint, entry)
    if force and not pids and _is_bound(entry):
        force, lazy = False, True  # cutting the connection would end the mount, with all its files
    leases = _leases_of(entry, pids, timeout)
    if force:
        _signal(pids, signal.SIGTERM)
        # A stopped process does not handle SIGTERM.
        _mounts.wait_for_end([pid for pid in pids if not _mounts.is_stopped(pid)], min(_GRACE, timeout))
        if _is_mounted(mountpoint):
            mounting.abort(entry)
            _unmount(mountpoint, force=True, lazy=lazy)
    else:
        _unmount(mountpoint, force=False, lazy=lazy)
    for lease in leases:
        if lease["mode"] == "registered":
            continue  # its program has the memory, and the file is gone
        complain(f"{path}: still attached: {_leases.named(lease)}: the memory is released when that program ends")
    if lazy and not force:
        return
    # After --force the connection is aborted and the files are gone: SIGKILL loses nothing.
    left = _kill(pids, timeout) if force else _mounts.wait_for_end(pids, timeout)
    # In another process: the user who mounted owns the folder, and its file system may not answer.
    _answers.ask([functools.partial(statistics.remove_dead, entry.device, entry.uid)], str, timeout)
    if left:
        text = f"{path}: unmounted, but {_named(left)} has not ended within {timeout:g} seconds"
        raise Failure(text if force else f"{text} (--force ends it)")


def _leases_of(entry: mounting.MountEntry, pids: list[int], timeout: float) -> list[dict[str, Any]]:
    """The mount's leases, none if it does not answer. A stopped daemon is not asked: that would keep the mount busy."""
    if not pids or any(map(_mounts.is_stopped, pids)):
        return []
    (leases,) = _leases.collect([entry], min(timeout, _LEASES_TIMEOUT))
    return [] if isinstance(leases, OSError) else leases


def _end_left_over(path: str, missing: Failure, *, force: bool, timeout: float) -> None:
    """Ends the daemon of a mount that is no longer visible. Raises ``missing`` if there is none."""
    pids = _mounts.daemons(_mounts.absolute(path))
    if not force:
        pids = _mounts.wait_for_end(pids, min(_GRACE, timeout))
    if not pids:
        raise missing
    if not force:
        raise Failure(
            f"{path}: no gpufs is mounted there any more, but {_named(pids)} serves a detached mount in use "
            "(--force ends it)"
        )
    _signal(pids, signal.SIGTERM)
    if left := _kill(pids, timeout):
        raise Failure(f"{path}: {_named(left)} has not ended")


def _named(pids: list[int]) -> str:
    return f"its process ({', '.join(map(str, pids))})"


def _kill(pids: list[int], timeout: float) -> list[int]:
    """Waits for processes that got SIGTERM, then sends SIGKILL. Returns those that have still not ended."""
    left = [pid for pid in pids if _mounts.is_stopped(pid)]
    left += _mounts.wait_for_end([pid for pid in pids if pid not in left], min(_GRACE, timeout))
    _signal(left, signal.SIGKILL)
    return _mounts.wait_for_end(left, max(_GRACE, timeout))  # freeing its memory can take long


def _is_bound(entry: mounting.MountEntry) -> bool:
    """Whether the mount is also at another place."""
    return any(other.device == entry.device and other.mountpoint != entry.mountpoint for other in mounting.mounts())


def _is_mounted(mountpoint: str) -> bool:
    return any(entry.mountpoint == mountpoint for entry in mounting.mounts())


def _unmount(mountpoint: str, *, force: bool, lazy: bool) -> None:
    try:
        mounting.unmount(mountpoint, force=force, lazy=lazy)
    except OSError as error:
        if error.errno == EBUSY and force and not lazy:
            # The connection is aborted; a working directory there only keeps the name busy.
            _unmount(mountpoint, force=True, lazy=True)
            return
        if error.errno == EBUSY:
            users = _mounts.users(mountpoint)
            by = f" by {', '.join(users)}" if users else ""
            raise Failure(f"{mountpoint}: in use{by} (--lazy detaches it now, --force ends what runs)") from None
        if error.errno == EINVAL and not _is_mounted(mountpoint):
            return  # another process has unmounted it
        entry = mounting.entry_of(mountpoint)
        if error.errno == EPERM and (entry is None or entry.uid != os.geteuid()):
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
                f"process {pid} serves the mount and belongs to another user: only that user and root may end it"
            ) from None
