"""Operations on the program's own CUDA streams: between its kernels, with numbers that they write, and many at once."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.data import KIB, MIB, assert_same, noise
from support.mounting import Mounter

import gpufs
from gpufs import engine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

# pause(cell): stays until the number there is not 0. store(cell, value): writes it. sum(cell, data, words): adds the
# words of data up into the number there.
KERNELS = rb"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry pause(.param .u64 cell)
{
  .reg .u64 %a; .reg .u64 %v; .reg .pred %p;
  ld.param.u64 %a, [cell];
again:
  ld.volatile.global.u64 %v, [%a];
  setp.eq.u64 %p, %v, 0;
  @%p bra again;
  ret;
}
.visible .entry store(.param .u64 cell, .param .u64 value)
{
  .reg .u64 %a; .reg .u64 %v;
  ld.param.u64 %a, [cell];
  ld.param.u64 %v, [value];
  st.volatile.global.u64 [%a], %v;
  membar.sys;
  ret;
}
.visible .entry sum(.param .u64 cell, .param .u64 data, .param .u64 words)
{
  .reg .u64 %a; .reg .u64 %d; .reg .u64 %n; .reg .u64 %s; .reg .u64 %v; .reg .pred %p;
  ld.param.u64 %a, [cell];
  ld.param.u64 %d, [data];
  ld.param.u64 %n, [words];
  mov.u64 %s, 0;
next:
  setp.eq.u64 %p, %n, 0;
  @%p bra done;
  ld.volatile.global.u64 %v, [%d];
  add.u64 %s, %s, %v;
  add.u64 %d, %d, 8;
  sub.u64 %n, %n, 1;
  bra next;
done:
  st.volatile.global.u64 [%a], %s;
  membar.sys;
  ret;
}
"""
DATA = noise(16 * MIB)


class Cuda:
    """libcuda as the program itself uses it, beside gpufs, in the same primary context."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        device, self.context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self.device = device
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self("cuCtxSetCurrent", self.context)
        self("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(KERNELS))
        self.module = module
        self.functions: dict[str, ctypes.c_void_p] = {}
        for name in ("pause", "store", "sum"):
            function = ctypes.c_void_p()
            self("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            self.functions[name] = function

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def stream(self) -> int:
        stream = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(stream), 1)
        return stream.value or 0

    def launch(self, name: str, stream: int, *values: int) -> None:
        numbers = [ctypes.c_uint64(value) for value in values]
        pointers = (ctypes.c_void_p * len(numbers))(*(ctypes.addressof(number) for number in numbers))
        handle = ctypes.c_void_p(stream)
        self("cuLaunchKernel", self.functions[name], 1, 1, 1, 1, 1, 1, 0, handle, pointers, None)

    def copy_back(self, stream: int, host: ctypes.Array[ctypes.c_char], address: int) -> None:
        """A copy of the program's own behind whatever the stream holds."""
        size = ctypes.c_size_t(len(host))
        self("cuMemcpyDtoHAsync_v2", host, ctypes.c_uint64(address), size, ctypes.c_void_p(stream))

    def synchronize(self, stream: int) -> None:
        self("cuStreamSynchronize", ctypes.c_void_p(stream))

    def destroy(self, stream: int) -> None:
        self("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def close(self) -> None:
        self("cuModuleUnload", self.module)
        self("cuDevicePrimaryCtxRelease_v2", self.device)


@pytest.fixture
def cuda(driver: str) -> Iterator[Cuda]:
    if driver != "cuda":
        pytest.skip("needs --driver cuda")
    opened = Cuda()
    yield opened
    opened.close()


@pytest.fixture(params=["waits", "calls"])
def gpu(request: pytest.FixtureRequest, cuda: Cuda) -> Iterator[engine.Engine]:
    """An engine whose streams wait for values, and one whose streams are held by calls of the host."""
    with engine.Engine("cuda", devices=1) as opened:
        engine.configure_operations(opened, stream_waits="auto" if request.param == "waits" else "off")
        yield opened


@pytest.fixture
def file(gpu: engine.Engine, tmp_path: Path) -> engine.BackingFile:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return engine.BackingFile.open(gpu, path, "r+")


def device_memory(cuda: Cuda, gpu: engine.Engine, size: int) -> engine.DeviceRange:
    address = ctypes.c_uint64()
    cuda("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    return engine.DeviceRange(0, address.value, size)


def test_the_device_waits_for_values(gpu: engine.Engine, request: pytest.FixtureRequest) -> None:
    with engine.Stream(gpu) as stream:
        assert stream.waits_for_values == request.node.name.endswith("[waits]")


def test_a_read_between_two_kernels(cuda: Cuda, gpu: engine.Engine, file: engine.BackingFile) -> None:
    """A kernel pauses the stream, numbers change meanwhile; a kernel behind finds what was read with those."""
    stream = cuda.stream()
    with engine.Cells(gpu, 5) as cells:
        pause, total, offset, size, count = range(5)
        memory = device_memory(cuda, gpu, MIB)
        cell = [cells.device_address + 8 * index for index in range(5)]
        cells[offset], cells[size] = 0, MIB
        cuda.launch("pause", stream, cell[pause])
        cuda.launch("store", stream, cell[offset], 64 * KIB)  # the kernel before says where to read
        future = file.read_async(memory, cells.late(size), cells.late(offset), stream=stream, count=cells.late(count))
        cuda.launch("sum", stream, cell[total], memory.address, 512 * KIB // 8)
        time.sleep(0.05)
        assert not future.done()
        assert cells[total] == 0
        cells[size] = 512 * KIB
        cells[pause] = 1
        assert future.result(60) == 512 * KIB
        cuda.synchronize(stream)
        assert cells[count] == 512 * KIB
        part = DATA[64 * KIB : 64 * KIB + 512 * KIB]
        words = memoryview(part).cast("Q")
        assert cells[total] & (1 << 64) - 1 == sum(words) & (1 << 64) - 1
        cuda("cuMemFree_v2", ctypes.c_uint64(memory.address))
    cuda.destroy(stream)


def test_a_write_behind_a_kernel(cuda: Cuda, gpu: engine.Engine, file: engine.BackingFile, tmp_path: Path) -> None:
    stream = cuda.stream()
    memory = device_memory(cuda, gpu, 4096)
    with engine.Cells(gpu) as cells:
        cuda.launch("pause", stream, cells.device_address)
        cuda.launch("store", stream, memory.address + 8, 0x1122334455667788)
        future = file.write_async(memory, 8, 1000, 8, stream=stream)
        cells[0] = 1
        assert future.result(60) == 8
        assert (tmp_path / "file").read_bytes()[1000:1008] == (0x1122334455667788).to_bytes(8, "little")
    cuda("cuMemFree_v2", ctypes.c_uint64(memory.address))
    cuda.destroy(stream)


def test_many_reads_in_flight(cuda: Cuda, gpu: engine.Engine, file: engine.BackingFile) -> None:
    """On four streams that a kernel pauses, each with a copy before: more than the device's queues take."""
    count, size = 800, 64 * KIB
    streams = [cuda.stream() for _ in range(4)]
    memory = device_memory(cuda, gpu, size)
    back = (ctypes.c_char * size)()
    # A copy to memory that is not pinned would wait right where it is queued.
    cuda("cuMemHostRegister_v2", back, ctypes.c_size_t(size), 1)
    with engine.Buffer(gpu) as buffer, engine.Cells(gpu) as cells:
        for stream in streams:
            cuda.launch("pause", stream, cells.device_address)
            cuda.copy_back(stream, back, memory.address)
        futures = [
            file.read_async(buffer, size, index % 256 * size, index % 256 * size, stream=streams[index % len(streams)])
            for index in range(count)
        ]
        assert not any(future.done() for future in futures)
        cells[0] = 1
        assert {future.result(60) for future in futures} == {size}
        assert_same(buffer.read_bytes(0, len(DATA)), DATA)
    for stream in streams:
        cuda.destroy(stream)
    cuda("cuMemHostUnregister", back)
    cuda("cuMemFree_v2", ctypes.c_uint64(memory.address))


@pytest.mark.parametrize("size", [64 * KIB, len(DATA)], ids=["one chunk", "batches of chunks"])
def test_copies_to_the_host_behind_blocked_streams(
    cuda: Cuda, gpu: engine.Engine, file: engine.BackingFile, size: int
) -> None:
    """Copies to the device have other queues, so the reads are not blocked: see docs/operations.md."""
    streams = [cuda.stream() for _ in range(4)]
    memory = device_memory(cuda, gpu, size * len(streams))
    backs = [(ctypes.c_char * size)() for _ in streams]
    parts = [index * size % len(DATA) for index in range(len(streams))]
    # Copies to memory that is not pinned would wait right where they are queued.
    for back in backs:
        cuda("cuMemHostRegister_v2", back, ctypes.c_size_t(size), 1)
    with engine.Cells(gpu) as cells:
        futures = []
        for index, stream in enumerate(streams):
            cuda.launch("pause", stream, cells.device_address)
            futures.append(file.read_async(memory, size, parts[index], index * size, stream=stream))
        for index, stream in enumerate(streams):
            cuda.copy_back(stream, backs[index], memory.address + index * size)
        cells[0] = 1
        assert {future.result(60) for future in futures} == {size}
        for index, stream in enumerate(streams):
            cuda.synchronize(stream)
            assert_same(bytes(backs[index]), DATA[parts[index] : parts[index] + size])
            cuda("cuMemHostUnregister", backs[index])
            cuda.destroy(stream)
    cuda("cuMemFree_v2", ctypes.c_uint64(memory.address))


def test_large_writes_behind_blocked_streams(
    cuda: Cuda, gpu: engine.Engine, file: engine.BackingFile, tmp_path: Path
) -> None:
    """Each of four streams waits for its own write, whose batches of copies use other streams."""
    size = len(DATA)
    streams = [cuda.stream() for _ in range(4)]
    with engine.Buffer(gpu) as buffer, engine.Cells(gpu, 1 + len(streams)) as cells:
        assert file.read(buffer) == size
        futures = []
        for index, stream in enumerate(streams):
            cuda.launch("pause", stream, cells.device_address)
            futures.append(file.write_async(buffer, size, index * size, stream=stream))
            cuda.launch("store", stream, cells.device_address + 8 * (1 + index), 1)
        assert not any(future.done() for future in futures)
        cells[0] = 1
        assert {future.result(60) for future in futures} == {size}
        for index, stream in enumerate(streams):
            cuda.synchronize(stream)
            assert cells[1 + index] == 1
            cuda.destroy(stream)
    assert_same((tmp_path / "file").read_bytes(), DATA * len(streams))


def test_closing_with_a_paused_stream(cuda: Cuda, gpu: engine.Engine, file: engine.BackingFile) -> None:
    """The engine ends while the program's stream stands, and the stream goes on afterwards."""
    stream = cuda.stream()
    flag = ctypes.c_uint64()
    host = ctypes.c_void_p()
    cuda("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(8), 2)
    word = ctypes.c_uint64.from_address(host.value or 0)
    word.value = 0
    cuda("cuMemHostGetDevicePointer_v2", ctypes.byref(flag), host, 0)
    cuda.launch("pause", stream, flag.value)
    future = file.read_async(engine.Buffer(gpu), 1000, stream=stream)
    gpu.close()
    assert future.cancelled() or future.exception(60) is not None
    word.value = 1
    cuda.synchronize(stream)
    cuda.destroy(stream)
    cuda("cuMemFreeHost", host)


def test_captures_survive_what_other_threads_do(
    cuda: Cuda, gpu: engine.Engine, file: engine.BackingFile, mount: Mounter
) -> None:
    """A graph that the program captures in CUDA's default mode is whole after copies, attaching and closing."""
    weights = mount().path / "gpu0/weights"
    weights.write_bytes(DATA)
    attached = gpufs.attach(weights)
    memory = device_memory(cuda, gpu, len(DATA))
    captured, side = cuda.stream(), cuda.stream()

    def work() -> None:
        assert file.read(memory) == len(DATA)
        assert file.read_async(memory, len(DATA), stream=side).result(60) == len(DATA)
        gpufs.attach(weights, "r+").close()
        gpufs.attach(weights, "c").close()
        attached.close()

    with engine.Cells(gpu, 2) as cells, ThreadPoolExecutor(1) as pool:
        graph, nodes = ctypes.c_void_p(), ctypes.c_size_t()
        cuda("cuStreamBeginCapture_v2", ctypes.c_void_p(captured), 0)
        cuda.launch("store", captured, cells.device_address, 1)
        pool.submit(work).result(60)
        cuda.launch("store", captured, cells.device_address + 8, 2)
        cuda("cuStreamEndCapture", ctypes.c_void_p(captured), ctypes.byref(graph))
        cuda("cuGraphGetNodes", graph, None, ctypes.byref(nodes))
        assert nodes.value == 2
        cuda("cuGraphDestroy", graph)
    cuda("cuMemFree_v2", ctypes.c_uint64(memory.address))


def test_default_streams_and_capture(cuda: Cuda, gpu: engine.Engine, file: engine.BackingFile) -> None:
    with engine.Buffer(gpu) as buffer:
        for handle in (0, 1, 2):
            assert file.read_async(buffer, 1000, stream=handle).result(60) == 1000
        used, fresh = cuda.stream(), cuda.stream()
        assert file.read_async(buffer, 1000, stream=used).result(60) == 1000
        for stream in (used, fresh):
            cuda("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), 2)
            with pytest.raises(engine.EngineError, match="captured into a graph"):
                file.read_async(buffer, 1000, stream=stream)
            graph, nodes = ctypes.c_void_p(), ctypes.c_size_t()
            cuda("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
            cuda("cuGraphGetNodes", graph, None, ctypes.byref(nodes))
            assert nodes.value == 0, "the refused read is in the program's graph"
            cuda("cuGraphDestroy", graph)
            assert file.read_async(buffer, 1000, stream=stream).result(60) == 1000
            cuda.destroy(stream)
