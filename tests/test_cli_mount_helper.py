"""mount(8) and fstab: the options that they pass, and a real `mount -t gpufs`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import run
from support.watchdog import mounted_at, rescue

from gpufs.cli._errors import Failure
from gpufs.cli._main import rewrite_for_mount
from gpufs.cli.mount_helper import parse

ROOT = Path(__file__).resolve().parents[1]


def test_knobs_and_mount_options() -> None:
    assert parse("rw,memory=4G,allow_other,_netdev,nofail,x-systemd.requires=a.service,devices=2,noatime") == {
        "memory": "4G",
        "allow_other": "true",
        "devices": "2",
    }
    assert parse("rw,relatime,dev,suid,config=/etc/other.toml,allow_other=false") == {
        "config_file": "/etc/other.toml",
        "allow_other": "false",
    }
    assert parse("") == {}


@pytest.mark.parametrize("option", ["ro", "remount", "memory", "memroy=4G", "bind", "drop_privileges"])
def test_options_that_are_refused(option: str) -> None:
    with pytest.raises(Failure, match=option.split("=")[0]) as failure:
        parse(f"rw,{option}")
    assert failure.value.code == 2


def test_sloppy_tolerates_what_is_unknown() -> None:
    assert parse("rw,colour=blue", sloppy=True) == {}


@pytest.mark.parametrize(
    ("arguments", "rewritten"),
    [
        (["gpufs", "/mnt", "-o", "rw,dev,suid"], ["mount-helper", "gpufs", "/mnt", "-o", "rw,dev,suid"]),
        (["none", "/mnt", "-o", "rw"], ["mount-helper", "none", "/mnt", "-o", "rw"]),
        (["mount", "/mnt"], ["mount", "/mnt"]),
        (["status"], ["status"]),
        ([], []),
    ],
)
def test_calls_of_mount_fuse(arguments: list[str], rewritten: list[str]) -> None:
    assert rewrite_for_mount(arguments) == rewritten


@pytest.mark.parametrize("kind", ["gpufs", "fuse.gpufs"])
def test_mount_8(kind: str, tmp_path: Path) -> None:
    """In a mount namespace where /sbin and PATH have our helper; as root, with mount(8) and umount(8) themselves."""
    mountpoint, programs = tmp_path / "mnt", tmp_path / "bin"
    mountpoint.mkdir()
    programs.mkdir()
    gpufs = programs / "gpufs"
    gpufs.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m gpufs "$@"\n')
    gpufs.chmod(0o755)
    helper = programs / "mount.gpufs"
    helper.write_text((ROOT / "mount_helpers/mount.gpufs").read_text().replace("@GPUFS@", str(gpufs)))
    helper.chmod(0o755)
    # mount(8) looks for helpers in /sbin alone and cleans PATH: both are shown it by overlays of this namespace.
    script = f"""
        mount --make-rprivate /
        mkdir {tmp_path}/upper {tmp_path}/work
        sbin=$(readlink -f /sbin)
        mount -t tmpfs none {tmp_path}/work
        mkdir {tmp_path}/work/u {tmp_path}/work/w
        mount -t overlay overlay -o lowerdir=$sbin,upperdir={tmp_path}/work/u,workdir={tmp_path}/work/w $sbin
        cp {helper} {gpufs} $sbin/
        export PATH=$sbin:$PATH
        mount -t {kind} somewhere {mountpoint} -o driver=host,memory=64M,devices=2,nofail,_netdev
        echo hello >{mountpoint}/gpu1/x
        cat {mountpoint}/gpu1/x
        df --output=source {mountpoint} | tail -n 1
        {gpufs} umount {mountpoint}
    """
    try:
        done = run("unshare", "-m", "bash", "-euo", "pipefail", "-c", script, check=False)
        if done.returncode and "overlay" in done.stderr:
            pytest.skip("this kernel has no overlay file system")
        assert done.returncode == 0, done
        assert done.stdout.splitlines() == ["hello", "somewhere"]
    finally:
        if mounted_at(str(mountpoint)):
            rescue(str(mountpoint), None)


def test_fake_mounts_nothing(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "gpufs", "mount-helper", "x", tmp_path, "-f", "-o", "memory=64M")
    assert done.stdout == ""
    assert not os.path.ismount(tmp_path)
    bad: subprocess.CompletedProcess[str] = run(
        sys.executable, "-m", "gpufs", "mount-helper", "x", tmp_path, "-f", "-o", "memory=1", check=False
    )
    assert bad.returncode == 2
    assert bad.stderr.startswith("gpufs: memory: '1' (--memory) is not allowed")
