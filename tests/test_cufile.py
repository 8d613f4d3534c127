"""NVIDIA's cuFile as the fastpath of real mounts, over libraries built for the tests, which record their calls."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.data import KIB, MIB, assert_same, noise
from support.fastpath import BUILT, VendorMount, file_systems, kernel_shows
from support.mounting import GPUFS, Mounter
from support.processes import run

CHUNK = 256 * KIB
WHOLE = 1 << 62  # as much as is asked for
MODULE = ("/proc/driver/nvidia-fs/version", "/dev/nvidia-fs0")
MAY_COPY_THROUGH_HOST = "2"

Maker = Callable[..., VendorMount]


def answer(result: int = 0, error: int = 0, count: int = WHOLE) -> str:
    """How a call ends: what it returns if below 0, what errno is left as, and the bytes that it moves at most."""
    return f"{result}:{error}:{count}"


@pytest.fixture
def disk() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="gpufs-cufile-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


def environment(
    tmp_path: Path, *plans: str, library: str | None = "gpufs_fake_cufile", module: bool = True, **variables: str
) -> dict[str, str]:
    libraries = tmp_path / "libraries"
    libraries.mkdir(exist_ok=True)
    (libraries / "libcuda.so.1").symlink_to(BUILT / "fake_cuda" / "libgpufs_fake_cuda.so")
    if library is not None:
        (libraries / "libcufile.so.0").symlink_to(BUILT / "fake_cufile" / library / "libcufile.so.0")
    return {
        **kernel_shows(tmp_path / "kernel", *(MODULE if module else ())),
        "LD_LIBRARY_PATH": str(libraries),
        "FAKE_CUFILE_RECORDS": str(tmp_path / "records"),
        "FAKE_CUFILE_PLANS": ",".join(plans),
        **variables,
    }


@pytest.fixture
def make(mount: Mounter, tmp_path: Path, disk: Path) -> Maker:
    if not file_systems(disk) & {"ext4", "xfs"}:
        pytest.skip(f"no file system for the fastpath at {disk}: {file_systems(disk)}")

    def made(*plans: str, backing: Path = disk, **named: Any) -> VendorMount:
        words = ["--backing", f"there={backing}", "--io-chunk-bytes", str(CHUNK), "--io-workers", "1"]
        one = mount(*words, driver="cuda", memory=256 * MIB, environment=environment(tmp_path, *plans, **named))
        return VendorMount(one, backing, tmp_path / "records")

    return made


def lies_on(root: Path, path: Path, place: str) -> None:
    """The kernel says that the path's block device is there."""
    device = os.stat(path).st_dev
    link = root / "sys/dev/block" / f"{os.major(device)}:{os.minor(device)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(place)


def test_plain_cp_both_ways(make: Maker) -> None:
    """No byte by way of the host: the calls cover the file, and the other way has moved none."""
    one = make()
    (one.there / "source").write_bytes(noise(4 * MIB))
    run("cp", one.shown / "source", one.mount.device / "copied")
    run("cp", one.mount.device / "copied", one.shown / "back")
    assert_same((one.there / "back").read_bytes(), noise(4 * MIB))
    calls = one.calls()
    for name, path in (("cuFileRead", "source"), ("cuFileWrite", "back")):
        own = [call for call in calls if call.name == name]
        assert {call.path for call in own} == {str(one.there / path)}
        assert [(call.offset, call.bytes, call.rest) for call in own] == [
            (n * CHUNK, CHUNK, (CHUNK,)) for n in range(16)
        ]
    assert len(calls) == 32
    for direction in ("load", "store"):
        found = one.counters(direction)
        assert (found["fastpath"]["bytes"], found["fallback"]["bytes"]) == (4 * MIB, 0)
        assert found["refusals"] == {}


def test_unaligned_requests_are_split(make: Maker) -> None:
    one = make()
    (one.there / "source").write_bytes(noise(2 * MIB + 777))
    done = run(*GPUFS, "cp", "--json", "--fastpath", "require", one.there / "source", one.mount.device / "file")
    assert json.loads(done.stdout)["paths"] == {"fastpath": 2 * MIB, "fallback": 777}
    assert_same((one.mount.device / "file").read_bytes(), noise(2 * MIB + 777))
    assert sum(call.bytes for call in one.calls()) == 2 * MIB


@pytest.mark.parametrize("plan", [answer(-1, errno.ENODEV), answer(-5030)], ids=["ENODEV", "the library's own"])
def test_what_is_left_goes_by_fallback(make: Maker, plan: str) -> None:
    one = make(answer(), answer(), plan)
    (one.there / "source").write_bytes(noise(2 * MIB))
    run("cp", one.shown / "source", one.mount.device / "file")
    assert_same((one.mount.device / "file").read_bytes(), noise(2 * MIB))
    assert len(one.calls()) == 3
    found = one.counters("load")
    assert found["fastpath"] == {"bytes": 2 * CHUNK, "operations": 3, "errors": 1}
    assert found["fallback"]["bytes"] == 2 * MIB - 2 * CHUNK
    assert found["refusals"] == {"failed_before": 1}
    assert "fastpath gave up on a load: cuFileRead" in one.mount.log.read_text()


def test_other_errors_are_the_copys(make: Maker) -> None:
    one = make(answer(), answer(-1, errno.EIO))
    (one.there / "source").write_bytes(noise(2 * MIB))
    done = run(*GPUFS, "cp", one.there / "source", one.mount.device / "file", check=False)
    assert done.returncode == 1
    assert os.strerror(errno.EIO) in done.stderr
    found = one.counters("load")
    assert (found["fastpath"]["bytes"], found["fallback"]["bytes"], found["failed"]) == (CHUNK, 0, 1)


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"module": False}, "no_gpudirect"),
        ({"FAKE_CUFILE_MAJOR": "0"}, "no_gpudirect"),
        ({"FAKE_CUFILE_SUPPORTED": "0x204"}, "no_gpudirect"),  # network file systems alone
        ({"FAKE_CUFILE_FAULTS": "cuFileDriverOpen:1:5007"}, "no_gpudirect"),
        ({"library": None}, "no_vendor_call"),
        ({"library": "gpufs_fake_cufile_old"}, "no_vendor_call"),
        ({"FAKE_CUFILE_FAULTS": "cuFileHandleRegister:1:5030"}, "not_accepted"),
        ({"FAKE_CUFILE_SUPPORTED": "0x20", "FAKE_CUFILE_CONTROL": MAY_COPY_THROUGH_HOST}, "not_accepted"),
        ({"backing": Path("/dev/shm")}, "file_system"),
    ],
    ids=[
        "module",
        "its version",
        "its storage",
        "driver",
        "library",
        "function",
        "file",
        "the file's storage",
        "tmpfs",
    ],
)
def test_it_is_refused_with_the_reason(make: Maker, named: dict[str, Any], reason: str) -> None:
    """Without GPUDirect the library would copy through the host, which the fallback does faster."""
    one = make(**named)
    source = one.there / f"gpufs-cufile-{os.getpid()}"
    source.write_bytes(noise(2 * MIB))
    try:
        done = run(*GPUFS, "cp", "--fastpath", "require", source, one.mount.device / "other", check=False)
        assert done.returncode == 1
        assert reason in done.stderr
        assert (one.mount.device / "other").stat().st_size == 0
        if "cuFileHandleRegister" not in str(named):  # each time the file is opened anew, and this failed once
            run("cp", one.shown / source.name, one.mount.device / "file")
            assert_same((one.mount.device / "file").read_bytes(), noise(2 * MIB))
            found = one.counters("load")
            assert (found["fastpath"]["operations"], found["fallback"]["bytes"]) == (0, 2 * MIB)
            assert found["refusals"][reason] == 2
        assert one.calls() == []
    finally:
        source.unlink()


@pytest.mark.parametrize(
    "place",
    [
        "../../devices/pci0000:00/0000:00:1f.0/nvme/nvme0/nvme0n1/nvme0n1p1",
        "../../devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1",
    ],
)
def test_storage_that_it_serves(make: Maker, tmp_path: Path, disk: Path, place: str) -> None:
    """Taken, although the library may copy other files through the host."""
    lies_on(tmp_path / "kernel", disk, place)
    one = make(FAKE_CUFILE_CONTROL=MAY_COPY_THROUGH_HOST)
    (one.there / "source").write_bytes(noise(2 * MIB))
    run("cp", one.shown / "source", one.mount.device / "file")
    assert one.counters("load")["fastpath"]["bytes"] == 2 * MIB
