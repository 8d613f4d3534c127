"""A full device: each call that needs memory fails, and works once there is some, whatever uses the file meanwhile."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from errno import EBUSY, ENOSPC
from pathlib import Path

import pytest
from support.data import MIB, assert_same, directory, noise
from support.linux import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE, fallocate
from support.processes import ChildKilled, errno_of, in_child
from support.surviving import Survivor, mounted

import gpufs

pytestmark = pytest.mark.driver

SIZE = 3 * MIB + 4321
DEVICE = 16 * MIB
GRANULE = 2 * MIB


@pytest.fixture(scope="module")
def place(driver: str) -> Iterator[Survivor]:
    if driver == "hip":
        pytest.skip("the HIP driver has no host memory for files")
    options = ("--host-memory", str(DEVICE))
    with directory("/tmp") as folder, mounted(folder / "mnt", *options, driver=driver, memory=str(DEVICE)) as made:
        yield made


# How this program has the file attached: for each attachment whether it sleeps. Without one it lies where the last one
# has left it.
STATES: dict[str, tuple[bool, ...]] = {
    "free": (),
    "parked": (),
    "attached": (False,),
    "asleep": (True,),
    "attached twice": (False, True),
    "asleep twice": (True, True),
}


def change(call: Callable[[int], object]) -> Callable[[Path], None]:
    """A call that gets a descriptor of the file."""

    def work(path: Path) -> None:
        with open(path, "r+b", 0) as file:
            call(file.fileno())

    return work


def write(fd: int, offset: int) -> None:
    data = noise(2 * MIB, offset)
    while data:
        done = os.pwrite(fd, data, offset)  # short where a part fits
        data, offset = data[done:], offset + done


def store(path: Path, offset: int) -> None:
    def work() -> None:
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as area:
            area[offset : offset + 6] = b"stored"
            area.flush()

    try:
        in_child(work)
    except ChildKilled as error:
        raise OSError(ENOSPC, "SIGBUS") from error


def truncate(path: Path) -> None:
    os.truncate(path, MIB)
    os.truncate(path, SIZE)


def empty(path: Path) -> None:
    path.write_bytes(noise(SIZE, 5))


def store_in_hole(path: Path) -> None:
    os.truncate(path, 9 * MIB)
    store(path, 8 * MIB)


CHANGES: dict[str, Callable[[Path], None]] = {
    "write": change(lambda fd: write(fd, 100)),
    "append": change(lambda fd: write(fd, SIZE + 3 * MIB)),
    "truncate": truncate,
    "write again": empty,
    "fallocate": change(lambda fd: fallocate(fd, 0, SIZE, 3 * MIB)),
    "zero": change(lambda fd: fallocate(fd, FALLOC_ZERO_RANGE, 4096, 7 * MIB)),
    "punch": change(lambda fd: fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 0, GRANULE)),
    "store": lambda path: store(path, 2 * MIB),
    "store in a hole": store_in_hole,
}
WAKES = "wake", "attach", "attach elsewhere"


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    "placement", [72, pytest.param(0, marks=pytest.mark.slow), pytest.param(248, marks=pytest.mark.slow)]
)
def test_what_a_full_device_refuses_works_once_there_is_memory(
    place: Survivor, tmp_path: Path, state: str, placement: int
) -> None:
    path, twin, filler = place.device / "weights", tmp_path / "twin", place.device / "filler"
    asleep = STATES[state]
    failed = []
    for name in [*WAKES, *CHANGES]:
        for each in (path, twin):
            each.write_bytes(noise(SIZE))
        with gpufs.attach(path, "r+", placement=placement) as array:
            if state == "parked":
                gpufs.sleep(array)
        arrays = [gpufs.attach(path, "r+", placement=placement) for _ in asleep]
        addresses = [array.address for array in arrays]
        for array, sleeps in zip(arrays, asleep, strict=True):
            if sleeps:
                gpufs.sleep(array)

        def call(to: Path, name: str = name, arrays: list[gpufs.DeviceArray] = arrays) -> None:
            if name == "wake":
                gpufs.wake(arrays)
            elif name in WAKES:
                gpufs.attach(path, "r+", placement=placement if name == "attach" else 136).close()
            else:
                CHANGES[name](to)

        with open(filler, "wb") as file:
            while not errno_of(lambda: fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size, GRANULE)):
                pass
        code = errno_of(lambda: call(path))
        assert code in (0, ENOSPC, EBUSY)
        if code == ENOSPC:
            failed.append(name)
        os.truncate(filler, 0)
        if code != EBUSY:  # making smaller what a program uses
            call(path)
            if name not in WAKES:
                call(twin)
        expected = twin.read_bytes()
        assert_same(path.read_bytes(), expected)
        gpufs.wake(arrays)
        for array, address in zip(arrays, addresses, strict=True):
            assert (array.address, array.address % 256) == (address, placement)
            assert_same(array.tobytes(), expected[: array.nbytes])
            array.close()
        path.unlink()
    filler.unlink()
    # A parked file changes where it is. An attachment needs the device, and so does a file that was emptied first.
    is_parked = "parked" in state or (asleep and all(asleep))
    refused = {"attach", "write again"} if is_parked else {"append", "fallocate"}
    changed = {*CHANGES} - refused if is_parked else set[str]()
    assert refused <= set(failed), failed
    assert changed.isdisjoint(failed), failed
