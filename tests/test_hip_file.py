"""AMD's hipAmdFile as the fastpath of real mounts, over a runtime built for the tests, which records its calls."""

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
from support.fastpath import BUILT, VendorMount, copy_range, file_systems, kernel_shows
from support.mounting import GPUFS, Mounter
from support.processes import errno_of, run

CHUNK = 256 * KIB
WHOLE = 1 << 62  # as much as is asked for
UNKNOWN = 999  # hipErrorUnknown


Maker = Callable[..., VendorMount]


def answer(result: int = 0, status: int = 0, error: int = 0, count: int = WHOLE) -> str:
    """How a file call ends: hipError_t, status, what errno is left as, and how many bytes it moves at most."""
    return f"{result}:{status}:{error}:{count}"


@pytest.fixture
def disk() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="gpufs-hip-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


def environment(tmp_path: Path, *plans: str, library: str = "rocm7", kernel: bool = True) -> dict[str, str]:
    return {
        **kernel_shows(tmp_path / "kernel", *(["/dev/kfd"] if kernel else [])),
        "LD_LIBRARY_PATH": str(BUILT / "fake_hip" / library),
        "FAKE_HIP_DEVICES": "1",
        "FAKE_HIP_RECORDS": str(tmp_path / "records"),
        "FAKE_HIP_FILE_PLANS": ",".join(plans),
    }


@pytest.fixture
def make(mount: Mounter, tmp_path: Path, disk: Path) -> Maker:
    if not file_systems(disk) & {"ext4", "xfs"}:
        pytest.skip(f"no file system for the fastpath at {disk}: {file_systems(disk)}")

    def made(*plans: str, options: tuple[str, ...] = (), backing: Path = disk, **named: Any) -> VendorMount:
        words = ["--backing", f"there={backing}", "--io-chunk-bytes", str(CHUNK), "--io-workers", "1", *options]
        one = mount(*words, driver="hip", memory=256 * MIB, environment=environment(tmp_path, *plans, **named))
        return VendorMount(one, backing, tmp_path / "records")

    return made


def test_plain_cp_both_ways(make: Maker) -> None:
    """No byte by way of the host: the calls cover the file, and the other way has moved none."""
    one = make()
    (one.there / "source").write_bytes(noise(4 * MIB))
    run("cp", one.shown / "source", one.mount.device / "copied")
    run("cp", one.mount.device / "copied", one.shown / "back")
    assert_same((one.there / "back").read_bytes(), noise(4 * MIB))
    calls = one.calls()
    for name, path in (("hipAmdFileRead", "source"), ("hipAmdFileWrite", "back")):
        own = [call for call in calls if call.name == name]
        assert {call.path for call in own} == {str(one.there / path)}
        assert [(call.offset, call.bytes) for call in own] == [(n * CHUNK, CHUNK) for n in range(16)]
        assert {call.rest for call in own} == {(CHUNK, 0, 0)}  # moved, result, status
    assert len(calls) == 32
    for direction in ("load", "store"):
        found = one.counters(direction)
        assert (found["fastpath"]["bytes"], found["fallback"]["bytes"]) == (4 * MIB, 0)
        assert found["fastpath"]["operations"] == 16
        assert found["refusals"] == {}


def test_gpufs_cp_says_by_which_path(make: Maker) -> None:
    one = make()
    (one.there / "source").write_bytes(noise(2 * MIB + 777))
    done = run(*GPUFS, "cp", "--json", "--fastpath", "require", one.there / "source", one.mount.device / "file")
    assert json.loads(done.stdout)["paths"] == {"fastpath": 2 * MIB, "fallback": 777}
    assert_same((one.mount.device / "file").read_bytes(), noise(2 * MIB + 777))
    assert {call.path for call in one.calls()} == {str(one.there / "source")}


def test_unaligned_requests_are_split(make: Maker) -> None:
    one = make()
    data = noise(2 * MIB)
    (one.there / "source").write_bytes(data)
    assert copy_range(one.shown / "source", one.mount.device / "file", MIB + 50, at=100) == MIB + 50
    assert_same((one.mount.device / "file").read_bytes(), bytes(100) + data[100 : MIB + 150])
    calls = one.calls()
    assert calls[0].offset == 4096
    assert sum(call.bytes for call in calls) == MIB - 4096
    assert calls[-1].offset + calls[-1].bytes == MIB
    found = one.counters("load")
    assert (found["fastpath"]["bytes"], found["fallback"]["bytes"]) == (MIB - 4096, 4096 - 100 + 150)
    assert found["refusals"] == {"offset_unaligned": 1, "size_unaligned": 1}


@pytest.mark.parametrize("error", [errno.ENODEV, errno.EREMOTEIO, errno.EOPNOTSUPP])
def test_what_is_left_goes_by_fallback(make: Maker, error: int) -> None:
    one = make(answer(), answer(), answer(UNKNOWN, -error, 0, CHUNK // 2))
    (one.there / "source").write_bytes(noise(2 * MIB))
    run("cp", one.shown / "source", one.mount.device / "file")
    assert_same((one.mount.device / "file").read_bytes(), noise(2 * MIB))
    assert [call.rest[0] for call in one.calls()] == [CHUNK, CHUNK, CHUNK // 2]
    found = one.counters("load")
    assert found["fastpath"] == {"bytes": 2 * CHUNK + CHUNK // 2, "operations": 3, "errors": 1}
    assert found["fallback"]["bytes"] == 2 * MIB - 2 * CHUNK - CHUNK // 2
    assert found["refusals"] == {"failed_before": 1}
    assert found["failed"] == 0
    assert f"fastpath gave up on a load: hipAmdFileRead: {os.strerror(error)}" in one.mount.log.read_text()
    # Another request tries again.
    run("cp", one.mount.device / "file", one.shown / "back")
    assert one.counters("store")["fastpath"]["bytes"] == 2 * MIB


def test_a_kernel_without_the_interface_is_asked_once(make: Maker) -> None:
    """It says ENOTTY, and leaves garbage where it should say how much it has moved."""
    one = make(answer(UNKNOWN, 1234567, errno.ENOTTY, 0))
    (one.there / "source").write_bytes(noise(2 * MIB))
    for target in ("first", "second"):
        run("cp", one.shown / "source", one.mount.device / target)
        assert_same((one.mount.device / target).read_bytes(), noise(2 * MIB))
    assert len(one.calls()) == 1
    found = one.counters("load")
    assert (found["fastpath"]["bytes"], found["fallback"]["bytes"]) == (0, 4 * MIB)
    assert found["refusals"] == {"failed_before": 1, "no_kernel_support": 1}
    done = run(*GPUFS, "cp", "--fastpath", "require", one.there / "source", one.mount.device / "third", check=False)
    assert (done.returncode, "no_kernel_support" in done.stderr) == (1, True)


def test_other_errors_are_the_copys(make: Maker) -> None:
    one = make(answer(), answer(UNKNOWN, -errno.EIO, 0, CHUNK // 2))
    (one.there / "source").write_bytes(noise(2 * MIB))
    done = run(*GPUFS, "cp", one.there / "source", one.mount.device / "file", check=False)
    assert done.returncode == 1
    assert os.strerror(errno.EIO) in done.stderr
    assert len(one.calls()) == 2
    found = one.counters("load")
    assert (found["fastpath"]["errors"], found["fallback"]["bytes"], found["failed"]) == (1, 0, 1)
    assert_same((one.mount.device / "file").read_bytes(), noise(2 * MIB)[: CHUNK + CHUNK // 2])


def test_where_it_alone_is_allowed_nothing_goes_another_way(make: Maker) -> None:
    one = make(answer(), answer(UNKNOWN, -errno.ENODEV, 0, 0))
    (one.there / "source").write_bytes(noise(2 * MIB))
    done = run(*GPUFS, "cp", "--fastpath", "require", one.there / "source", one.mount.device / "file", check=False)
    assert done.returncode == 1
    assert "fastpath alone is allowed but failed: hipAmdFileRead: No such device" in done.stderr
    found = one.counters("load")
    assert (found["fastpath"]["bytes"], found["fallback"]["bytes"]) == (CHUNK, 0)
    assert (one.mount.device / "file").stat().st_size == CHUNK


@pytest.mark.parametrize(
    ("named", "reasons"),
    [
        ({"library": "rocm5"}, ["no_vendor_call"]),  # it has no hipGetProcAddress, and more is missing
        ({"kernel": False}, ["no_kernel_support"]),
        ({"library": "rocm5", "kernel": False}, ["no_vendor_call", "no_kernel_support"]),
        ({"backing": Path("/dev/shm")}, ["no_direct_descriptor", "file_system"]),
    ],
    ids=["old runtime", "no kernel driver", "neither", "tmpfs"],
)
def test_what_is_missing_is_said_and_done_without(make: Maker, named: dict[str, Any], reasons: list[str]) -> None:
    one = make(**named)
    source = one.there / f"gpufs-hip-{os.getpid()}"
    source.write_bytes(noise(2 * MIB))
    try:
        run("cp", one.shown / source.name, one.mount.device / "file")
        assert_same((one.mount.device / "file").read_bytes(), noise(2 * MIB))
        found = one.counters("load")
        assert (found["fastpath"]["operations"], found["fallback"]["bytes"]) == (0, 2 * MIB)
        assert set(reasons) <= set(found["refusals"])
        done = run(*GPUFS, "cp", "--fastpath", "require", source, one.mount.device / "other", check=False)
        assert done.returncode == 1
        assert all(reason in done.stderr for reason in reasons), done.stderr
        assert (one.mount.device / "other").stat().st_size == 0
        assert one.calls() == []
    finally:
        source.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize(("journal", "refused"), [("ordered", False), ("writeback", True)])
def test_the_journals_mode_decides_on_ext4(make: Maker, tmp_path: Path, journal: str, refused: bool) -> None:
    image, there = tmp_path / "image", tmp_path / "mounted"
    there.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 64 * MIB)
    run("mkfs.ext4", "-q", image)
    mounted = run("mount", "-o", f"loop,data={journal}", image, there, check=False)
    if mounted.returncode:
        pytest.skip(f"no loop devices: {mounted.stderr.strip()}")
    try:
        one = make(backing=there)
        (there / "source").write_bytes(noise(2 * MIB))
        run("cp", one.shown / "source", one.mount.device / "file")
        assert_same((one.mount.device / "file").read_bytes(), noise(2 * MIB))
        found = one.counters("load")
        assert found["refusals"] == ({"mount_options": 1} if refused else {})
        assert found["fastpath"]["bytes"] == (0 if refused else 2 * MIB)
        one.mount.close()
    finally:
        run("umount", "--lazy", there)


def test_doctor_shows_it(tmp_path: Path, disk: Path) -> None:
    path = disk / "file"
    path.write_bytes(bytes(4096))

    def findings(**named: Any) -> dict[str, Any]:
        words = {**os.environ, **environment(tmp_path, **named)}
        said = json.loads(run(*GPUFS, "doctor", "--json", path, env=words).stdout)
        return {f"{found['group']} {found['name']}": found for found in said["findings"]}

    if not file_systems(disk) & {"ext4", "xfs"}:
        pytest.skip("no file system for the fastpath")
    found = findings()
    assert found["drivers hip"]["text"].startswith("fake device 0 (4 GiB, ffff:c0:00.0)")
    assert found["fastpath hip"]["state"] == "ok"
    assert found[f"paths {path} on hip"]["text"].startswith("fastpath (")
    (tmp_path / "kernel" / "dev" / "kfd").unlink()
    found = findings(kernel=False)
    assert found["fastpath hip"]["text"].startswith("no_kernel_support: ")
    assert "render" in found["fastpath hip"]["advice"]
    assert found[f"paths {path} on hip"]["text"].startswith("fallback (")


def test_errors_of_the_system_call(make: Maker) -> None:
    """What a program sees that copies by itself: the error, where not a byte has been moved."""
    one = make(answer(UNKNOWN, -errno.EIO, 0, 0))
    (one.there / "source").write_bytes(noise(MIB))
    assert errno_of(copy_range, one.shown / "source", one.mount.device / "file", MIB) == errno.EIO
