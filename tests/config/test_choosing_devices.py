"""Which GPUs a mount shows, in which order and under which names; when it takes host memory instead; old drivers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support import fake_gpu
from support.cli import fails, gpufs, gpufs_here
from support.mounting import GPUFS, Mounter
from support.processes import run
from support.vendors import HIP_FILE, kernel_shows
from support.watchdog import mounted_at

UUID = "GPU-a{}112233-4455-6677-8899-aabbccddeeff"  # of the fake CUDA library
HOST = ("--driver", "host", "--memory", "64M")


@pytest.fixture
def three(tmp_path: Path) -> dict[str, str]:
    """The environment in which CUDA has three GPUs."""
    return fake_gpu.environment(tmp_path, devices=3) | {"GPUFS_CONFIG": "/dev/null"}


def shown(path: Path) -> list[tuple[str, str, str]]:
    """The name, description and UUID of each device, as `gpufs status` and `gpufs df` agree on them."""
    status = json.loads(gpufs_here("status", "--json", path).stdout)["devices"]
    listed = json.loads(gpufs_here("df", "--json", path).stdout)
    assert [one["uuid"] for one in status] == [one["uuid"] for one in listed]
    return [(one["name"], one["description"], one["uuid"]) for one in status]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], [0, 1, 2]),
        (["--devices", "all"], [0, 1, 2]),
        (["--devices", "2"], [0, 1]),
        (["--devices", "2,"], [2]),
        (["--devices", "GPU-A2,0"], [2, 0]),
        (["-o", f"devices=1:{UUID.format(0)}"], [1, 0]),
    ],
)
def test_devices_are_chosen_in_order(
    options: list[str], wanted: list[int], mount: Mounter, three: dict[str, str]
) -> None:
    one = mount(*options, driver="cuda", environment=three)
    assert shown(one.path) == [(f"gpu{n}", f"fake device {d}", UUID.format(d)) for n, d in enumerate(wanted)]
    aliases = one.path / ".gpufs/by-uuid"
    assert sorted(os.listdir(aliases)) == sorted(UUID.format(d) for d in wanted)
    for place, device in enumerate(wanted):
        (aliases / UUID.format(device) / "file").write_bytes(b"%d" % device)
        assert (one.path / f"gpu{place}/file").read_bytes() == b"%d" % device
    with pytest.raises(PermissionError):
        (aliases / UUID.format(wanted[0])).unlink()
    assert (aliases.parent.stat().st_nlink, aliases.stat().st_nlink) == (3, 2)
    one.unmount()


def test_the_vendors_variables_choose_and_order_devices(mount: Mounter, three: dict[str, str], tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES: numbers and UUIDs up to the first that does not exist."""
    one = mount(driver="cuda", environment=three | {"CUDA_VISIBLE_DEVICES": "2,GPU-a0,-1,1"})
    assert [description for _, description, _ in shown(one.path)] == ["fake device 2", "fake device 0"]
    one.unmount()
    one = mount("--devices", "1,", driver="cuda", environment=three | {"CUDA_VISIBLE_DEVICES": "2,1"})
    assert [description for _, description, _ in shown(one.path)] == ["fake device 1"]
    one.unmount()
    hip = HIP_FILE.environment(tmp_path / "hip", FAKE_HIP_DEVICES="3", HIP_VISIBLE_DEVICES="1,0")
    one = mount("--devices", "GPU-c0,0", driver="hip", environment=hip)
    assert [description for _, description, _ in shown(one.path)] == ["fake device 0", "fake device 1"]
    one.unmount()


@pytest.mark.parametrize(
    ("driver", "wrong"), [("auto", "7"), ("auto", "5,"), ("cuda", "GPU-ff"), ("cuda", "0,0"), ("auto", "GPU-a,0")]
)
def test_a_device_that_does_not_exist_fails_with_a_list(
    driver: str, wrong: str, mountpoint: Path, three: dict[str, str]
) -> None:
    line = fails(1, "mount", mountpoint, "--driver", driver, "--devices", wrong, env=os.environ | three)
    assert all(UUID.format(number) in line for number in range(3))


def test_host_memory_is_never_taken_in_place_of_a_gpu(mountpoint: Path, tmp_path: Path) -> None:
    """Only without any GPU, and then a line says how much."""
    none = os.environ | {"GPUFS_CONFIG": "/dev/null"}
    assert "GPU-4f3e" in fails(1, "mount", mountpoint, "--devices", "GPU-4f3e", "--memory", "64M", env=none)
    assert "GPU-4f3e" in fails(2, "mount", mountpoint, "--devices", "GPU-4f3e", *HOST, env=none)
    for node in ("/dev/nvidiactl", "/dev/kfd"):
        there = none | kernel_shows(tmp_path / node[5:], node)
        line = fails(1, "mount", mountpoint, "--memory", "64M", env=there)
        assert node in line
        assert "--driver host" in line
    hidden = none | kernel_shows(tmp_path / "hidden", "/dev/nvidiactl") | {"CUDA_VISIBLE_DEVICES": "7"}
    assert "CUDA_VISIBLE_DEVICES=7" in fails(1, "mount", mountpoint, "--memory", "64M", env=hidden)
    assert not mounted_at(str(mountpoint))
    done = gpufs("mount", mountpoint, "--memory", "64M", "--devices", "2", env=none)
    gpufs("umount", mountpoint)
    assert "host memory" in done.stderr
    assert "64.0 MiB on each of 2" in done.stderr
    done = gpufs("mount", mountpoint, *HOST, env=none)
    gpufs("umount", mountpoint)
    assert done.stderr == ""


def over(version: str) -> dict[str, str]:
    """An environment in which the fake library of that version is found."""
    found = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return {**found, **fake_gpu.hip(version, FAKE_HIP_DEVICES="2")}


def test_an_old_version_moves_every_byte(tmp_path: Path) -> None:
    """Without virtual memory management, copies between devices, or any fastpath."""
    mountpoint, source, back = tmp_path / "mnt", tmp_path / "source", tmp_path / "back"
    mountpoint.mkdir()
    source.write_bytes(os.urandom(1 << 20) * 9 + b"end")
    run(*GPUFS, "mount", mountpoint, "--driver", "hip", env=over("rocm5"))
    try:
        run(*GPUFS, "cp", source, mountpoint / "gpu0/a")
        run("cp", mountpoint / "gpu0/a", mountpoint / "gpu1/b")
        run(*GPUFS, "cp", mountpoint / "gpu1/b", back)
        run("cmp", source, back)
        run("cmp", source, mountpoint / "gpu0/a")
    finally:
        run(*GPUFS, "umount", mountpoint)


def test_what_is_required_is_named(tmp_path: Path) -> None:
    failed = run(*GPUFS, "mount", tmp_path, "--driver", "hip", env=over("rocm4"), check=False)
    assert failed.returncode == 1
    missing = "libamdhip64.so.5 lacks hipHostRegister"
    assert failed.stderr == f"gpufs: hip is not available: {missing}; gpufs doctor says what to do\n"
    assert not os.path.ismount(tmp_path)
    said = run(*GPUFS, "doctor", env=over("rocm4"), check=False).stdout
    assert missing in said
    assert "install a newer version" in said
