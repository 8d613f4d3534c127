"""The limits of the machine itself, to which gpufs is compared.

All rates are measured with the plainest program that moves those bytes: pinned copies by the driver, threads that read
or write a file with large requests. Sizes are bytes, results seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from libcuda import MIB, Cuda

REQUEST = 8 * MIB


class DevicePeaks:
    """Copies by the driver alone, over `size` bytes of device memory."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.stream = cuda.stream()
        self.host_bytes = 256 * MIB
        self._memory, self.host = cuda.pinned(self.host_bytes)

    def close(self) -> None:
        """Unpins the memory: a registration outlives its mapping, and blocks the next one at that address."""
        self.cuda("cuMemHostUnregister", ctypes.c_void_p(self.host))

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self.cuda("cuMemAlloc_v2", ctypes.byref(address), size)
        return address.value

    def free(self, address: int) -> None:
        self.cuda("cuMemFree_v2", address)

    def copy_in(self, address: int, size: int) -> None:
        """Pinned host memory to the device, the same 256 MiB again and again."""
        for offset in range(0, size, self.host_bytes):
            count = min(self.host_bytes, size - offset)
            self.cuda("cuMemcpyHtoDAsync_v2", address + offset, ctypes.c_void_p(self.host), count, self.stream)
        self.cuda("cuStreamSynchronize", self.stream)

    def copy_out(self, address: int, size: int) -> None:
        for offset in range(0, size, self.host_bytes):
            count = min(self.host_bytes, size - offset)
            self.cuda("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(self.host), address + offset, count, self.stream)
        self.cuda("cuStreamSynchronize", self.stream)

    def copy_within(self, destination: int, source: int, size: int) -> None:
        self.cuda("cuMemcpyDtoDAsync_v2", destination, source, size, self.stream)
        self.cuda("cuStreamSynchronize", self.stream)


def in_threads(count: int, size: int, work: Callable[[int, int, mmap.mmap], None]) -> float:
    """Seconds until `count` threads have done work(offset, bytes, memory) over all of `size`, in turns of one request.

    Each thread has memory of its own, touched before the clock starts.
    """
    lock = threading.Lock()
    barrier = threading.Barrier(count + 1)
    position = 0
    failures: list[BaseException] = []

    def run() -> None:
        nonlocal position
        memory = mmap.mmap(-1, REQUEST)
        memory[:: mmap.PAGESIZE] = b"x" * (REQUEST // mmap.PAGESIZE)
        try:
            barrier.wait()
            while True:
                with lock:
                    offset, position = position, position + REQUEST
                if offset >= size:
                    break
                work(offset, min(REQUEST, size - offset), memory)
        except BaseException as error:  # noqa: BLE001  the caller raises it
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        barrier.wait()
        start = time.perf_counter()
        for thread in threads:
            thread.join()
    except BaseException:  # the row's time is over: no thread may use the file when the caller closes it
        barrier.abort()
        with lock:
            position = size
        for thread in threads:
            thread.join()
        raise
    if failures:
        raise failures[0]
    return time.perf_counter() - start


def read_file(path: Path, threads: int, direct: bool) -> float:
    """Seconds to read all of a file, with O_DIRECT or through the page cache."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:

        def work(offset: int, count: int, memory: mmap.mmap) -> None:
            done = os.preadv(descriptor, [memoryview(memory)[:count]], offset)
            if done != count:
                raise OSError(f"short read: {done} of {count} bytes at {offset}")

        return in_threads(threads, os.fstat(descriptor).st_size // 4096 * 4096, work)
    finally:
        os.close(descriptor)


def write_file(path: Path, size: int, threads: int) -> float:
    """Seconds to write a fresh file through the page cache."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:

        def work(offset: int, count: int, memory: mmap.mmap) -> None:
            done = os.pwritev(descriptor, [memoryview(memory)[:count]], offset)
            if done != count:
                raise OSError(f"short write: {done} of {count} bytes at {offset}")

        return in_threads(threads, size, work)
    finally:
        os.close(descriptor)
