"""gpufs doctor on simulated machines and on this one."""

import json
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.mounting import GPUFS, GpufsMount
from support.processes import NOBODY, run

from gpufs.cli import doctor as checks
from gpufs.cli._machine import Environment
from gpufs.cli.doctor import NOTE, OK, PROBLEM, Finding
from gpufs.mounting import MountEntry

NODES = "sys/class/kfd/kfd/topology/nodes"


def amd_gpu(capability: int) -> str:
    """What the kernel's driver for AMD writes about a GPU at 0000:c1:00.0."""
    return f"simd_count 304\ncapability {capability | 0x80}\nlocation_id {0xC1 << 8}\ndomain 0\n"


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Environment]:
    """A machine without problems, except for the given files (by path; None: missing) and facts."""

    def make(files: dict[str, str | None] | None = None, **facts: Any) -> Environment:
        wanted: dict[str, str | None] = {
            "dev/fuse": "",
            "etc/fuse.conf": "# a comment\nuser_allow_other\n",
            "proc/sys/vm/max_map_count": "65530\n",
            f"{NODES}/0/properties": "cpu_cores_count 64\nsimd_count 0\ncapability 0\n",
            f"{NODES}/1/properties": amd_gpu(0x40),
            **(files or {}),
        }
        for name, text in wanted.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text is not None:
                path.write_text(text)
        everything: dict[str, Any] = {
            "root": tmp_path,
            "uid": 0,
            "which": lambda name: f"/usr/bin/{name}",
            "limit": lambda kind: (1 << 40, 1 << 40),
            "access": lambda path, mode: True,
            "release": "6.18.0",
            "raises_rights": lambda program: True,
            "mounts": list,
            "statuses": lambda entries: [],
            "probe": answers({"host": {"devices": ["host memory"], "refusals": []}}),
        }
        return Environment(**{**everything, **facts})

    return make


def answers(drivers: dict[str, Any], paths: dict[str, Any] | None = None) -> Callable[[Sequence[str]], dict[str, Any]]:
    """A probe that says this; other drivers are not there."""

    def probe(what: Sequence[str]) -> dict[str, Any]:
        kind, name = what
        if kind == "driver":
            found: dict[str, Any] = drivers.get(name, {"error": f"{name} is not available"})
        else:
            found = (paths or {}).get(name, {"error": "No such file or directory"})
        return found

    return probe


def one(findings: Sequence[Finding], name: str, group: str | None = None) -> Finding:
    (found,) = [one for one in findings if one.name == name and group in (None, one.group)]
    return found


def mounts_at_7() -> list[MountEntry]:
    """One mount, which is device 0:7."""
    return [MountEntry("/mnt/gpufs", "/", "0:7", "gpufs", "rw", "fuse.gpufs", 1, frozenset({"rw"}))]


def status_of(state: str, deaths: int = 0) -> dict[str, Any]:
    error = None if state == "ok" else state
    died = {"count": deaths, "last": 1, "cause": "signal 9"}
    return {"mountpoint": "/mnt/gpufs", "state": state, "error": error, "deaths": died}


CUDA = {"devices": ["NVIDIA H200", "NVIDIA H200"], "refusals": []}
HOST = {"devices": ["host memory"], "refusals": []}


def test_a_good_machine_has_no_findings(machine: Callable[..., Environment]) -> None:
    findings = checks.examine(machine(probe=answers({"cuda": CUDA, "hip": CUDA, "host": HOST})), [])
    assert {finding.state for finding in findings} == {OK}
    assert one(findings, "cuda", "drivers").text == "0 = NVIDIA H200, 1 = NVIDIA H200"


@pytest.mark.parametrize(
    ("files", "facts", "name", "state", "text"),
    [
        ({"dev/fuse": None}, {}, "/dev/fuse", PROBLEM, "no FUSE"),
        ({}, {"access": lambda path, mode: False}, "/dev/fuse", PROBLEM, "cannot be opened"),
        ({}, {"which": lambda name: None}, "fusermount3", NOTE, "only root can mount"),
        ({}, {"which": lambda name: None, "uid": 1000}, "fusermount3", PROBLEM, "only root can mount"),
        ({}, {"raises_rights": lambda program: False}, "fusermount3", NOTE, "only root can mount"),
        ({}, {"raises_rights": lambda program: False, "uid": 1000}, "fusermount3", PROBLEM, "only root can mount"),
        ({"proc/self/status": "NoNewPrivs:\t1\n"}, {"uid": 1000}, "fusermount3", PROBLEM, "no_new_privs"),
        ({"proc/self/status": "NoNewPrivs:\t1\n"}, {}, "fusermount3", OK, "fusermount3"),
        ({"proc/self/status": "NoNewPrivs:\t0\n"}, {"uid": 1000}, "fusermount3", OK, "fusermount3"),
        ({"etc/fuse.conf": "#user_allow_other\n"}, {}, "user_allow_other", NOTE, "only root"),
        ({}, {"limit": lambda kind: (8 << 20, 8 << 20), "uid": 1000}, "locked memory", NOTE, "8.0 MiB"),
        ({}, {"limit": lambda kind: (-1, -1), "uid": 1000}, "locked memory", OK, "unlimited"),
        ({}, {"limit": lambda kind: (1024, 1024)}, "descriptors", NOTE, "1024"),
        ({}, {"limit": lambda kind: (resource.RLIM_INFINITY,) * 2}, "descriptors", OK, "unlimited"),
        ({"sys/class/bdi/0:7/read_ahead_kb": "128\n"}, {"mounts": mounts_at_7}, "/mnt/gpufs", NOTE, "128 KiB"),
        ({"sys/class/bdi/0:7/read_ahead_kb": "4096\n"}, {"mounts": mounts_at_7}, "/mnt/gpufs", OK, "4096 KiB"),
        ({}, {"statuses": lambda entries: [status_of("ok", deaths=2)]}, "/mnt/gpufs", NOTE, "2 of its daemons"),
        ({}, {"statuses": lambda entries: [status_of("dead")]}, "/mnt/gpufs", NOTE, "dead"),
        ({"proc/sys/vm/max_map_count": "1000\n"}, {}, "memory mappings", NOTE, "1000"),
    ],
)
def test_each_problem_comes_with_advice(
    machine: Callable[..., Environment],
    files: dict[str, str | None],
    facts: dict[str, Any],
    name: str,
    state: str,
    text: str,
) -> None:
    """Every problem comes with advice."""
    environment = machine(files, **facts)
    found = one(checks.examine(environment, []), name)
    assert found.state == state
    assert text in found.text
    assert state == OK or found.advice


def test_the_limit_of_locked_memory_is_in_the_unit_of_its_file(machine: Callable[..., Environment]) -> None:
    found = one(checks.examine(machine({}, limit=lambda kind: (8 << 20, 8 << 20), uid=1000), []), "locked memory")
    assert str(192 << 10) in found.advice


def test_a_missing_fastpath_is_explained(machine: Callable[..., Environment]) -> None:
    cuda = {"devices": ["NVIDIA H200"], "refusals": ["no_gpudirect"]}
    hip = {"devices": ["AMD Instinct"], "refusals": ["memory_kind"]}
    probe = answers({"cuda": cuda, "hip": hip, "host": HOST})
    found = one(checks.examine(machine(probe=probe), []), "cuda", "fastpath")
    assert (found.state, found.text.split(":")[0], "nvidia_fs" in found.advice) == (NOTE, "no_gpudirect", True)
    for capability, reason in ((0x40, "memory_kind"), (0, "no_kernel_support")):
        findings = checks.examine(machine({f"{NODES}/1/properties": amd_gpu(capability)}, probe=probe), [])
        assert one(findings, "hip", "fastpath").text.startswith(f"{reason}: ")


def test_the_path_of_a_file_is_explained(machine: Callable[..., Environment]) -> None:
    good = {"file_system": "ext4", "offset_align": 512, "memory_align": 4, "refusals": []}
    bad = {**good, "file_system": "tmpfs", "refusals": ["file_system"]}
    cuda = {"devices": ["NVIDIA H200"], "refusals": ["no_vendor_call"]}
    environment = machine(probe=answers({"cuda": cuda, "host": HOST}, {"/good": good, "/bad": bad}))
    findings = checks.examine(environment, ["/good", "/bad", "/missing"])
    assert one(findings, "/good on host").text == "fastpath (ext4, alignment 512 in the file, 4 in memory)"
    found = one(findings, "/bad on cuda")
    assert found.text.startswith("fallback (tmpfs")
    assert "file_system: " in found.text
    assert "no_vendor_call: " in found.text
    assert "libcufile" in found.advice
    assert (one(findings, "/missing").state, one(findings, "/missing").text) == (PROBLEM, "No such file or directory")


def test_why_amdgpu_moves_no_files(machine: Callable[..., Environment]) -> None:
    probe = answers({"hip": {"devices": ["AMD Instinct"], "refusals": ["memory_kind"]}, "host": HOST})
    gpu = {f"{NODES}/1/properties": amd_gpu(0)}
    unset = {"boot/config-6.18.0": "# CONFIG_PCI_P2PDMA is not set\n"}
    built = {"boot/config-6.18.0": "CONFIG_PCI_P2PDMA=y\n"}
    virtual = {**built, "sys/bus/pci/devices/0000:c1:00.0/physfn": ""}
    for files, text in ((unset, "without CONFIG_PCI_P2PDMA"), (built, "amdgpu"), (virtual, "0000:c1:00.0")):
        found = one(checks.examine(machine({**gpu, **files}, probe=probe), []), "hip", "fastpath")
        assert found.text.startswith("no_kernel_support: ")
        assert text in found.text
        assert found.advice


def test_what_is_below_a_file_is_shown(machine: Callable[..., Environment]) -> None:
    """Before the first copy: what the kernel may refuse, and a journal that mountinfo does not show."""
    facts = {"file_system": "ext4", "offset_align": 512, "memory_align": 4, "refusals": []}
    numbers = {"/plain": "259:2", "/volume": "253:0", "/raid": "9:1", "/image": "7:3", "/journal": "259:3"}
    environment = machine(
        {
            "sys/devices/nvme0n1/dev": "259:1\n",
            "sys/devices/nvme0n1/nvme0n1p1/partition": "1\n",
            "sys/devices/nvme0n1/nvme0n1p2/partition": "2\n",
            "sys/devices/virtual/dm-0/slaves/nvme0n1p1/dev": "259:2\n",
            "sys/devices/virtual/md1/dev": "9:1\n",
            "sys/devices/virtual/loop3/dev": "7:3\n",
            "proc/fs/ext4/nvme0n1p1/options": "rw\ndata=ordered\n",
            "proc/fs/ext4/nvme0n1p2/options": "rw\ndata=journal\n",
        },
        probe=answers(
            {"cuda": CUDA, "host": HOST}, {path: {**facts, "device": number} for path, number in numbers.items()}
        ),
    )
    numbered = environment.root / "sys/dev/block"
    numbered.mkdir(parents=True)
    for number, place in (
        ("259:2", "nvme0n1/nvme0n1p1"),
        ("259:3", "nvme0n1/nvme0n1p2"),
        ("253:0", "virtual/dm-0"),
        ("9:1", "virtual/md1"),
        ("7:3", "virtual/loop3"),
    ):
        (numbered / number).symlink_to(f"../../devices/{place}")
    findings = checks.examine(environment, list(numbers))
    assert one(findings, "/plain on cuda").state == OK
    for path, text in (("/volume", "dm-0 (device mapper) over nvme0n1"), ("/raid", "md1"), ("/image", "loop3")):
        found = one(findings, f"{path} on cuda")
        assert (found.state, text in found.text, bool(found.advice)) == (NOTE, True, True)
        assert one(findings, f"{path} on host").state == OK
    assert "mount_options: " in one(findings, "/journal on cuda").text


# ---- this machine ----


def test_doctor_examines_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    done = run(*GPUFS, "doctor", "--json", path, "/dev/shm", check=False)
    said = json.loads(done.stdout)
    assert done.stderr == ""
    findings = [Finding(**one) for one in said["findings"]]
    problems = [finding.name for finding in findings if finding.state == PROBLEM]
    assert problems == ["/dev/shm"]
    assert (done.returncode, said["ok"]) == (1, False)
    assert one(findings, "host", "drivers").state == OK
    assert one(findings, f"{path} on host").text.startswith(("fastpath", "fallback"))
    assert run(*GPUFS, "doctor").stdout.splitlines()[-1] == "a mount works here"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_the_advice_for_a_file_on_a_mount_names_another_place(shared_mount: GpufsMount) -> None:
    (shared_mount.device / "examined").touch()
    done = run(*GPUFS, "doctor", shared_mount.device / "examined", check=False)
    assert "examined: the backing file is on a mount of gpufs" in done.stdout
    assert "of the host, which is on no mount" in done.stdout
    assert f"{shared_mount.path}: works" in run(*GPUFS, "doctor", shared_mount.path).stdout
    (shared_mount.device / "examined").unlink()


def test_modules_in_the_current_directory_are_not_imported(tmp_path: Path) -> None:
    """Another user may own the directory in which root runs the command."""
    for name in ("json", "gpufs", "cffi", "sitecustomize", "usercustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')\n")
    os.chown(tmp_path, NOBODY, NOBODY)
    for words in (["doctor"], ["status"], ["stats"]):
        run(*GPUFS, *words, cwd=tmp_path, check=False)
    assert not (tmp_path / "imported").exists()
