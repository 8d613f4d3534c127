"""Failures that programs distinguish by class."""

from __future__ import annotations

import errno
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from support.cli import gpufs as command
from support.data import MIB, noise
from support.mounting import Mounter
from support.processes import run

import gpufs

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, and sets a limit")


def caught(kind: type[OSError], number: int, call: Callable[..., Any], *arguments: Any) -> OSError:
    with pytest.raises(kind) as failure:
        call(*arguments)
    assert failure.value.errno == number
    return failure.value


def test_what_is_not_on_a_mount(root: Path, host: Path) -> None:
    (host / "file").write_bytes(b"1234")
    caught(gpufs.NotOnMount, errno.EXDEV, gpufs.attach, host / "file")
    caught(gpufs.NotOnMount, errno.EXDEV, gpufs.attach_many, [host / "file"])
    caught(gpufs.NotOnMount, errno.EXDEV, gpufs.register, numpy.zeros(8), host / "new")
    refused = caught(gpufs.CopyError, errno.EXDEV, gpufs.copy, host / "file", host / "copy")
    again = pickle.loads(pickle.dumps(refused))
    assert isinstance(again, gpufs.NotOnMount)
    assert (type(again), again.errno, str(again)) == (type(refused), errno.EXDEV, str(refused))


def test_a_device_that_is_full(mount: Mounter, host: Path) -> None:
    small = mount(memory=16 * MIB)
    (host / "file").write_bytes(noise(20 * MIB))
    failure = caught(gpufs.DeviceFull, errno.ENOSPC, gpufs.copy, host / "file", small.device)
    assert isinstance(failure, gpufs.CopyError)
    hole = small.device / "hole"
    hole.touch()
    os.truncate(hole, 20 * MIB)
    caught(gpufs.DeviceFull, errno.ENOSPC, gpufs.attach, hole, "r+")


def test_a_full_disk_is_not_a_full_device(root: Path, host: Path) -> None:
    (root / "file").write_bytes(noise(4 * MIB))
    disk = host / "disk"
    disk.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk)
    try:
        failure = caught(gpufs.CopyError, errno.ENOSPC, gpufs.copy, root / "file", disk)
        assert not isinstance(failure, gpufs.DeviceFull)
    finally:
        run("umount", disk)


def test_a_limit_that_is_exceeded(root: Path) -> None:
    folder = root / "limited"
    folder.mkdir()
    command("quota", "set", folder, "4M")
    hole = folder / "hole"
    hole.touch()
    os.truncate(hole, 8 * MIB)
    caught(gpufs.QuotaExceeded, errno.EDQUOT, gpufs.attach, hole, "r+")


@pytest.mark.complains
def test_a_daemon_that_has_died(mount: Mounter, host: Path) -> None:
    dead = mount("--no-auto-unmount")
    (dead.device / "file").write_bytes(noise(4 * MIB))
    (host / "file").write_bytes(noise(4 * MIB))
    dead.signal(signal.SIGKILL)
    dead.daemon.wait()
    caught(gpufs.DaemonDied, errno.ENOTCONN, gpufs.attach, dead.device / "file")
    array = numpy.zeros(MIB, "u1")
    caught(gpufs.DaemonDied, errno.ENOTCONN, gpufs.register, array, dead.device / "registered")
    for source, destination in ((host / "file", dead.device / "copy"), (dead.device / "file", host / "copy")):
        failure = caught(gpufs.DaemonDied, errno.ENOTCONN, gpufs.copy, source, destination)
        assert isinstance(failure, gpufs.CopyError)
