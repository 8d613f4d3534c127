"""gpufs mount: starts a mount and returns when it answers."""

import os
import shutil
import stat
import sys
from errno import EACCES, ECONNABORTED, ENODEV, ENOTCONN, ENXIO, ETIMEDOUT
from typing import Any, NoReturn

import click

from gpufs import config, mounting
from gpufs.cli import _mounts
from gpufs.cli._errors import Failure, failed
from gpufs.cli._launch import Request, launch, run_in_foreground
from gpufs.cli._main import complete_directories, knob_options, settings
from gpufs.cli._options import origin, parse

FUSE_DEVICE = "/dev/fuse"
_PATIENCE = 2.0  # seconds for the answer of a mount that is in the way


@click.command(name="mount")
@click.argument("mountpoint", shell_complete=complete_directories)
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="OPTIONS",
    help="Options as mount(8) has them, separated by commas: ro, noexec, noatime, ..., and those below as name=value.",
)
@knob_options("mount")
def command(mountpoint: str, options: tuple[str, ...], **arguments: Any) -> None:
    """Mount the devices' memory at MOUNTPOINT.

    MOUNTPOINT is a directory. Below it each device is a directory, gpu0, gpu1, ...; a file there is memory of that
    device. The mount is served by a process of its own; this command returns when it answers, or fails and leaves
    nothing behind.
    """
    given = parse(",".join(options))
    if given.remount:
        raise Failure("remount is for mount(8): mount -o remount,... MOUNTPOINT", 2)
    named = {name for name, value in arguments.items() if value not in (None, ())}
    for name, text in given.knobs.items():
        if name in named:
            raise Failure(f"{name} is given twice, by an option of its own and by -o", 2)
        arguments[name] = text
    chosen = settings(arguments, said_by=lambda knob: origin(knob) if knob.name in given.knobs else knob.option)
    mount(mountpoint, chosen, flags=given.flags)


def mount(path: str, chosen: config.Settings, source: str = "gpufs", flags: tuple[str, ...] = ()) -> None:
    """Mounts at a path. Failure or ConfigError, one line each, where that cannot be."""
    mountpoint = _mounts.absolute(path)
    _check_mountpoint(path, mountpoint)
    _check_fuse(allow_other=chosen["allow_other"])
    if chosen["driver"] == "host":
        config.host_memory(chosen["memory"], chosen["devices"])
    foreground = bool(chosen["foreground"])
    request = Request(mountpoint, source, dict(chosen.values), foreground, flags)
    if foreground:
        _become(request)
    answer = launch(request, chosen["mount_timeout"])
    for note in answer.get("notes", ()):
        print(f"gpufs: {note}", file=sys.stderr)


def _become(request: Request) -> NoReturn:
    sys.stdout.flush()
    run_in_foreground(request)


def _check_mountpoint(path: str, mountpoint: str) -> None:
    if any(entry.mountpoint == mountpoint for entry in mounting.mounts()):
        raise Failure(f"{path}: {_how_it_is_mounted(mountpoint)}")
    try:
        mode = os.stat(mountpoint).st_mode
    except OSError as error:
        raise failed(error.errno or EACCES, path) from None
    if not stat.S_ISDIR(mode):
        raise Failure(f"{path}: not a directory")
    if os.geteuid() != 0 and not os.access(mountpoint, os.W_OK | os.X_OK):
        raise Failure(f"{path}: {os.strerror(EACCES)} (a user can only mount on a directory that he may write to)")


def _how_it_is_mounted(mountpoint: str) -> str:
    # Asked for a file: what is known about the root may still be in the kernel's cache.
    (answer,) = _mounts.read_files([os.path.join(mountpoint, ".gpufs/version")], _PATIENCE)
    if isinstance(answer, OSError) and answer.errno in (ENOTCONN, ECONNABORTED):
        return f"a gpufs whose process has died is mounted there: gpufs umount {mountpoint} cleans up"
    if isinstance(answer, OSError) and answer.errno == ETIMEDOUT:
        return f"a gpufs that does not answer is mounted there: gpufs umount --force {mountpoint} ends it"
    return "gpufs is mounted there already"


def _check_fuse(*, allow_other: bool) -> None:
    try:
        fd = os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Failure(
            f"there is no {FUSE_DEVICE}: this kernel or container offers no FUSE (as root: modprobe fuse)"
        ) from None
    except OSError as error:
        if error.errno in (ENODEV, ENXIO):
            raise Failure(f"{FUSE_DEVICE}: the kernel has no FUSE (as root: modprobe fuse)") from None
        raise failed(error.errno or EACCES, FUSE_DEVICE) from None
    os.close(fd)
    if os.geteuid() == 0:
        return
    if not shutil.which("fusermount3"):
        raise Failure("fusermount3 is needed to mount as a user: install the package fuse3")
    if allow_other and not _users_may_allow_other():
        raise Failure("--allow-other is for root alone here, as long as /etc/fuse.conf does not say user_allow_other")


def _users_may_allow_other() -> bool:
    try:
        with open("/etc/fuse.conf", encoding="utf-8", errors="replace") as file:
            return any(line.strip() == "user_allow_other" for line in file)
    except OSError:
        return False
