"""The oldest kernel, which lacks INIT flags (a knob masks them here), and the knobs that change how the mount works.

Whatever the kernel offers and the knobs say, files behave alike; only the speed differs.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import linux
from support.data import GRANULE, MIB, assert_same, noise, read_all
from support.mounting import REPOSITORY, GpufsMount, Mounter
from support.processes import run, start_children, wait_children

pytestmark = [pytest.mark.driver]

LINUX_6_1 = "0xfffffffe00000000"
KNOBS = {
    "one thread, no slabs": "--io-workers 1 --slab-file-bytes 0",
    "small and nothing kept": "--io-chunk-bytes 64K --read-ahead 0 --keep-freed 0",
    "large": "--io-chunk-bytes 64M --slab-file-bytes 1M",
}


def test_a_mount_works_on_linux_6_1(mount: Mounter) -> None:
    use(mount("--mask-flags", LINUX_6_1, devices=2, memory=256 * MIB))


@pytest.mark.parametrize("knobs", KNOBS)
def test_a_mount_works_with_other_knobs(mount: Mounter, knobs: str) -> None:
    use(mount(*KNOBS[knobs].split(), devices=2, memory=256 * MIB))


def use(mounted: GpufsMount) -> None:
    """Every way to move bytes once, and names; then unmounts."""
    file = mounted.device / "file"
    data = bytearray(noise(9 * MIB + 13))
    file.write_bytes(data)
    assert_same(read_all(file), bytes(data))
    fd = os.open(file, os.O_RDWR)
    for at in (0, 1, 4095, MIB + 1, GRANULE - 3, 9 * MIB):
        os.pwrite(fd, b"0123456789", at)
        data[at : at + 10] = b"0123456789"
        assert os.pread(fd, 10, at) == b"0123456789"
    assert_same(os.pread(fd, 10 * MIB, 0), bytes(data))
    # mappings: private ones always; shared ones too, by direct mappings or through the page cache
    with mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE) as area:
        assert area[:20] == bytes(data[:20])
    with mmap.mmap(fd, 0) as area:
        assert_same(bytes(area), bytes(data))
        area[5 * MIB : 5 * MIB + 4] = b"map!"
        data[5 * MIB : 5 * MIB + 4] = b"map!"
        area.flush()
        assert os.pread(fd, 4, 5 * MIB) == b"map!"
        os.pwrite(fd, b"write!", 6 * MIB)
        data[6 * MIB : 6 * MIB + 6] = b"write!"
        assert area[6 * MIB : 6 * MIB + 6] == b"write!"
    os.ftruncate(fd, 3 * MIB + 1)
    os.ftruncate(fd, 5 * MIB)
    data[3 * MIB + 1 :] = bytes(2 * MIB - 1)
    linux.fallocate(fd, linux.FALLOC_PUNCH_HOLE | linux.FALLOC_KEEP_SIZE, MIB, MIB)
    data[MIB : 2 * MIB] = bytes(MIB)
    assert_same(os.pread(fd, 10 * MIB, 0), bytes(data))
    os.close(fd)
    run("cp", file, mounted.device / "copy")
    run("cmp", file, mounted.device / "copy")
    if (mounted.path / "gpu1").is_dir():
        run("cp", file, mounted.path / "gpu1" / "copy")
        run("cmp", file, mounted.path / "gpu1" / "copy")
    (mounted.device / "a" / "b").mkdir(parents=True)
    for number in range(100):
        (mounted.device / "a" / f"{number}").write_text(str(number))
    assert len(os.listdir(mounted.device / "a")) == 101

    def write(index: int) -> None:
        shared = os.open(file, os.O_WRONLY)
        os.pwrite(shared, bytes([index]) * MIB, index * MIB)

    wait_children(start_children(4, write))
    assert read_all(file)[: 4 * MIB] == b"".join(bytes([n]) * MIB for n in range(4))
    run("rm", "-r", mounted.device / "a", file)
    mounted.unmount()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_contract_holds_on_linux_6_1() -> None:
    """The whole contract, in a pytest of its own whose mounts have the flags masked."""
    tests = [str(path) for path in sorted(Path(__file__).parent.glob("test_contract_*.py"))]
    words = ["-q", "-x", "-p", "no:cacheprovider", f"--mount-option=--mask-flags={LINUX_6_1}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *tests], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
