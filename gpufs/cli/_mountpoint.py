"""Checks that a directory may become a mountpoint."""

import os
import stat
import sys
from errno import EACCES, ECONNABORTED, ENOTCONN, ETIMEDOUT
from typing import Final

from gpufs import mounting
from gpufs.cli import _mounts
from gpufs.cli._errors import Failure, failed

_PATIENCE: Final = 5.0  # seconds for the answer of a mount at the same path
# Directories that the daemon and `gpufs umount` need.
_NEEDED: Final = ("/bin", "/dev", "/etc", "/lib", "/proc", "/run", "/sbin", "/sys", "/usr")
# File systems of the kernel's interfaces.
_KERNELS: Final = frozenset({"proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs"})


def check(path: str, mountpoint: str) -> None:
    """Failure if nothing may be mounted there. ``path``: the mountpoint as the user wrote it, for messages."""
    if any(entry.mountpoint == mountpoint for entry in mounting.mounts()):
        raise Failure(f"{path}: {_how_it_is_mounted(mountpoint)}")
    try:
        status = os.stat(mountpoint)
    except FileNotFoundError:
        raise Failure(f"{path}: there is no such directory: make it first") from None
    except OSError as error:
        raise failed(error.errno or EACCES, path) from None
    if not stat.S_ISDIR(status.st_mode):
        raise Failure(f"{path}: not a directory")
    if hidden := _hidden(mountpoint):
        raise Failure(f"{path}: a mount there would hide {hidden}, which gpufs needs: mount on a directory of your own")
    if (kind := mounting.filesystem_type(status.st_dev)) in _KERNELS:
        raise Failure(f"{path}: is on a {kind} file system: mount on a directory of your own")
    if os.geteuid() != 0 and not os.access(mountpoint, os.W_OK | os.X_OK):
        raise Failure(f"{path}: {os.strerror(EACCES)} (plain users mount only on directories that they may write to)")


def _hidden(mountpoint: str) -> str | None:
    """A directory that gpufs needs and a mount there would hide, or None."""
    program = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    prefix = mountpoint.rstrip("/") + "/"
    for name in (*_NEEDED, program, sys.prefix, sys.base_prefix):
        place = os.path.realpath(name)
        if place == mountpoint or place.startswith(prefix):
            return name
    return None


def _how_it_is_mounted(mountpoint: str) -> str:
    # A file: the kernel may answer for the root from its cache.
    (answer,) = _mounts.read_files([os.path.join(mountpoint, ".gpufs/version")], _PATIENCE)
    if isinstance(answer, OSError) and answer.errno in (ENOTCONN, ECONNABORTED):
        return f"a gpufs whose daemon has died is mounted there: gpufs umount {mountpoint} cleans up"
    if isinstance(answer, OSError) and answer.errno == ETIMEDOUT:
        return f"a gpufs that does not answer is mounted there: gpufs umount --force {mountpoint} ends it"
    return "gpufs is mounted there already"
