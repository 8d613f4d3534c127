"""mount(8) and fstab: the options that they pass, and a real `mount -t gpufs`."""

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli import user_gpufs
from support.processes import NOBODY, plain_user, run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def with_helpers(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a script in a mount namespace where /sbin and PATH have our helpers.

    mount(8) looks for helpers in /sbin alone and cleans PATH: an overlay puts ours into both. What the script leaves
    mounted is gone with the namespace; its daemons end by that.
    """
    gpufs = tmp_path / "gpufs"
    command, environment = user_gpufs({})
    words = " ".join(f"{name}={value}" for name, value in {"PYTHONPATH": ROOT, **environment}.items())
    gpufs.write_text(f'#!/bin/sh\nexport {words}\nexec {" ".join(command)} "$@"\n')
    gpufs.chmod(0o755)
    helper = tmp_path / "mount.gpufs"
    helper.write_text((ROOT / "mount_helpers/mount.gpufs").read_text().replace("@GPUFS@", "gpufs"))
    helper.chmod(0o755)
    prepare = f"""
        mount --make-rprivate /
        mkdir {tmp_path}/work
        sbin=$(readlink -f /sbin)
        mount -t tmpfs none {tmp_path}/work
        mkdir {tmp_path}/work/u {tmp_path}/work/w
        mount -t overlay overlay -o lowerdir=$sbin,upperdir={tmp_path}/work/u,workdir={tmp_path}/work/w $sbin
        cp {helper} {gpufs} $sbin/
        export PATH=$sbin:$PATH
    """

    def with_them(script: str) -> subprocess.CompletedProcess[str]:
        done = run("unshare", "-m", "bash", "-euo", "pipefail", "-c", prepare + script, check=False)
        if done.returncode and "overlay" in done.stderr:
            pytest.skip("this kernel has no overlay file system")
        return done

    return with_them


@pytest.mark.parametrize("kind", ["gpufs", "fuse.gpufs"])
def test_mount_and_umount_of_the_system_work(
    kind: str, tmp_path: Path, with_helpers: Callable[[str], subprocess.CompletedProcess[str]]
) -> None:
    """Root uses mount(8) and umount(8)."""
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    done = with_helpers(
        f"""
        mount -t {kind} somewhere {mountpoint} -o driver=host,memory=64M,devices=2,nofail,_netdev,noexec
        echo hello >{mountpoint}/gpu1/x
        cat {mountpoint}/gpu1/x
        df --output=source {mountpoint} | tail -n 1
        mount -o remount,ro {mountpoint}
        (echo more >{mountpoint}/gpu1/x || true) 2>&1 | grep -o Read-only
        mount -o remount,rw {mountpoint}
        echo more >{mountpoint}/gpu1/x
        umount {mountpoint}
        findmnt {mountpoint} || echo gone
        mount -t {kind} somewhere {mountpoint} -o memory=x 2>&1 || echo $?
        mount -t {kind} somewhere {mountpoint} -o driver=host,memory=64M,ro
        (touch {mountpoint}/gpu0/x || true) 2>&1 | grep -o Read-only
        umount {mountpoint}
        """
    )
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert lines[:2] == ["hello", "somewhere"]
    assert lines[2:4] == ["Read-only", "gone"], done
    assert lines[4].startswith("gpufs: memory: 'x' (mount option memory=) is not allowed: a size such as")
    assert lines[5:] == ["1", "Read-only"]


def test_fstab_lines_work_for_root_and_users(
    tmp_path: Path, with_helpers: Callable[[str], subprocess.CompletedProcess[str]]
) -> None:
    """mount -a, and a line with `user` that a plain user mounts and unmounts by mount(8) and umount(8)."""
    if not os.stat("/bin/mount").st_mode & stat.S_ISUID:
        pytest.skip("mount(8) is not set-user-ID here")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
    mine, theirs, never = (tmp_path / name for name in ("mine", "a place", "never"))
    for folder in (mine, theirs, never):
        folder.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    escaped = str(theirs).replace(" ", "\\040")
    (tmp_path / "fstab").write_text(
        f"gpufs {mine} gpufs driver=host,memory=32M,nofail,_netdev,x-systemd.device-timeout=5 0 0\n"
        f"gpufs {escaped} gpufs driver=host,memory=32M,user,noauto 0 0\n"
        f"gpufs {never} gpufs driver=host,memory=32M,noauto 0 0\n"
    )
    as_nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups env HOME=/tmp"
    with plain_user():
        done = with_helpers(
            f"""
            mount --bind {tmp_path}/fstab /etc/fstab
            mount -a
            findmnt -no OPTIONS {mine} | grep -o ^rw
            findmnt {never} || echo not mounted
            mount -a
            umount {mine}
            ({as_nobody} mount {never} 2>&1 || echo refused with $?)
            {as_nobody} mount "{theirs}"
            findmnt -no OPTIONS "{theirs}" | grep -o noexec
            {as_nobody} sh -c 'echo his >"$0"/gpu0/x; cat "$0"/gpu0/x' "{theirs}"
            (cat "{theirs}"/gpu0/x || true) 2>&1 | grep -o 'Permission denied'
            {as_nobody} umount "{theirs}"
            findmnt "{theirs}" || echo gone
            """
        )
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert lines[:2] == ["rw", "not mounted"], done
    refused = lines.index("refused with 32")
    assert "may write to" in lines[refused - 1], lines
    assert lines[refused + 1 :] == ["noexec", "his", "Permission denied", "gone"], done
