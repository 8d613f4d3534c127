"""The counters of a mount: what is counted, and reading them from outside, after its death and by Prometheus."""

import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.cli import user_gpufs
from support.data import KIB, MIB
from support.mounting import GPUFS, REPOSITORY, GpufsMount, Mounter
from support.processes import NOBODY, PATIENCE, as_nobody, plain_user, run, wait_until

from gpufs import engine, mounting, statistics
from gpufs.statistics import prometheus


def counted(found: dict[str, Any], backend: str, flow: str, device: int = 0) -> dict[str, Any]:
    value: dict[str, Any] = found["devices"][device]["backends"][backend][flow]
    return value


def settled(mount: GpufsMount, moved: int) -> dict[str, Any]:
    """The counters once so many bytes have been written and read through the mount, and all that is about them is in.

    An operation is counted number by number, when its reply has gone: a moment after the caller has it.
    """

    def whole() -> dict[str, Any] | None:
        found = mount.stats()
        for flow in ("in", "out"):
            counts = counted(found, "mount", flow)
            sums = [sum(number for _, number in counts[name]) for name in ("sizes", "times")]
            if counts["bytes"] != moved or counts["in_flight"] != 0 or sums != [counts["operations"]] * 2:
                return None
        return found

    value: dict[str, Any] = wait_until(whole, 60, "all operations to be counted")
    return value


def counters_of(mount: GpufsMount) -> Path:
    entry = mounting.entry_of(str(mount.path))
    assert entry is not None
    # A mount that died may have had the same device number.
    (path,) = (x for x in statistics.find(entry.device, entry.uid) if statistics.read(x, entry.uid)["alive"])
    return path


# ---- reading ----


def test_the_file_has_what_the_engine_counts(tmp_path: Path) -> None:
    path = tmp_path / "counters"
    with engine.Engine("host", devices=2, memory_bytes=64 * MIB, statistics_path=str(path)) as opened:
        opened.statistics_describe({"refusals": ["first"], "devices": ["one", "two"]})
        copy = statistics.parse(opened.statistics_read())
        alive = statistics.read(path)
    dead = statistics.read(path)
    assert path.stat().st_mode & 0o7777 == 0o600
    assert (copy["devices"], copy["gauges"]) == (alive["devices"], alive["gauges"])
    assert [device["description"] for device in alive["devices"]] == ["one", "two"]
    assert alive["pid"] == os.getpid()
    assert abs(alive["updated"] - time.time()) < 60
    assert (alive["alive"], alive["dead_since"]) == (True, None)
    assert (dead["alive"], dead["dead_since"]) == (False, dead["updated"])


# ---- counting ----


def test_the_counters_of_many_processes_add_up(mount: Mounter, tmp_path: Path) -> None:
    """Every interface shows exactly what the processes have moved."""
    count, size, piece = 4, 3 * MIB, 64 * KIB
    own = mount(memory=64 * MIB)
    for number in range(count):
        (tmp_path / str(number)).write_bytes(bytes([number + 1]) * size)
    script = (
        "import os, sys\nfrom gpufs import client\n"
        "mine, source, size, piece = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])\n"
        "fd = os.open(mine, os.O_RDWR | os.O_CREAT)\n"
        "for at in range(0, size, piece): assert os.pwrite(fd, bytes(piece), at) == piece\n"
        "for at in range(0, size, piece): assert len(os.pread(fd, piece, at)) == piece\n"
        "client.copy(source, mine + '-copy')\n"
    )
    words = [(own.device / str(n), tmp_path / str(n), str(size), str(piece)) for n in range(count)]
    children = [subprocess.Popen([sys.executable, "-c", script, *each]) for each in words]
    assert [child.wait(PATIENCE) for child in children] == [0] * count
    total, operations = count * size, count * size // piece
    mounts = settled(own, total)
    for flow in ("in", "out"):
        found = counted(mounts, "mount", flow)
        assert (found["bytes"], found["operations"], found["errors"], found["in_flight"]) == (total, operations, 0, 0)
        assert sum(number for _, number in found["sizes"]) == sum(number for _, number in found["times"]) == operations
    found = counted(own.stats(), "transfer", "in")
    assert (found["bytes"], found["operations"], found["errors"], found["in_flight"]) == (total, count, 0, 0)
    pieces = [counted(own.stats(), backend, "in")["bytes"] for backend in ("fastpath", "fallback")]
    assert sum(pieces) == total
    page = metrics_of((own.path / ".gpufs/metrics").read_text())
    labels = (("backend", "mount"), ("device", "gpu0"), ("direction", "in"), ("mountpoint", str(own.path)))
    assert page["gpufs_bytes_total"][labels] == total
    assert page["gpufs_operation_size_bytes_count"][labels] == operations


def test_a_full_device_counts_errors_once(mount: Mounter) -> None:
    own = mount(memory=4 * MIB)
    with open(own.device / "file", "wb", buffering=0) as file:
        file.write(bytes(4 * MIB))
        with pytest.raises(OSError) as caught:
            file.write(bytes(MIB))
        assert caught.value.errno == errno.ENOSPC
    wait_until(lambda: counted(own.stats(), "mount", "in")["errors"] == 1, 10, "the failure to be counted")
    assert counted(own.stats(), "mount", "in")["in_flight"] == 0


def test_copies_are_counted_by_what_moved_them(mount: Mounter, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(os.urandom(9 * MIB + 5))
    own = mount("--backing", f"b={tmp_path}", "--io-fastpath", "off", "--io-chunk-bytes", "4M")
    run(*GPUFS, "cp", tmp_path / "source", own.device / "one")
    run(*GPUFS, "cp", own.device / "one", own.device / "two")
    run(*GPUFS, "cp", own.device / "one", tmp_path / "back")
    found = own.stats()
    size = 9 * MIB + 5
    for flow in ("in", "out"):
        transfer, fallback = counted(found, "transfer", flow), counted(found, "fallback", flow)
        assert transfer["operations"] == 1
        assert transfer["bytes"] == fallback["bytes"] == size
        assert fallback["operations"] == 3
        assert counted(found, "fastpath", flow)["operations"] == 0
        assert counted(found, "fastpath", flow)["refusals"]["disabled"] == 1
        assert counted(found, "device_copy", flow)["bytes"] == size
    assert found["devices"][0]["transfers"]["in"]["failed"] == 0


def test_what_belongs_to_no_device_is_counted(mount: Mounter, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(MIB))
    own = mount("--backing", f"b={tmp_path}")
    before = own.stats()["gauges"]
    with open(own.device / "file", "wb"), open(own.path / "backing/b/source", "rb", buffering=0) as source:
        assert len(source.read(MIB)) == MIB
        found = own.stats()
        page = metrics_of((own.path / ".gpufs/metrics").read_text())
    assert before["open_files"] == before["backing_open_files"] == 0 < before["inodes"]
    labels = (("mountpoint", str(own.path)),)
    for name in ("inodes", "open_files", "backing_open_files"):
        assert found["gauges"][name] == before[name] + 1 == page[f"gpufs_{name}"][labels]
    assert 0 < before["metadata_bytes"] < found["gauges"]["metadata_bytes"] < found["gauges"]["metadata_limit_bytes"]
    assert found["counters"]["backing_read_bytes"] == MIB
    assert [name for name, number in found["counters"].items() if number and "repl" in name] == []
    assert page["gpufs_backing_read_bytes_total"][labels] == MIB
    names = {f"gpufs_{name}" for name in found["gauges"]} | {f"gpufs_{name}_total" for name in found["counters"]}
    assert names <= page.keys()


# ---- outliving the daemon ----


def test_counters_of_a_killed_daemon_are_shown(mount: Mounter) -> None:
    own = mount("--no-auto-unmount")
    (own.device / "file").write_bytes(bytes(MIB))
    wait_until(lambda: counted(own.stats(), "mount", "in")["bytes"] == MIB, 10, "the write to be counted")
    path = counters_of(own)
    before = time.time()
    own.signal(signal.SIGKILL)
    own.daemon.wait(PATIENCE)
    done = run(*GPUFS, "stats", "--json", own.path)
    found = json.loads(done.stdout)
    assert not found["alive"]
    assert counted(found, "mount", "in")["bytes"] == MIB
    assert before - 60 < found["dead_since"] <= time.time()
    text = run(*GPUFS, "stats", own.path).stdout
    assert f"({own.pid}) is dead since" in text
    assert re.search(r"gpu0 +mount +in +1.0 MiB", text)
    assert path.exists()
    run(*GPUFS, "umount", own.path)
    assert not path.exists()


def test_counters_are_shown_after_the_mount_is_gone(mount: Mounter) -> None:
    """The counters are found by the mountpoint, also by a plain user."""
    with plain_user() as base:
        program, environment = user_gpufs(base)
        as_user: dict[str, Any] = {"env": environment, "user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}

        def shown() -> Any:
            return json.loads(run(*program, "stats", "--json", own.path, **as_user).stdout)

        own = mount(user=(program, environment))
        as_nobody(lambda: (own.device / "file").write_bytes(bytes(MIB)))
        wait_until(lambda: counted(shown(), "mount", "in")["bytes"] == MIB, 10, "the write to be counted")
        own.signal(signal.SIGKILL)
        own.daemon.wait(PATIENCE)
        wait_until(lambda: not own.mounted(), 20, "the mount to be taken away")
        found = shown()
        assert (found["pid"], found["alive"]) == (own.pid, False)
        assert counted(found, "mount", "in")["bytes"] == MIB
        assert "is dead since" in run(*program, "stats", own.path, **as_user).stdout
        mount(user=(program, environment)).unmount()
        assert not shown()["alive"]  # another mount does not remove them


def test_counters_are_removed_at_a_clean_end(mount: Mounter) -> None:
    own = mount()
    path = counters_of(own)
    own.signal(signal.SIGTERM)
    own.wait_ended()
    assert not path.exists()


# ---- Prometheus ----

Labels = tuple[tuple[str, str], ...]


def metrics_of(text: str) -> dict[str, dict[Labels, float]]:
    """The samples of a page, by name and labels in the order of their names."""
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples = found.setdefault(sample.name, {})
            key = tuple(sorted(sample.labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return found


def test_metrics_of_several_mounts(mount: Mounter) -> None:
    """Each series once, with its mountpoint, and with its device where it is one of a device."""
    first, second = mount(devices=2, memory=64 * MIB), mount(memory=64 * MIB)
    for device in (first.path / "gpu0", first.path / "gpu1", second.device):
        (device / "file").write_bytes(bytes(MIB))
    wait_until(lambda: counted(first.stats(), "mount", "in", 1)["bytes"] == MIB, 60, "the write to be counted")
    wait_until(lambda: counted(second.stats(), "mount", "in")["bytes"] == MIB, 60, "the write to be counted")
    found = metrics_of(run(*GPUFS, "metrics", first.path, second.path, first.path).stdout)
    places = {str(first.path), str(second.path)}
    for name, samples in found.items():
        for labels in samples:
            assert dict(labels)["mountpoint"] in places
            assert "device" in dict(labels) or not name.startswith(("gpufs_device_", "gpufs_bytes", "gpufs_transfer_"))
    held = {(dict(labels)["mountpoint"], dict(labels)["device"]) for labels in found["gpufs_device_held_bytes"]}
    assert held == {(str(first.path), "gpu0"), (str(first.path), "gpu1"), (str(second.path), "gpu0")}
    assert found["gpufs_up"] == {(("mountpoint", place),): 1.0 for place in places}
    (own,) = metrics_of((second.path / ".gpufs/metrics").read_text())["gpufs_build_info"]
    assert own in found["gpufs_build_info"]
    (entry,) = (one for one in mounting.mounts() if one.mountpoint == str(second.path))
    hanging = statistics.read_mount(entry.device, entry.uid, entry.mountpoint) | {"updated": time.time() - 60}
    assert metrics_of(prometheus.metrics([hanging]).decode())["gpufs_up"][("mountpoint", str(second.path)),] == 0
    second.unmount()
    done = run(*GPUFS, "metrics", first.path, second.path, check=False)
    assert done.returncode == 1
    assert metrics_of(done.stdout)["gpufs_up"][("mountpoint", str(second.path)),] == 0
    assert (
        done.stderr.splitlines()[0]
        == f"gpufs: {second.path}: no gpufs is mounted there (gpufs status lists those that are)"
    )


def test_the_dashboard_shows_what_is_exported(mount: Mounter) -> None:
    own = mount("--io-fastpath", "off")
    (own.path.parent / "source").write_bytes(bytes(MIB))
    run(*GPUFS, "cp", own.path.parent / "source", own.device / "file")
    exported = set(metrics_of(run(*GPUFS, "metrics", own.path).stdout))
    dashboard = json.loads((REPOSITORY / "docs/grafana-dashboard.json").read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = {name for text in shown for name in re.findall(r"\bgpufs_\w+", text)}
    assert used
    assert used <= exported


def test_metrics_are_served_by_http(mount: Mounter) -> None:
    own = mount()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    server = subprocess.Popen([*GPUFS, "metrics", "--listen", address, own.path])

    def scraped() -> str:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/metrics") as page:
            return str(page.read().decode())
        assert server.poll() is None
        return ""

    try:
        found = metrics_of(wait_until(scraped, PATIENCE, "the server"))
        with ThreadPoolExecutor(8) as scrapers:
            pages = list(scrapers.map(lambda _: scraped(), range(64)))
        assert all(metrics_of(page)["gpufs_up"] == found["gpufs_up"] for page in pages)
    finally:
        server.terminate()
        server.wait(PATIENCE)
    assert found["gpufs_up"] == {(("mountpoint", str(own.path)),): 1.0}
