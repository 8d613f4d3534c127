"""What the CUDA driver's calls cost: the measurements behind the sizes that gpufs chose.

Prints one JSON object. Needs a GPU and libcuda, nothing else; run it as ``python bench/gpu/driver_costs.py``.
Times are medians in microseconds unless a key says otherwise, rates are GB/s (10^9 bytes).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from libcuda import GIB, MIB, Cuda, CudaError


def median_us(work: Callable[[], object], repeat: int = 15) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e6, 2)


def piece_steps(cuda: Cuda, size: int, stream: ctypes.c_void_p) -> dict[str, float]:
    """Microseconds of every call in the life of one piece."""
    steps: dict[str, float] = {}

    def step(name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        result = work(*arguments)
        steps[name] = (time.perf_counter() - start) * 1e6
        return result

    def zero() -> None:
        cuda("cuMemsetD8Async", base, ctypes.c_ubyte(0), size, stream)
        cuda("cuStreamSynchronize", stream)

    base = step("reserve", cuda.reserve, size)
    handle = step("create", cuda.create, size)
    step("map", cuda.map, base, size, handle)
    step("allow", cuda.allow, base, size)
    step("zero", zero)
    step("unmap", cuda, "cuMemUnmap", base, size)
    step("release", cuda, "cuMemRelease", handle)
    step("free", cuda, "cuMemAddressFree", base, size)
    return steps


def pieces(cuda: Cuda) -> dict[str, Any]:
    """What one piece of memory costs, by its size, call by call."""
    stream = cuda.stream()
    table: dict[str, Any] = {}
    for size in (2, 8, 32, 64, 128, 256, 512, 1024):
        runs = [piece_steps(cuda, size * MIB, stream) for _ in range(7)]
        table[f"{size} MiB"] = {name: round(statistics.median(run[name] for run in runs), 1) for name in runs[0]}
    return table


def populate(cuda: Cuda, total: int) -> dict[str, Any]:
    """Seconds to allocate and to free `total` bytes in pieces of one size, with one call that sets the access."""
    table: dict[str, Any] = {}
    for size in (2, 32, 64, 128, 256, 1024):
        count = size * MIB
        base = cuda.reserve(total)
        start = time.perf_counter()
        handles = []
        for offset in range(0, total, count):
            handles.append(cuda.create(count))
            cuda.map(base + offset, count, handles[-1])
        cuda.allow(base, total)
        taken = time.perf_counter()
        cuda("cuMemUnmap", base, total)
        for handle in handles:
            cuda("cuMemRelease", handle)
        given = time.perf_counter()
        cuda("cuMemAddressFree", base, total)
        table[f"{size} MiB"] = {"take_s": round(taken - start, 4), "give_back_s": round(given - taken, 4)}
    return table


def partial_maps(cuda: Cuda) -> dict[str, int]:
    """Whether a part of a piece can be mapped, and unmapped, by itself: result codes."""
    base = cuda.reserve(64 * MIB)
    handle = cuda.create(8 * MIB)
    result = {
        "map first half": cuda.try_call("cuMemMap", base, 4 * MIB, 0, handle, 0),
        "map second half": cuda.try_call("cuMemMap", base + 16 * MIB, 4 * MIB, 4 * MIB, handle, 0),
        "map whole": cuda.try_call("cuMemMap", base + 32 * MIB, 8 * MIB, 0, handle, 0),
    }
    result["unmap half of whole"] = cuda.try_call("cuMemUnmap", base + 32 * MIB, 4 * MIB)
    for offset in (0, 16 * MIB):
        cuda.try_call("cuMemUnmap", base + offset, 4 * MIB)
    cuda.try_call("cuMemUnmap", base + 32 * MIB, 8 * MIB)
    cuda.try_call("cuMemUnmap", base + 36 * MIB, 4 * MIB)
    cuda.try_call("cuMemRelease", handle)
    return result


def copies(cuda: Cuda) -> dict[str, Any]:
    """Latency of small copies, rate of large ones, and what waiting costs."""
    size = 256 * MIB
    device = ctypes.c_uint64()
    cuda("cuMemAlloc_v2", ctypes.byref(device), 2 * size)
    memory, pinned = cuda.pinned(size)
    pageable = ctypes.create_string_buffer(size)
    pageable_address = ctypes.addressof(pageable)
    ctypes.memset(pageable_address, 1, size)
    stream = cuda.stream()
    spin, block = cuda.event(2), cuda.event(3)

    def copy(host: int, count: int, inward: bool = True) -> None:
        if inward:
            cuda("cuMemcpyHtoDAsync_v2", device.value, ctypes.c_void_p(host), count, stream)
        else:
            cuda("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host), device.value, count, stream)

    def synchronous(host: int, count: int, inward: bool = True) -> Callable[[], None]:
        def work() -> None:
            copy(host, count, inward)
            cuda("cuStreamSynchronize", stream)

        return work

    def by_event(count: int, event: ctypes.c_void_p) -> Callable[[], None]:
        def work() -> None:
            copy(pinned, count)
            cuda("cuEventRecord", event, stream)
            cuda("cuEventSynchronize", event)

        return work

    result: dict[str, Any] = {}
    for count in (4096, 65536, MIB, 4 * MIB, 8 * MIB, 64 * MIB):
        key = f"{count // 1024} KiB"
        result[key] = {
            "pinned in": median_us(synchronous(pinned, count)),
            "pinned out": median_us(synchronous(pinned, count, False)),
            "pageable in": median_us(synchronous(pageable_address, count)),
            "pageable out": median_us(synchronous(pageable_address, count, False)),
            "wait by spinning event": median_us(by_event(count, spin)),
            "wait by blocking event": median_us(by_event(count, block)),
        }

    def fill(name: str, *arguments: Any) -> Callable[[], None]:
        def work() -> None:
            cuda(name, device.value, *arguments, stream)
            cuda("cuStreamSynchronize", stream)

        return work

    result["zero 512 MiB by bytes"] = median_us(fill("cuMemsetD8Async", ctypes.c_ubyte(0), 2 * size))
    result["zero 512 MiB by words"] = median_us(fill("cuMemsetD32Async", ctypes.c_uint(0), 2 * size // 4))

    def within() -> None:
        cuda("cuMemcpyDtoDAsync_v2", device.value + size, device.value, size, stream)
        cuda("cuStreamSynchronize", stream)

    result["copy 256 MiB on the device"] = median_us(within)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    result["cuMemGetInfo"] = median_us(lambda: cuda("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total)), 50)
    result["threads, 1 MiB pageable, GB/s in"] = {n: threads_rate(cuda, n, device.value, False) for n in (1, 4, 8)}
    result["threads, 1 MiB pinned, GB/s in"] = {n: threads_rate(cuda, n, device.value, True) for n in (1, 4, 8)}
    cuda("cuMemHostUnregister", ctypes.c_void_p(pinned))
    del memory
    return result


def threads_rate(cuda: Cuda, count: int, device: int, pin: bool) -> float:
    """GB/s of `count` threads that each copy 1 MiB after another, synchronously, on a stream of their own."""
    size, rounds = MIB, 400
    barrier = threading.Barrier(count + 1)

    def work(index: int) -> None:
        cuda.bind()
        stream = cuda.stream()
        if pin:
            _memory, address = cuda.pinned(size)
        else:
            buffer = ctypes.create_string_buffer(size)
            ctypes.memset(buffer, 1, size)
            address = ctypes.addressof(buffer)
        copy = cuda.library.cuMemcpyHtoDAsync_v2
        wait = cuda.library.cuStreamSynchronize
        target, source, length = ctypes.c_uint64(device + index * size), ctypes.c_void_p(address), ctypes.c_size_t(size)
        barrier.wait()
        for _ in range(rounds):
            copy(target, source, length, stream)
            wait(stream)
        barrier.wait()
        if pin:
            cuda("cuMemHostUnregister", ctypes.c_void_p(address))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    barrier.wait()
    start = time.perf_counter()
    barrier.wait()
    elapsed = time.perf_counter() - start
    for thread in threads:
        thread.join()
    return round(count * rounds * size / elapsed / 1e9, 2)


def read_only_pinning(cuda: Cuda, folder: str) -> dict[str, Any]:
    """Pinning a read-only mapping of a file's pages: the result code, and microseconds by size."""
    result: dict[str, Any] = {"attribute": cuda.attribute(113), "folder": folder}
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(os.urandom(MIB) * 64)
        file.flush()
        for size in (4, 16, 64):
            memory = mmap.mmap(file.fileno(), size * MIB, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
            address = address_of_read_only(memory)
            start = time.perf_counter()
            code = cuda.try_call("cuMemHostRegister_v2", ctypes.c_void_p(address), size * MIB, 9)
            pinned = time.perf_counter()
            entry: dict[str, Any] = {"code": code, "pin_us": round((pinned - start) * 1e6)}
            if code == 0:
                cuda("cuMemHostUnregister", ctypes.c_void_p(address))
                entry["unpin_us"] = round((time.perf_counter() - pinned) * 1e6)
            result[f"{size} MiB"] = entry
            memory.close()
    return result


def address_of_read_only(memory: mmap.mmap) -> int:
    """The address of a mapping that cannot be written (ctypes wants a writable buffer)."""

    class PyBuffer(ctypes.Structure):
        _fields_ = [
            ("buf", ctypes.c_void_p),
            ("obj", ctypes.py_object),
            ("len", ctypes.c_ssize_t),
            ("itemsize", ctypes.c_ssize_t),
            ("readonly", ctypes.c_int),
            ("ndim", ctypes.c_int),
            ("format", ctypes.c_char_p),
            ("shape", ctypes.c_void_p),
            ("strides", ctypes.c_void_p),
            ("suboffsets", ctypes.c_void_p),
            ("internal", ctypes.c_void_p),
        ]

    view = PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), ctypes.byref(view), 0)
    address = int(view.buf)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
    return address


def exports(cuda: Cuda) -> dict[str, Any]:
    """Exporting a piece as a file descriptor."""
    result: dict[str, Any] = {}
    for size in (2, 256, 1024):
        handle = cuda.create(size * MIB)
        descriptors: list[int] = []

        def work(handle: int = handle, descriptors: list[int] = descriptors) -> None:
            descriptor = ctypes.c_int(-1)
            cuda("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, 1, 0)
            descriptors.append(descriptor.value)

        result[f"{size} MiB"] = median_us(work, 5)
        for descriptor in descriptors:
            os.close(descriptor)
        cuda("cuMemRelease", handle)
    return result


def main() -> None:
    start = time.perf_counter()
    cuda = Cuda()
    version = ctypes.c_int()
    cuda("cuDriverGetVersion", ctypes.byref(version))
    report: dict[str, Any] = {
        "driver": version.value,
        "open_s": round(time.perf_counter() - start, 3),
        "attributes": {n: cuda.attribute(n) for n in (99, 102, 103, 110, 113)},
    }
    parts: list[tuple[str, Callable[[], object]]] = [
        ("pieces", lambda: pieces(cuda)),
        ("populate 16 GiB", lambda: populate(cuda, 16 * GIB)),
        ("partial maps", lambda: partial_maps(cuda)),
        ("exports", lambda: exports(cuda)),
        ("copies", lambda: copies(cuda)),
        ("read-only pinning, tmpfs", lambda: read_only_pinning(cuda, "/dev/shm")),
        ("read-only pinning, disk", lambda: read_only_pinning(cuda, "/var/tmp")),
    ]
    for name, part in parts:
        try:
            report[name] = part()
        except (CudaError, OSError) as error:
            report[name] = f"failed: {error}"
    cuda.properties.rdma = 1
    try:
        cuda("cuMemRelease", cuda.create(2 * MIB))
        report["memory for direct RDMA"] = "yes"
    except CudaError as error:
        report["memory for direct RDMA"] = str(error)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
