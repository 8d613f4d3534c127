"""Mappings: shared and private, coherent with read and write, at and beyond the end, under truncation."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support import linux
from support.data import GRANULE, MIB, assert_same, noise, read_all

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


def test_a_scan_sees_what_is_written_ahead_of_it(root: Path) -> None:
    """Reading ahead may have cached the page before the write."""
    data = bytearray(noise(48 * MIB, 1))
    path = root / "file"
    path.write_bytes(data)
    with open(path, "r+b", buffering=0) as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as area:
        for at in range(0, len(data), MIB):
            assert_same(area[at : at + MIB], bytes(data[at : at + MIB]))
            for ahead in (at + MIB, at + 10 * MIB, at + 25 * MIB):
                text = noise(PAGE + 100, at + ahead)
                if ahead + len(text) <= len(data):
                    os.pwrite(stream.fileno(), text, ahead)
                    data[ahead : ahead + len(text)] = text
    assert_same(read_all(path), bytes(data))
