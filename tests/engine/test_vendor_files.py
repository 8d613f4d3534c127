"""The vendors' file calls as the fastpath of real mounts, over fake libraries that record them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.data import KIB, MIB, assert_same, noise
from support.fastpath import fast_disk
from support.mounting import GPUFS, Mounter
from support.processes import run
from support.vendors import CUFILE, HIP_FILE, Vendor, VendorMount

CHUNK = 256 * KIB

Maker = Callable[..., VendorMount]


@pytest.fixture(params=[CUFILE, HIP_FILE], ids=["cuFile", "hipAmdFile"])
def vendor(request: pytest.FixtureRequest) -> Vendor:
    """Both; or the one that a test is about, which it is parametrized with."""
    found: Vendor = request.param
    return found


@pytest.fixture
def disk() -> Iterator[Path]:
    with fast_disk() as path:
        yield path


@pytest.fixture
def make(mount: Mounter, tmp_path: Path, disk: Path, vendor: Vendor) -> Maker:
    def made(*plans: str, backing: Path = disk, options: Sequence[str] = (), **named: Any) -> VendorMount:
        words = ["--backing", f"there={backing}", "--io-chunk-bytes", str(CHUNK), "--io-workers", "1", *options]
        environment = vendor.environment(tmp_path, plans, **named)
        one = mount(*words, driver=vendor.driver, memory=256 * MIB, environment=environment)
        return VendorMount(one, backing, tmp_path / "records")

    return made


def test_plain_cp_both_ways(make: Maker, vendor: Vendor) -> None:
    """The recorded calls cover the file, and the fallback moves no bytes."""
    one = make()
    (one.there / "source").write_bytes(noise(4 * MIB))
    run("cp", one.shown / "source", one.mount.device / "copied")
    run("cp", one.mount.device / "copied", one.shown / "back")
    assert_same((one.there / "back").read_bytes(), noise(4 * MIB))
    calls = one.calls()
    for name, path in ((vendor.read, "source"), (vendor.write, "back")):
        own = [call for call in calls if call.name == name]
        assert {call.path for call in own} == {str(one.there / path)}
        assert [(call.offset, call.bytes, call.moved) for call in own] == [(n * CHUNK, CHUNK, CHUNK) for n in range(16)]
    assert len(calls) == 32
    for flow in ("in", "out"):
        found = one.mount.moved(flow)
        assert (found["fastpath"]["bytes"], found["fallback"]["bytes"]) == (4 * MIB, 0)
        assert found["fastpath"]["operations"] == 16
        assert found["fastpath"]["refusals"] == {}


def test_the_fallback_moves_the_rest_of_a_failed_call(make: Maker, vendor: Vendor) -> None:
    one = make(vendor.answer(), vendor.answer(), vendor.answer(errno.ENODEV, CHUNK // 2))
    (one.there / "source").write_bytes(noise(2 * MIB))
    run("cp", one.shown / "source", one.mount.device / "file")
    assert_same((one.mount.device / "file").read_bytes(), noise(2 * MIB))
    assert len(one.calls()) == 3
    found = one.mount.moved("in")
    direct = 2 * CHUNK + (CHUNK // 2 if vendor.partial else 0)
    assert [found["fastpath"][key] for key in ("bytes", "operations", "errors")] == [direct, 3, 1]
    assert found["fallback"]["bytes"] == 2 * MIB - direct
    assert found["fastpath"]["refusals"] == {"failed_before": 1}
    assert found["failed"] == 0
    one.mount.wait_for_log(f"fastpath gave up on a load: {vendor.read}")
    # Another request tries again.
    run("cp", one.mount.device / "file", one.shown / "back")
    assert one.mount.moved("out")["fastpath"]["bytes"] == 2 * MIB


def test_a_required_fastpath_never_falls_back(make: Maker, vendor: Vendor) -> None:
    one = make(vendor.answer(), vendor.answer(errno.ENODEV, 0))
    (one.there / "source").write_bytes(noise(2 * MIB))
    done = run(
        *GPUFS, "cp", "--partial", "--fastpath", "require", one.there / "source", one.mount.device / "file", check=False
    )
    assert done.returncode == 1
    assert f"fastpath is required but failed: {vendor.read}: No such device" in done.stderr
    found = one.mount.moved("in")
    assert (found["fastpath"]["bytes"], found["fallback"]["bytes"]) == (CHUNK, 0)
    assert (one.mount.device / "file").stat().st_size == CHUNK


WITHOUT: dict[str, tuple[Vendor, dict[str, Any], list[str]]] = {
    "cuFile, module": (CUFILE, {"kernel": False}, ["no_gpudirect"]),
    "cuFile, library": (CUFILE, {"library": False}, ["no_vendor_call"]),
    "cuFile, tmpfs": (CUFILE, {"backing": Path("/dev/shm")}, ["no_direct_descriptor", "file_system"]),
    "hipAmdFile, the kernel's set-up": (HIP_FILE, {"moves_files": ""}, ["memory_kind"]),
    "hipAmdFile, no kernel driver": (HIP_FILE, {"kernel": False}, ["no_kernel_support"]),
}


@pytest.mark.parametrize(("vendor", "named", "reasons"), WITHOUT.values(), ids=WITHOUT)
def test_a_missing_part_is_reported_and_the_fallback_used(
    make: Maker, named: dict[str, Any], reasons: list[str]
) -> None:
    """Without GPUDirect cuFile would copy through the host. The fallback is faster."""
    one = make(**named)
    source = one.there / f"gpufs-vendor-{os.getpid()}"
    source.write_bytes(noise(2 * MIB))
    try:
        done = run(*GPUFS, "cp", "--fastpath", "require", source, one.mount.device / "other", check=False)
        assert done.returncode == 1
        assert all(reason in done.stderr for reason in reasons), done.stderr
        assert not (one.mount.device / "other").exists()
        run("cp", one.shown / source.name, one.mount.device / "file")
        assert_same((one.mount.device / "file").read_bytes(), noise(2 * MIB))
        found = one.mount.moved("in")
        assert (found["fastpath"]["operations"], found["fallback"]["bytes"]) == (0, 2 * MIB)
        assert {reason: found["fastpath"]["refusals"].get(reason) for reason in reasons} == dict.fromkeys(reasons, 2)
        assert one.calls() == []
    finally:
        source.unlink()


@pytest.mark.parametrize("vendor", [HIP_FILE], ids=["hipAmdFile"])
@pytest.mark.parametrize(
    ("options", "moves_files", "plain"),
    [
        ([], "1", True),
        ([], "", False),
        (["--hip-memory", "virtual"], "1", False),
        (["--hip-memory", "plain"], "", True),
        (["--io-fastpath", "off"], "1", False),
        (["--io-fastpath", "require"], "", True),
    ],
    ids=["auto", "auto, no kernel support", "virtual", "plain", "fastpath off", "fastpath required"],
)
def test_the_kind_of_memory_decides(make: Maker, options: list[str], moves_files: str, plain: bool) -> None:
    """The kernel refuses virtual memory, so gpufs uses it only where the fastpath cannot be used."""
    one = make(options=options, moves_files=moves_files)
    (one.there / "source").write_bytes(noise(2 * MIB))
    run("cp", one.shown / "source", one.mount.device / "file")
    run("cp", one.mount.device / "file", one.shown / "back")
    assert_same((one.there / "back").read_bytes(), noise(2 * MIB))
    for flow in ("in", "out"):
        found = one.mount.moved(flow)
        assert found["fastpath"]["bytes"] == (2 * MIB if plain else 0)
        disabled = {"disabled": 1} if "off" in options else {}
        assert found["fastpath"]["refusals"] == ({} if plain else {**disabled, "memory_kind": 1})
    assert bool(one.calls()) == plain
    # Plain memory grows by a copy.
    with open(one.mount.device / "grown", "wb") as file:
        for part in range(3):
            file.write(noise(3 * MIB, seed=part))
    assert_same((one.mount.device / "grown").read_bytes(), b"".join(noise(3 * MIB, seed=part) for part in range(3)))


def test_doctor_shows_it(tmp_path: Path, disk: Path) -> None:
    path = disk / "file"
    path.write_bytes(bytes(4096))

    def findings(**named: Any) -> dict[str, Any]:
        words = {**os.environ, **HIP_FILE.environment(tmp_path, **named)}
        said = json.loads(run(*GPUFS, "doctor", "--json", path, env=words).stdout)
        return {f"{found['group']} {found['name']}": found for found in said["findings"]}

    found = findings()
    assert found["drivers hip"]["text"].startswith("fake device 0 (4.0 GiB, ffff:c0:00.0, ")
    assert found["fastpath hip"]["state"] == "ok"
    assert found[f"paths {path} on hip"]["text"].startswith("fastpath (")
    (tmp_path / "kernel" / "dev" / "kfd").unlink()
    found = findings(kernel=False)
    assert found["fastpath hip"]["text"].startswith("no_kernel_support: ")
    assert "render" in found["fastpath hip"]["advice"]
    assert found[f"paths {path} on hip"]["text"].startswith("fallback (")
