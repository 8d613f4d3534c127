"""Mappings: shared and private, coherent with read and write, at and beyond the end, under truncation."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support import linux
from support.data import GRANULE, MIB, assert_same, noise, read_all
from support.processes import ChildKilled, in_child

pytestmark = pytest.mark.driver
PAGE = mmap.PAGESIZE
SIZE = 3 * MIB + 100


@pytest.fixture
def file(root: Path) -> Path:
    path = root / "file"
    path.write_bytes(noise(SIZE, 1))
    return path


def test_a_shared_mapping_reads_and_writes_the_file(file: Path) -> None:
    data = bytearray(noise(SIZE, 1))
    with open(file, "r+b", buffering=0) as stream, mmap.mmap(stream.fileno(), 0) as area:
        assert_same(bytes(area), bytes(data))
        for at, text in ((0, b"begin"), (PAGE - 2, b"over a page"), (GRANULE - 3, b"granule"), (SIZE - 3, b"end")):
            area[at : at + len(text)] = text
            data[at : at + len(text)] = text
        area.flush()
        assert_same(os.pread(stream.fileno(), SIZE + 1, 0), bytes(data))
    assert_same(read_all(file), bytes(data))
    assert file.stat().st_size == SIZE


def test_a_private_mapping_does_not_change_the_file(file: Path) -> None:
    with open(file, "r+b") as stream, mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE) as area:
        area[100:200] = b"x" * 100
        assert area[99:201] == noise(SIZE, 1)[99:100] + b"x" * 100 + noise(SIZE, 1)[200:201]
        area.flush()
    assert_same(read_all(file), noise(SIZE, 1))


def test_stores_and_writes_to_a_page_under_a_lock_are_kept(file: Path) -> None:
    """Each thread changes its own word of a page, and only one thread at a time changes the page.

    Threads that change pages of their own need no lock, whichever way they write.
    """
    threads, rounds, word = 4, 150, struct.Struct("<Q")
    fd = os.open(file, os.O_RDWR)
    lock = threading.Lock()
    with mmap.mmap(fd, 0) as area:

        def change(thread: int, *, shared: bool) -> None:
            for number in range(rounds):
                place = number * PAGE + thread * word.size if shared else (number * threads + thread) * PAGE
                with lock if shared else contextlib.nullcontext():
                    if thread == 0:
                        os.pwrite(fd, word.pack(thread + 1), place)
                    else:
                        area[place : place + word.size] = word.pack(thread + 1)

        for shared in (True, False):
            os.truncate(file, 0)
            os.truncate(file, rounds * threads * PAGE)
            with ThreadPoolExecutor(threads) as pool:
                for done in [pool.submit(change, thread, shared=shared) for thread in range(threads)]:
                    done.result()
            area.flush()
            found = read_all(file)
            for number in range(rounds):
                for thread in range(threads):
                    place = number * PAGE + thread * word.size if shared else (number * threads + thread) * PAGE
                    assert word.unpack_from(found, place) == (thread + 1,), (shared, number, thread)
    os.close(fd)


def test_a_mapping_outlives_its_descriptor_and_its_name(file: Path) -> None:
    fd = os.open(file, os.O_RDWR)
    area = mmap.mmap(fd, 0)
    os.close(fd)
    file.unlink()
    area[0:4] = b"last"
    area.flush()
    assert area[:4] == b"last"
    assert_same(area[4:SIZE], noise(SIZE, 1)[4:])
    area.close()


def test_rest_of_the_last_page_is_zero_and_stays_out_of_the_file(file: Path, on_gpufs: bool) -> None:
    with open(file, "r+b") as stream, mmap.mmap(stream.fileno(), SIZE) as area:
        address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        beyond = ctypes.string_at(address + SIZE, PAGE - SIZE % PAGE)
        assert beyond == bytes(len(beyond))
        ctypes.memset(address + SIZE, 7, len(beyond))
        linux.msync(address // PAGE * PAGE, (SIZE + PAGE - 1) // PAGE * PAGE, linux.MS_SYNC)
        assert os.fstat(stream.fileno()).st_size == SIZE
        stream.truncate(SIZE + PAGE)
        if on_gpufs:  # POSIX asks for zeros; tmpfs shows what was stored there
            assert_same(os.pread(stream.fileno(), 2 * PAGE, SIZE), bytes(PAGE))


def test_access_beyond_the_end_is_a_bus_error(file: Path) -> None:
    def touch() -> int:
        fd = os.open(file, os.O_RDONLY)
        os.ftruncate(os.open(file, os.O_WRONLY), 4 * PAGE)
        with mmap.mmap(fd, 4 * PAGE, prot=mmap.PROT_READ) as area:
            os.truncate(file, PAGE + 1)
            assert area[PAGE] == noise(SIZE, 1)[PAGE]
            return area[2 * PAGE]

    with pytest.raises(ChildKilled) as caught:
        in_child(touch)
    assert caught.value.number == signal.SIGBUS


def test_a_mapping_shows_zeros_after_truncation_and_growth(file: Path) -> None:
    fd = os.open(file, os.O_RDWR)
    with mmap.mmap(fd, 0) as area:
        assert area[GRANULE : GRANULE + 3] == noise(SIZE, 1)[GRANULE : GRANULE + 3]
        area[MIB + 10] = 99
        os.ftruncate(fd, MIB + 5)
        assert_same(area[: MIB + 5], noise(SIZE, 1)[: MIB + 5])
        os.ftruncate(fd, SIZE)
        assert area[MIB + 5 : MIB + 20] == bytes(15)
        assert area[GRANULE : GRANULE + PAGE] == bytes(PAGE)
        area[GRANULE] = 5
        assert os.pread(fd, 1, GRANULE) == b"\5"
    os.close(fd)


def test_copy_file_range_is_coherent_with_mappings(file: Path, root: Path) -> None:
    """copy_file_range must see what was stored into its source, and show in a mapping of its target."""
    with open(file, "r+b") as source, open(root / "target", "w+b") as target:
        target.truncate(SIZE)
        with mmap.mmap(source.fileno(), 0) as before, mmap.mmap(target.fileno(), 0) as after:
            assert after[:10] == bytes(10)
            before[:10] = b"just saved"
            assert os.copy_file_range(source.fileno(), target.fileno(), SIZE, 0, 0) == SIZE
            assert after[:10] == b"just saved"
            assert_same(after[10:], noise(SIZE, 1)[10:])


def test_numpy_memmap_works(root: Path) -> None:
    made = np.memmap(root / "array", dtype=np.float32, mode="w+", shape=(1000, 777))
    made[:] = np.arange(777_000, dtype=np.float32).reshape(1000, 777)
    made.flush()
    again = np.memmap(root / "array", dtype=np.float32, mode="r+", shape=(1000, 777))
    assert np.array_equal(again, made)
    again[500] *= -1
    again.flush()
    assert np.array_equal(np.fromfile(root / "array", dtype=np.float32)[500 * 777 : 501 * 777], again[500])
    copy = np.memmap(root / "array", dtype=np.float32, mode="c", shape=(1000, 777))
    copy[:] = 0
    assert np.array_equal(np.memmap(root / "array", dtype=np.float32, mode="r", shape=(1000, 777)), again)
    del made, again, copy
