"""Files that leave their device for the host's memory and come back: by programs, a shell and a full device."""

from __future__ import annotations

import functools
import gc
import json
import mmap
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from errno import EAGAIN, ENODATA, ENOSPC, EOPNOTSUPP, EPERM, ESTALE
from pathlib import Path
from typing import Any

import numpy
import pytest
from support.attaching import HOLD, program
from support.cli import gpufs as command
from support.data import MIB, assert_same, directory, noise
from support.linux import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, fallocate
from support.mounting import GpufsMount, Mounter
from support.processes import NOBODY, PATIENCE, as_nobody, errno_of, wait_until
from support.surviving import Survivor, mounted

import gpufs
from gpufs.client import _daemons
from gpufs.modes import Mode

pytestmark = pytest.mark.driver

SIZE = 10 * MIB + 4321
DEVICE = 36 * MIB
LARGE = 192 * MIB


@pytest.fixture(scope="module")
def place(driver: str) -> Iterator[Survivor]:
    """A mount whose device and host memory take three files each. It survives its daemon."""
    if driver == "hip":
        pytest.skip("the HIP driver has no host memory for files")
    options = ("--host-memory", str(DEVICE), "--allow-other")
    with directory("/tmp") as folder, mounted(folder / "mnt", *options, driver=driver, memory=str(DEVICE)) as mount:
        yield mount


@pytest.fixture
def file(place: Survivor) -> Iterator[Path]:
    path = place.device / "weights"
    path.write_bytes(noise(SIZE))
    yield path
    gc.collect()
    path.unlink(missing_ok=True)
    is_used(place, 0, 0)


def is_used(place: Survivor, device: int, host: int) -> None:
    """Waits until so many files lie there: what the host has held of a file that is back goes a moment later."""
    wait_until(lambda: used(place) == (device, host), 30, f"{device} and {host} files")


def used(place: Survivor) -> tuple[int, int]:
    """The bytes that files hold of the device and of the host's memory, in whole files."""
    device, *_, host = place.report()["devices"]
    return device["held_bytes"] // SIZE, host["held_bytes"] // SIZE


def named(*paths: Path) -> dict[str, os.stat_result]:
    """Files as a request names them."""
    return {os.fspath(path): path.stat() for path in paths}


def parked(path: Path) -> bool:
    return int(os.getxattr(path, "user.gpufs.parked_bytes")) > 0


# ---- programs ----


def test_attached_memory_sleeps_and_wakes_at_its_address(place: Survivor, file: Path) -> None:
    array = gpufs.attach(file, "r+")
    address = array.address
    is_used(place, 1, 0)
    for _ in range(2):
        assert gpufs.sleep(array) == SIZE
        is_used(place, 0, 1)
        assert parked(file)
        assert gpufs.sleep(array) == 0
        assert os.stat(file).st_blocks * 512 >= SIZE
        with pytest.raises(OSError) as refused:
            array.refresh()
        assert refused.value.errno == EAGAIN
        assert gpufs.wake(file) == SIZE
        is_used(place, 1, 0)
        assert (array.address, parked(file), gpufs.wake(file)) == (address, False, 0)
        assert array.tobytes() == noise(SIZE)
    array.close()


def test_what_was_written_in_place_and_through_the_mount_is_there_after_a_sleep(place: Survivor, file: Path) -> None:
    array = gpufs.attach(file, "r+")
    gpufs.sleep()
    expected = bytearray(noise(SIZE))
    assert file.read_bytes() == expected  # as it sleeps
    is_used(place, 0, 1)
    with open(file, "r+b") as writer:
        writer.seek(12345)
        writer.write(b"written")
    expected[12345:12352] = b"written"
    is_used(place, 1, 0)  # a write brings it back
    gpufs.wake(array)
    assert array.tobytes() == expected
    array.close()


def test_two_programs_share_one_parked_copy(place: Survivor, file: Path) -> None:
    array = gpufs.attach(file, "r")
    with program(HOLD, file, "r+") as other:
        gpufs.sleep(array)
        is_used(place, 1, 0)  # the other program uses it
        other.kill()
        other.wait()
        is_used(place, 0, 1)
    second = gpufs.attach(file, "r")
    is_used(place, 1, 0)
    assert gpufs.sleep([second]) == SIZE
    is_used(place, 0, 1)
    assert gpufs.wake() == 2 * SIZE
    assert numpy.array_equal(numpy.asarray(array), numpy.asarray(second)) if array.device == "cpu" else True
    array.close()
    second.close()


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_what_loses_its_name_while_it_sleeps_wakes_and_sleeps_again(place: Survivor, file: Path, mode: Mode) -> None:
    array = gpufs.attach(file, mode)
    gpufs.sleep(array)
    file.unlink()
    for _ in range(2):
        assert gpufs.wake(array) == SIZE
        is_used(place, 1, 0)
        assert array.tobytes() == noise(SIZE)
        assert gpufs.sleep(array) == SIZE
        is_used(place, 0, 1)
    array.close()


def test_a_wake_says_that_the_file_was_made_smaller(file: Path) -> None:
    array = gpufs.attach(file, "r+")
    gpufs.sleep(array)
    os.truncate(file, 12345)
    for _ in range(2):
        with pytest.raises(OSError, match=f"has 12345 bytes now, and had {SIZE}") as refused:
            gpufs.wake(array)
        assert refused.value.errno == ESTALE
    os.truncate(file, SIZE)
    assert gpufs.wake(array) == SIZE
    assert_same(array.tobytes(), noise(SIZE)[:12345] + bytes(SIZE - 12345))


def test_an_access_while_it_sleeps_ends_the_program_and_says_why(file: Path, driver: str) -> None:
    if driver != "host":
        pytest.skip("the CPU reaches only host memory")
    script = "import gpufs, numpy, sys; a = numpy.asarray(gpufs.attach(sys.argv[1])); gpufs.sleep(); print(a[0])"
    done = subprocess.run([sys.executable, "-c", script, file], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert f"{file} sleeps" in done.stderr


def test_a_killed_daemon_loses_nothing_that_sleeps(place: Survivor, file: Path) -> None:
    array = gpufs.attach(file, "r+")
    gpufs.sleep(array)
    place.kill()
    is_used(place, 0, 1)
    assert file.read_bytes() == noise(SIZE)
    gpufs.wake(array)
    place.kill()
    assert array.tobytes() == noise(SIZE)
    gpufs.sleep(array)
    is_used(place, 0, 1)
    array.close()
    gc.collect()
    wait_until(lambda: not place.report()["leases"], PATIENCE, "the end of the lease")


def test_a_model_that_sleeps_again_after_a_death_survives_the_next(driver: str) -> None:
    """Host memory in large pieces is used again, also by a daemon that got it from another one."""
    if driver == "hip":
        pytest.skip("the HIP driver has no host memory for files")
    data = noise(LARGE)
    with directory("/tmp") as folder:
        options = ("--host-memory", str(2 * LARGE))
        with mounted(folder / "mnt", *options, driver=driver, memory=str(LARGE + 8 * MIB)) as large:
            file = large.device / "weights"
            file.write_bytes(data)
            array = gpufs.attach(file, "r+")
            for _ in range(2):
                gpufs.sleep(array)
                large.kill()
                gpufs.wake(array)
            assert_same(array.tobytes(), data)
            array.close()


def test_a_takeover_keeps_what_loses_its_name_while_it_sleeps(place: Survivor, file: Path) -> None:
    """The next daemon took the references of leases that sleep for some of the kernel's, which had gone."""
    other = file.with_name("other")
    other.write_bytes(noise(SIZE))
    arrays = [gpufs.attach(path, "r+") for path in (file, other)]
    gpufs.sleep(arrays)
    file.unlink()
    other.unlink()
    place.kill()
    arrays.pop().close()
    is_used(place, 0, 1)  # from now on the daemon has looked for what the kernel has forgotten
    gpufs.wake(arrays)
    assert arrays[0].tobytes() == noise(SIZE)
    arrays.pop().close()


def test_a_takeover_keeps_attached_memory_without_a_name(place: Survivor, file: Path) -> None:
    """The lease was lost, the memory was no longer counted, and to sleep destroyed the mapping."""
    replaced = file.with_name("replaced")
    replaced.write_bytes(noise(SIZE))
    arrays = [gpufs.attach(file, "r+"), gpufs.attach(replaced, "r")]
    file.unlink()
    new = file.with_name("new")
    new.write_bytes(b"new")
    os.rename(new, replaced)
    for _ in range(2):
        place.kill()
        is_used(place, 2, 0)
        assert len(place.report()["leases"]) == 2
    assert gpufs.sleep(arrays) == 2 * SIZE
    is_used(place, 0, 2)
    place.kill()
    is_used(place, 0, 2)
    assert gpufs.wake(arrays) == 2 * SIZE
    is_used(place, 2, 0)
    assert [array.tobytes() for array in arrays] == [noise(SIZE)] * 2
    replaced.unlink()
    for array in arrays:
        array.close()


def test_a_daemon_that_is_killed_while_files_move_loses_nothing(place: Survivor, file: Path) -> None:
    array = gpufs.attach(file, "r+")
    script = (
        "import gpufs, sys\na = gpufs.attach(sys.argv[1], 'r+')\nprint('ready', flush=True)\n"
        "while True:\n    gpufs.sleep()\n    gpufs.wake()\n"
    )
    gpufs.sleep(array)
    with program(script, file):
        for _ in range(2):
            place.kill()
    gpufs.wake(array)
    assert array.tobytes() == noise(SIZE)
    array.close()


def test_a_lease_outlives_a_daemon_that_dies_after_its_file_has_left(driver: str) -> None:
    """The next daemon took it for awake, found no memory to bring the file back, and dropped it for good."""
    if driver == "hip":
        pytest.skip("the HIP driver has no host memory for files")
    with directory("/tmp") as folder:
        # The daemon writes its records late while this file exists.
        late = folder / "late"
        text = f"import os, time\nreal = os.pwrite\nlate = {os.fspath(late)!r}\n"
        text += "os.pwrite = lambda *given: (os.path.exists(late) and time.sleep(1.5), real(*given))[1]\n"
        (folder / "sitecustomize.py").write_text(text)
        environment = {"PYTHONPATH": os.pathsep.join([os.fspath(folder), os.environ.get("PYTHONPATH", "")])}
        options = ("--host-memory", str(DEVICE))
        with (
            mounted(folder / "mnt", *options, driver=driver, memory=str(DEVICE), environment=environment) as place,
            ThreadPoolExecutor(1) as pool,
        ):
            file, filler = place.device / "weights", place.device / "filler"
            file.write_bytes(noise(SIZE))
            array = gpufs.attach(file, "r+")
            late.touch()
            sleeps = pool.submit(gpufs.sleep, array)
            wait_until(lambda: parked(file), PATIENCE, "the file to leave")
            with open(filler, "wb") as opened:
                os.posix_fallocate(opened.fileno(), 0, DEVICE - 4 * MIB)
            late.unlink()
            place.kill()
            assert sleeps.result() == SIZE
            assert errno_of(lambda: gpufs.wake(array)) == ENOSPC
            filler.unlink()
            gpufs.wake(array)
            assert array.tobytes() == noise(SIZE)
            array.close()


def test_no_store_is_lost_to_a_file_that_sleeps_while_others_take_its_memory(place: Survivor, file: Path) -> None:
    dirty = place.device / "dirty"
    dirty.write_bytes(noise(SIZE))  # so that the host's memory for the hole has been used before
    _daemons.park(named(dirty), 0)
    dirty.unlink()
    is_used(place, 1, 0)
    os.truncate(file, SIZE + 4 * MIB)  # ends with a hole
    expected = bytearray(noise(SIZE) + bytes(4 * MIB))
    other = place.device / "other"
    with open(file, "r+b", buffering=0) as opened, open(other, "wb") as filler:
        with mmap.mmap(opened.fileno(), SIZE) as area:
            area[100:106] = expected[100:106] = b"stored"
            _daemons.park(named(file), 0)
            fallocate(filler.fileno(), 0, 0, DEVICE - 2 * MIB)
            area.flush()
        expected += bytes(7)
        for at in (5 * MIB, SIZE + 3 * MIB, len(expected) - 7):
            assert os.pwrite(opened.fileno(), b"written", at) == 7
            expected[at : at + 7] = b"written"
        assert parked(file)
        place.kill()
        assert_same(file.read_bytes(), bytes(expected))
    other.unlink()
    command("wake", file)
    assert_same(file.read_bytes(), bytes(expected))


def test_a_wake_without_memory_says_who_has_it_and_can_be_repeated(place: Survivor, file: Path) -> None:
    array = gpufs.attach(file, "r+")
    gpufs.sleep(array)
    others = [place.device / f"other{number}" for number in range(3)]
    held = []
    for other in others:
        other.write_bytes(noise(SIZE))
        held.append(gpufs.attach(other, "r"))
    with pytest.raises(gpufs.DeviceFull) as refused:
        gpufs.wake(array)
    assert refused.value.errno == ENOSPC
    assert f"PID {os.getpid()}" in str(refused.value)
    assert str(others[0].name)[:-1] in str(refused.value)
    for one, other in zip(held, others, strict=True):
        one.close()
        other.unlink()
    del held, one
    gc.collect()
    gpufs.wake(array)
    assert array.tobytes() == noise(SIZE)
    array.close()


def test_a_mount_without_host_memory_and_a_full_one_refuse_and_nothing_changes(
    place: Survivor, file: Path, mount: Mounter
) -> None:
    with mount(memory=DEVICE) as plain:
        path = plain.device / "file"
        path.write_bytes(noise(SIZE))
        array = gpufs.attach(path, "r+")
        assert errno_of(lambda: gpufs.sleep(array)) == EOPNOTSUPP
        assert array.tobytes() == noise(SIZE)
        array.close()
        gc.collect()
        assert command("sleep", path, check=False).returncode == 1
    filler = place.path / "host0" / "filler"
    filler.write_bytes(bytes(DEVICE - SIZE + MIB))
    array = gpufs.attach(file, "r+")
    assert errno_of(lambda: gpufs.sleep(array)) == ENOSPC
    assert array.tobytes() == noise(SIZE)
    array.close()
    filler.unlink()


def test_of_a_file_that_does_not_fit_nothing_is_copied(mount: Mounter, driver: str) -> None:
    """A full device copied as much as fitted, of each file that was too large, again and again."""
    if driver == "hip":
        pytest.skip("the HIP driver has no host memory for files")
    with mount("--host-memory", str(80 * MIB), memory=160 * MIB) as made, open(made.device / "large", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 140 * MIB)
        assert command("sleep", file.name, check=False).returncode == 1
        assert made.moved("in", 1)["device_copy"]["bytes"] == 0


@pytest.fixture
def shards(place: Survivor, file: Path) -> Iterator[list[Path]]:
    """Three files, which take all of the device, or of the host's memory."""
    paths = [file, file.with_name("second"), file.with_name("third")]
    for path in paths:
        path.write_bytes(noise(SIZE))
    yield paths
    gc.collect()
    for path in paths:
        path.unlink()


@pytest.mark.parametrize("shell", [False, True], ids=["a program", "a shell"])
def test_several_files_sleep_together_or_not_at_all(place: Survivor, shards: list[Path], shell: bool) -> None:
    """The first ones slept, and the program that went on died."""
    arrays = [] if shell else [gpufs.attach(path, "r+") for path in shards]

    def sleep() -> int:
        return command("sleep", place.device, check=False).returncode if shell else errno_of(gpufs.sleep, arrays)

    def wake() -> int:
        return command("wake", *shards, check=False).returncode if shell else errno_of(gpufs.wake, shards)

    filler = place.path / "host0" / "filler"
    filler.write_bytes(bytes(2 * MIB))
    assert sleep() != 0
    is_used(place, 3, 0)
    assert not any(map(parked, shards))
    assert [array.tobytes() for array in arrays] == [noise(SIZE)] * len(arrays)
    filler.unlink()
    assert sleep() == 0
    assert all(map(parked, shards))
    filler = place.device / "filler"
    filler.write_bytes(bytes(4 * MIB))
    with gpufs.attach(filler, "r"):  # no eviction would help
        assert wake() != 0
    assert all(map(parked, shards))
    filler.unlink()
    assert wake() == 0
    is_used(place, 3, 0)
    assert [array.tobytes() for array in arrays] == [noise(SIZE)] * len(arrays)
    for array in arrays:
        array.close()


@pytest.mark.parametrize("user", [0, NOBODY])
def test_a_file_that_is_removed_keeps_no_other_from_moving(shards: list[Path], user: int) -> None:
    """The others stayed where they were, and the error named no file."""
    for path in shards:
        os.chown(path, user, user)
    files = named(*shards)
    shards[1].unlink()
    act = as_nobody if user else (lambda action: action())
    for move, is_away in ((functools.partial(_daemons.park, wait=0.0), True), (_daemons.bring_back, False)):
        assert act(functools.partial(errno_of, move, files)) == 0
        assert [parked(shards[0]), parked(shards[2])] == [is_away] * 2
    shards[1].touch()


def test_nothing_is_unmapped_for_a_sleep_that_cannot_be(place: Survivor, file: Path) -> None:
    array = gpufs.attach(file, "r+")
    command("leases", "--revoke", file)
    for refused in (gpufs.sleep, gpufs.wake):
        code = errno_of(refused, array)
        assert code == (ESTALE if refused is gpufs.sleep else 0)
    assert array.tobytes() == noise(SIZE)
    array.close()


# ---- the mount ----


def test_files_move_between_a_device_and_host0(place: Survivor, file: Path) -> None:
    there = place.path / "host0" / "weights"
    shutil.move(file, there)
    is_used(place, 0, 1)
    assert there.read_bytes() == noise(SIZE)
    array = gpufs.attach(there, "r+")
    assert (array.device, array.tobytes()) == ("cpu", noise(SIZE))
    numpy.asarray(array)[0] = 7
    array.close()
    gc.collect()
    shutil.move(there, file)
    assert file.read_bytes() == b"\x07" + noise(SIZE)[1:]


def test_each_call_on_a_file_that_sleeps_does_what_it_does_on_others(place: Survivor, file: Path) -> None:
    content = bytearray(noise(SIZE))

    def sleeps() -> None:
        command("sleep", file)
        assert parked(file)

    sleeps()
    copy = place.device / "copy"
    command("cp", file, copy)
    assert copy.read_bytes() == content
    assert parked(file)
    copy.unlink()
    fd = os.open(file, os.O_RDWR)
    try:
        assert os.lseek(fd, 0, os.SEEK_HOLE) == SIZE
        assert os.lseek(fd, 10, os.SEEK_DATA) == 10
        assert parked(file)
        fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 4 * MIB, 2 * MIB)
        content[4 * MIB : 6 * MIB] = bytes(2 * MIB)
        assert os.pread(fd, SIZE, 0) == content
        sleeps()
        assert os.lseek(fd, 0, os.SEEK_HOLE) == 4 * MIB
        os.ftruncate(fd, 8 * MIB)
        os.ftruncate(fd, 9 * MIB)
        content[8 * MIB :] = bytes(MIB)
        assert os.pread(fd, SIZE, 0) == content
        sleeps()
        assert os.pread(fd, SIZE, 0) == content
        os.ftruncate(fd, 0)
        assert (os.fstat(fd).st_blocks, os.pread(fd, 10, 0)) == (0, b"")
    finally:
        os.close(fd)
    os.chown(file, NOBODY, NOBODY)


def test_a_parked_file_changes_where_it_is_on_a_full_device(place: Survivor, file: Path) -> None:
    """Cutting, punching and allocating failed with ENOSPC there. Another daemon finds what was changed."""
    command("sleep", file)
    filler = place.device / "filler"
    filler.write_bytes(bytes(DEVICE - MIB))
    content = bytearray(noise(SIZE))
    fd = os.open(file, os.O_RDWR)
    try:
        os.ftruncate(fd, SIZE - 3 * MIB)
        os.ftruncate(fd, SIZE - MIB)
        content[SIZE - 3 * MIB :] = bytes(2 * MIB)
        fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 0, 4 * MIB)
        content[: 4 * MIB] = bytes(4 * MIB)
        assert os.pread(fd, 2 * SIZE, 0) == content
        before = os.fstat(fd).st_blocks
        fallocate(fd, 0, 0, SIZE + MIB)
        content += bytes(2 * MIB)
        assert os.fstat(fd).st_blocks > before
        assert os.pwrite(fd, b"written", len(content) - 3) == 7
        content[-3:] = b"written"
        assert parked(file)
        place.kill()
        assert os.pread(fd, 2 * SIZE, 0) == content
        fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 0, 2 * SIZE)
        content = bytearray(len(content))
        assert (os.fstat(fd).st_blocks, parked(file)) == (0, False)
        assert os.pread(fd, 2 * SIZE, 0) == content
        with pytest.raises(OSError, match="No space"):
            os.pwrite(fd, bytes(2 * MIB), 0)
        filler.unlink()
        assert os.pwrite(fd, b"x", 0) == 1
        place.kill()
        assert os.pread(fd, 2 * SIZE, 0) == b"x" + content[1:]
    finally:
        os.close(fd)


def test_a_parked_file_is_copied_to_disk_from_where_it_is(place: Survivor, file: Path, tmp_path: Path) -> None:
    """The copy failed with ENOSPC on a full device, and otherwise woke the file."""
    command("sleep", file)
    before = int(os.getxattr(file, "user.gpufs.bytes_read"))
    filler = place.device / "filler"
    filler.write_bytes(bytes(DEVICE - MIB))
    copied = command("cp", file, tmp_path / "copy", check=False)
    filler.unlink()
    assert (copied.stderr, (tmp_path / "copy").read_bytes()) == ("", noise(SIZE))
    assert parked(file)
    assert int(os.getxattr(file, "user.gpufs.bytes_read")) - before == SIZE


def test_a_small_file_stays_and_the_figures_are_what_has_happened(place: Survivor, file: Path) -> None:
    small = place.device / "small"
    small.write_bytes(b"small")

    def changed(*arguments: object) -> tuple[int, int]:
        """How many files a command has changed, and how many not."""
        done, _, rest = command(*arguments, place.device).stdout.partition(";")
        return int(done.split()[1]), sum(int(number) for number in re.findall("[:,] ([0-9]+)", rest))

    assert changed("wake") == (0, 2)
    assert changed("sleep") == (1, 1)
    assert (parked(small), parked(file), small.read_bytes()) == (False, True, b"small")
    assert changed("sleep", file) == (0, 2)  # one of them is named twice
    assert changed("wake") == (1, 1)
    assert changed("pin") == (2, 0)
    assert changed("pin") == (0, 2)
    assert changed("unpin", file) == (2, 0)
    small.unlink()


def test_what_has_no_memory_is_named_as_what_it_is(place: Survivor, file: Path) -> None:
    os.mkfifo(place.device / "fifo")
    (place.device / "sparse").touch()
    os.truncate(place.device / "sparse", 4 * MIB)
    for name in ("sleep", "wake", "pin", "unpin"):
        for wrong in (place.device / "fifo", place.path / "README"):
            done = command(name, file, wrong, check=False)
            assert (done.returncode, done.stdout) == (1, ""), name
            assert str(wrong) in done.stderr
    assert not parked(file)
    assert command("sleep", place.device / "sparse").stdout.endswith("unchanged: 1 of holes alone\n")


def test_a_sparse_file_moves_in_the_time_that_its_data_take(place: Survivor, file: Path) -> None:
    """Evicting a file of many TiB kept all others from memory for minutes."""
    size, data = 1 << 44, noise(MIB)
    with open(file, "r+b", buffering=0) as opened:
        os.pwrite(opened.fileno(), data, size - MIB)
        os.pwrite(opened.fileno(), data, size // 2)
        start = time.monotonic()
        command("sleep", file)
        assert time.monotonic() - start < 20
        assert parked(file)
        for _ in range(2):
            fd = opened.fileno()
            assert os.pread(fd, SIZE, 0) == noise(SIZE)
            assert os.pread(fd, 2 * MIB, size // 2 - MIB // 2) == bytes(MIB // 2) + data + bytes(MIB // 2)
            assert os.pread(fd, 2 * MIB, size - MIB) == data
            hole = os.lseek(fd, 0, os.SEEK_HOLE)
            assert (hole, os.lseek(fd, hole, os.SEEK_DATA)) == (12 * MIB, size // 2)
            command("wake", file)
        assert not parked(file)


def test_the_owner_pays_for_a_parked_file_and_a_limit_counts(place: Survivor, file: Path) -> None:
    os.chown(file, NOBODY, NOBODY)
    command("quota", "set", place.path / "host0", MIB, "--user", NOBODY)
    try:
        failed = command("sleep", file, check=False)
        assert failed.returncode == 1
        assert f"user {pwd.getpwuid(NOBODY).pw_name} on host0" in failed.stderr
        assert not parked(file)
        command("quota", "set", place.path / "host0", 2 * SIZE, "--user", NOBODY)
        command("sleep", file)
        (entry,) = [each for each in place.report()["quotas"] if each["uid"] == NOBODY and "host0" in each["path"]]
        assert entry["used_bytes"] >= SIZE
        os.chown(file, 0, 0)
        command("quota", "set", place.path / "host0", MIB, "--user", NOBODY)
        os.chown(file, NOBODY, NOBODY)  # also beyond the limit
        (entry,) = [each for each in place.report()["quotas"] if each["uid"] == NOBODY and "host0" in each["path"]]
        assert entry["used_bytes"] >= SIZE > entry["limit_bytes"]
        os.chown(file, 0, 0)
        assert not [each for each in place.report()["quotas"] if each["uid"] == NOBODY and each["used_bytes"]]
    finally:
        command("quota", "set", place.path / "host0", "none", "--user", NOBODY)


def host_bytes(quota: dict[str, Any]) -> int:
    return int(quota["used_bytes"]) if quota["path"].endswith("host0") else 0


def test_a_new_owner_pays_for_what_is_being_parked(place: Survivor, file: Path) -> None:
    size = DEVICE - 4 * MIB
    file.write_bytes(noise(size))
    for milliseconds in range(1, 25, 3):
        os.chown(file, NOBODY, NOBODY)
        with ThreadPoolExecutor() as threads:
            parking = threads.submit(_daemons.park, named(file), 0)
            time.sleep(milliseconds / 1000)
            os.chown(file, 0, 0)
            parking.result()
        used = {(each["uid"], each["path"][-5:]): each["used_bytes"] for each in place.report()["quotas"]}
        assert (used[0, "host0"], used.get((NOBODY, "host0"), 0)) == (size, 0)
        _daemons.bring_back(named(file))
        # The device has the memory a moment before the account has it.
        wait_until(lambda: not any(map(host_bytes, place.report()["quotas"])), 5, "the host's memory to be free")


# ---- a shell ----


def test_a_shell_names_the_programs_that_it_cannot_ask_and_asks_the_others(place: Survivor, file: Path) -> None:
    with program(HOLD, file, "r") as deaf:
        refused = command("sleep", file, "--sleep-timeout", "0.2s", check=False)
        assert refused.returncode == 1
        assert f"PID {deaf.pid}" in refused.stderr
    polite = "import gpufs, sys\ngpufs.when_asked()\n" + HOLD.replace("sys.stdin.read()", "sys.stdin.readline()")
    polite += "\ngpufs.wake()\n"  # waits for the wake in progress
    polite += "print(array.tobytes() == open(sys.argv[1], 'rb').read(), flush=True)\n"
    with program(polite, file, "r+") as listener:
        wait_until(
            lambda: command("sleep", file, "--sleep-timeout", "2s", check=False).returncode == 0,
            PATIENCE,
            "the program to listen",
        )
        is_used(place, 0, 1)
        assert parked(file)
        assert json.loads((place.path / ".gpufs/leases").read_text())["leases"][0]["asleep"]
        assert "asleep" in command("leases", place.path).stdout
        assert "host0" in command("ls", file).stdout
        command("wake", file)
        wait_until(
            lambda: not json.loads((place.path / ".gpufs/leases").read_text())["leases"][0]["asleep"],
            PATIENCE,
            "the program to wake",
        )
        assert listener.stdin is not None
        assert listener.stdout is not None
        listener.stdin.write("\n")
        listener.stdin.flush()
        assert listener.stdout.readline() == "True\n"


# Attaches the files of argv, does what NAMES says when asked, and prints each question.
ASKED = """
import gpufs, sys
arrays = [gpufs.attach(path, "r+") for path in sys.argv[1:]]
def asked(what, paths):
    print(what, *(path.rpartition("/")[2] for path in paths), flush=True)
    ANSWER
gpufs.when_asked(sleep=lambda paths: asked("sleep", paths), wake=lambda paths: asked("wake", paths))
print("ready", flush=True)
sys.stdin.read()
"""


def answering(answer: str, *paths: Path) -> Any:
    return program(ASKED.replace("ANSWER", answer), *paths, stderr=subprocess.DEVNULL)


def test_a_program_is_asked_once_for_all_files_of_a_command(place: Survivor, shards: list[Path]) -> None:
    """For each file, so that the first one that woke let the program run into the others."""
    names = [path.name for path in shards]
    with answering("getattr(gpufs, what)(paths)", *shards) as listener:
        assert listener.stdout is not None
        wait_until(lambda: command("sleep", place.device, check=False).returncode == 0, PATIENCE, "it to listen")
        command("wake", *shards)
        wait_until(lambda: not any(map(parked, shards)), PATIENCE, "the files to wake")
        asked = [listener.stdout.readline().split() for _ in range(2)]
        assert [(what, sorted(paths)) for what, *paths in asked] == [(one, sorted(names)) for one in ("sleep", "wake")]


def test_a_shell_shows_why_a_program_does_not_sleep_and_wakes_the_others(place: Survivor, shards: list[Path]) -> None:
    with answering("getattr(gpufs, what)(paths)", *shards[:2]) as polite:
        wait_until(lambda: command("sleep", *shards[:2], check=False).returncode == 0, PATIENCE, "it to listen")
        command("wake", *shards)
        with answering("if what == 'sleep': raise RuntimeError('is training\x1b[31m')", shards[2]) as busy:
            began = time.monotonic()
            refused = [""]

            def is_refused() -> bool:
                refused[0] = command("sleep", *shards, "--sleep-timeout", "60s", check=False).stderr
                return "training" in refused[0]

            wait_until(is_refused, PATIENCE, "it to listen")
            assert f"PID {busy.pid}" in refused[0]
            assert "\x1b" not in refused[0]
            assert time.monotonic() - began < 60
            assert polite.stdout is not None
            words = [polite.stdout.readline().split()[0] for _ in range(4)]
            assert words == ["sleep", "wake"] * 2
        wait_until(lambda: not any(map(parked, shards)), PATIENCE, "the others to wake")
        is_used(place, 3, 0)


def test_programs_have_one_time_for_all_files_of_a_command(place: Survivor, shards: list[Path]) -> None:
    """Each file waited for the whole time: 83 minutes for 500 files of one stubborn user."""
    with answering("pass", *shards) as stubborn:

        def is_refused() -> bool:
            began = time.monotonic()
            done = command("sleep", *shards, "--sleep-timeout", "2s", check=False)
            took.append(time.monotonic() - began)
            return "within 2 s" in done.stderr and f"PID {stubborn.pid}" in done.stderr

        took: list[float] = []
        wait_until(is_refused, PATIENCE, "it to listen")
        assert 2 <= took[-1] < 5
    assert not any(map(parked, shards))


def test_requests_that_wait_for_programs_let_them_go_to_sleep(place: Survivor, file: Path) -> None:
    """A few of them took all turns of a plain user, so that no program of that user could go to sleep."""
    script = "import gpufs, sys, time\narrays = [gpufs.attach(path, 'r+') for path in sys.argv[1:]]\n"
    script += "gpufs.when_asked(sleep=lambda path: (time.sleep(0.3), gpufs.sleep(path)))\nprint('ready', flush=True)\n"
    files = [file.with_name(f"file{number}") for number in range(6)]
    for path in files:
        path.write_bytes(noise(2 * MIB))
        os.chown(path, NOBODY, NOBODY)

    def park(path: Path) -> int:
        return errno_of(_daemons.park, named(path), 5.0)

    def park_others() -> list[int]:
        with ThreadPoolExecutor(5) as threads:
            return list(threads.map(park, files[1:]))

    with program(script + "sys.stdin.read()\n", *files, user=NOBODY, group=NOBODY, extra_groups=[]):
        wait_until(lambda: park(files[0]) == 0, PATIENCE, "the program to listen")
        assert as_nobody(park_others) == [0] * 5
        assert all(map(parked, files))
    for path in files:
        path.unlink()


@pytest.mark.parametrize("follows", [True, False])
def test_a_shell_wakes_a_program_that_sleeps_on_an_older_version(place: Survivor, file: Path, follows: bool) -> None:
    script = "import gpufs, os, sys\ngpufs.when_asked()\n" + HOLD.replace("sys.stdin.read()", "sys.stdin.readline()")
    script = script.replace("print(", ("f = gpufs.follow(array)\n" if follows else "") + "gpufs.sleep()\nprint(", 1)
    script += "\ngpufs.wake()\nprint(array.tobytes()[0], flush=True)\n"  # waits for the wake in progress
    with program(script, file, "r+") as sleeper:
        (old,) = place.report()["leases"]
        assert old["asleep"]
        new = file.with_name("new")
        new.write_bytes(b"\xff" * SIZE)
        command("replace", new, file)
        command("wake", file)
        version = file.stat().st_ino if follows else old["inode"]

        def held() -> list[tuple[int, bool]]:  # while it moves to the new version, a lease of each
            return [(lease["inode"], lease["asleep"]) for lease in place.report()["leases"]]

        wait_until(lambda: held() == [(version, False)], PATIENCE, "the program to wake on its version")
        out, _ = sleeper.communicate("\n", timeout=PATIENCE)
        assert out == f"{255 if follows else noise(SIZE)[0]}\n"


def test_a_whole_mount_sleeps_and_the_hosts_files_stay(mount: Mounter, driver: str, tmp_path: Path) -> None:
    if driver == "hip":
        pytest.skip("the HIP driver has no host memory for files")
    (tmp_path / "data").write_bytes(noise(SIZE))
    with mount("--host-memory", str(DEVICE), "--backing", f"data={tmp_path}", memory=DEVICE) as made:
        path = made.device / "weights"
        path.write_bytes(noise(SIZE))
        (made.path / "host0" / "other").write_bytes(noise(SIZE))
        assert "unchanged: 1 in memory of the host" in command("sleep", made.path).stdout
        assert parked(path)
        command("wake", made.path)
        assert not parked(path)


def test_tools_that_look_for_a_gpu_do_not_find_the_hosts_memory(place: Survivor, driver: str) -> None:
    """The plug-ins of model servers compare each address with that of their GPU."""
    *devices, host = place.report()["devices"]
    found = {bool(re.fullmatch(r"[0-9a-f]+:[0-9a-f]+:[0-9a-f.]+", device["pci_address"])) for device in devices}
    assert found == {driver != "host"}
    assert (host["name"], host["pci_address"]) == ("host0", "")


def test_only_the_owner_may_move_a_file(file: Path) -> None:
    assert as_nobody(lambda: errno_of(_daemons.park, named(file), 0.0)) == EPERM
    assert as_nobody(lambda: errno_of(_daemons.bring_back, named(file))) == EPERM
    assert not parked(file)


# ---- eviction ----


@pytest.fixture
def evicting(mount: Mounter, driver: str) -> Iterator[GpufsMount]:
    if driver == "hip":
        pytest.skip("the HIP driver has no host memory for files")
    with mount("--evict", "--host-memory", str(2 * DEVICE), memory=DEVICE) as made:
        yield made


def test_a_full_device_parks_what_was_used_the_longest_time_ago(evicting: GpufsMount) -> None:
    files = [evicting.device / f"model{number}" for number in range(6)]
    for number, path in enumerate(files):
        path.write_bytes(noise(SIZE + number))
    assert [parked(path) for path in files] == [True, True, True, False, False, False]
    assert os.statvfs(evicting.device).f_bavail * 4096 > 2 * SIZE
    array = gpufs.attach(files[0], "r+")  # brings it back
    assert [parked(path) for path in files].count(False) == 3
    assert not parked(files[0])
    assert array.tobytes() == noise(SIZE)
    for number, path in enumerate(files):
        assert path.read_bytes() == noise(SIZE + number)
    array.close()
    gc.collect()


def test_files_in_use_and_pinned_ones_stay_and_the_rest_is_a_full_device(evicting: GpufsMount) -> None:
    used_one, pinned, opened, new = (evicting.device / name for name in ("used", "pinned", "opened", "new"))
    for path in (used_one, pinned, opened):
        path.write_bytes(noise(SIZE))
    command("pin", pinned)
    array = gpufs.attach(used_one, "r")
    with open(opened, "rb"):
        assert errno_of(lambda: new.write_bytes(noise(SIZE))) == ENOSPC
        assert not any(map(parked, (used_one, pinned, opened)))
    new.write_bytes(noise(SIZE))
    assert parked(opened)
    assert not parked(pinned)
    assert not parked(used_one)
    command("unpin", pinned)
    with pytest.raises(OSError) as missing:
        os.getxattr(pinned, "user.gpufs-pinned")
    assert missing.value.errno == ENODATA
    array.close()
    gc.collect()


def test_more_than_a_device_has_is_copied_saved_and_restored(evicting: GpufsMount, tmp_path: Path) -> None:
    """cp(1) could store it, gpufs cp refused, and a save of it could not be restored."""
    (tmp_path / "models").mkdir()
    for number in range(5):
        (tmp_path / "models" / f"model{number}").write_bytes(noise(SIZE + number))
    command("cp", "-r", "-j", "2", tmp_path / "models", evicting.device)
    command("save", evicting.path, tmp_path / "save")
    shutil.rmtree(evicting.device / "models")
    command("restore", "-j", "2", tmp_path / "save", evicting.path)
    for number in range(5):
        assert (evicting.device / "models" / f"model{number}").read_bytes() == noise(SIZE + number)
    (tmp_path / "models" / "model5").write_bytes(bytes(DEVICE + MIB))
    refused = command("cp", "-r", tmp_path / "models", evicting.device / "again", check=False)
    assert "No space left on device: needs" in refused.stderr


def test_a_call_that_must_fail_parks_nothing(evicting: GpufsMount) -> None:
    """Any user could send everybody's files away with one fallocate(1)."""
    files = [evicting.device / f"model{number}" for number in range(2)]
    for path in files:
        path.write_bytes(noise(SIZE))
    large = evicting.device / "large"
    with open(large, "wb") as opened, open(files[0], "rb"):
        for size in (DEVICE - 8 * MIB, 2 * DEVICE, 1 << 40):
            assert errno_of(os.posix_fallocate, opened.fileno(), 0, size) == ENOSPC
        assert not any(map(parked, files))
        os.posix_fallocate(opened.fileno(), 0, 20 * MIB)
        assert [parked(path) for path in files] == [False, True]
        os.posix_fallocate(opened.fileno(), 0, 22 * MIB)  # only a part of it is missing
    with open(large, "r+b") as opened:
        os.posix_fallocate(opened.fileno(), 0, DEVICE)
    assert all(map(parked, files))


def test_registered_memory_takes_the_space_of_files_that_nobody_uses(evicting: GpufsMount, driver: str) -> None:
    """It was refused with ENOSPC."""
    if driver != "host":
        pytest.skip("registered memory counts on the host driver alone")
    files = [evicting.device / f"model{number}" for number in range(3)]
    for path in files:
        path.write_bytes(noise(SIZE))
    memory = mmap.mmap(-1, SIZE)
    with gpufs.register(numpy.frombuffer(memory, numpy.uint8), evicting.device / "registered"):
        assert [parked(path) for path in files] == [True, False, False]


def test_models_in_turn_on_a_device_that_is_too_small_for_them(evicting: GpufsMount) -> None:
    files = [evicting.device / f"model{number}" for number in range(3)]
    for number, path in enumerate(files):
        path.write_bytes(noise(2 * SIZE + number))
    for turn in range(6):
        number = turn % 3
        array: Any = gpufs.attach(files[number], "r")
        assert array.tobytes() == noise(2 * SIZE + number)
        array.close()
        del array
        gc.collect()
