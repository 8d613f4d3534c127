"""Operations on streams and in batches: their order, late numbers, futures in threads, trio and asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import errno
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import trio
from support.data import KIB, MIB, assert_same, noise
from support.processes import PATIENCE, wait_until

from gpufs import engine

DATA = noise(MIB)


@pytest.fixture
def host() -> Iterator[engine.Engine]:
    with engine.Engine("host", devices=2, memory_bytes=256 * MIB) as opened:
        yield opened


@pytest.fixture
def file(host: engine.Engine, tmp_path: Path) -> engine.BackingFile:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return engine.BackingFile.open(host, path, "r+")


class Gate:
    """Holds a stream until it is opened."""

    def __init__(self, stream: engine.Stream) -> None:
        self._open = threading.Event()
        stream.call(self._wait)

    def _wait(self) -> None:
        assert self._open.wait(PATIENCE)

    def open(self) -> None:
        self._open.set()


def test_a_read_keeps_its_order_in_the_stream(host: engine.Engine, file: engine.BackingFile) -> None:
    seen: list[tuple[int, int]] = []
    with engine.Stream(host) as stream, engine.Buffer(host) as buffer, engine.Cells(host, 2) as cells:
        gate = Gate(stream)
        stream.call(lambda: cells.__setitem__(0, 4321))  # what comes before may say how much is to be read
        cells[0] = len(DATA)
        future = file.read_async(buffer, cells.late(0), 5, 7, stream=stream, count=cells.late(1))
        stream.call(lambda: seen.append((cells[1], buffer.info.size)))
        assert stream.outstanding == 1
        assert not future.done()
        assert buffer.info.size == 0
        gate.open()
        assert future.result(60) == 4321
        stream.synchronize()
        assert seen == [(4321, 4321 + 7)]
        assert_same(buffer.read_bytes(7, 4321), DATA[5 : 5 + 4321])
        wait_until(lambda: stream.outstanding == 0, 60, "the stream to have gone on")


@pytest.mark.parametrize("late", [0, 3, 7])
def test_fixed_and_late_numbers(host: engine.Engine, file: engine.BackingFile, late: int) -> None:
    """Late numbers in each kind of memory, and numbers that are fixed for the stream."""
    names: tuple[Any, ...] = ("buffer_offset", "file_offset", "size")
    before, after = (100, 200, 3000), (5000, 7000, 1234)
    kinds = itertools.cycle(["numpy", "ctypes", "cells"])
    for fixed in (0, 5):
        with (
            engine.Stream(host, fixed=[name for bit, name in enumerate(names) if fixed >> bit & 1]) as stream,
            engine.Buffer(host) as buffer,
            engine.Cells(host, 3) as cells,
        ):
            given: dict[str, Any] = dict(zip(names, before, strict=True))
            change: list[tuple[Any, int, int]] = []
            for bit, name in enumerate(names):
                if not late >> bit & 1:
                    continue
                match next(kinds):
                    case "numpy":
                        array = numpy.array([before[bit]], dtype=numpy.int64)
                        given[name] = array
                        change.append((array, 0, after[bit]))
                    case "ctypes":
                        number = ctypes.c_uint64(before[bit])
                        given[name] = number
                        change.append(((ctypes.c_uint64 * 1).from_address(ctypes.addressof(number)), 0, after[bit]))
                    case _:
                        cells[bit] = before[bit]
                        given[name] = cells.late(bit)
                        change.append((cells, bit, after[bit]))
            gate = Gate(stream)
            future = file.read_async(buffer, stream=stream, **given)
            for where, index, value in change:
                where[index] = value
            gate.open()
            start, offset, size = (
                after[bit] if late >> bit & 1 and not fixed >> bit & 1 else before[bit] for bit in range(3)
            )
            assert future.result(60) == size
            assert buffer.info.size == start + size
            assert_same(buffer.read_bytes(start, size), DATA[offset : offset + size])


def test_streams_by_handle_and_protocol_need_no_registration(host: engine.Engine, file: engine.BackingFile) -> None:
    class Foreign:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.handle

    with engine.Stream(host, device=1) as stream:
        assert isinstance(stream, engine.SupportsCudaStream)
        for named in (stream.handle, Foreign(stream.handle)):
            with engine.Buffer(host, 1) as buffer:
                gate = Gate(stream)
                future = file.read_async(buffer, 1000, stream=named)
                assert not future.done()
                gate.open()
                assert future.result(60) == 1000
        with engine.Stream(host, Foreign(stream.handle)) as other:
            assert (other.handle, other.device) == (stream.handle, 1)
        with engine.Buffer(host, 0) as buffer:
            with pytest.raises(
                engine.EngineError, match=r"the memory is on gpu 0 \(.*\), the stream on gpu 1"
            ) as raised:
                file.read_async(buffer, 1, stream=stream.handle)
            assert raised.value.errno == errno.EINVAL
            with pytest.raises(TypeError):
                file.read_async(buffer, 1, stream=object())  # type: ignore[arg-type]
    with engine.Buffer(host) as buffer, pytest.raises(engine.EngineError) as raised:
        file.read_async(buffer, 1, stream=12345678)
    assert raised.value.errno == errno.EINVAL


def test_failures_arrive_in_the_future_and_the_count(host: engine.Engine, file: engine.BackingFile) -> None:
    with engine.Stream(host, aligned=True) as stream, engine.Buffer(host) as buffer:
        with pytest.raises(engine.EngineError, match="not a multiple of 4096"):
            file.read_async(buffer, 100, stream=stream)
        size, count = ctypes.c_int64(4096), ctypes.c_int64(0)
        gate = Gate(stream)
        future = file.read_async(buffer, size, stream=stream, count=count)
        size.value = 8192
        gate.open()
        with pytest.raises(engine.TransferError, match="the size has grown from 4096 to 8192") as raised:
            future.result(60)
        assert raised.value.errno == errno.EINVAL
        assert count.value == -errno.EINVAL
        assert file.read_async(buffer, 0, stream=stream).result(60) == 0
        with pytest.raises(ValueError, match="64 bits"):
            file.read_async(buffer, numpy.zeros(2, dtype=numpy.int64), stream=stream)
        with pytest.raises(ValueError, match="size: -5 is negative"):
            file.read_async(buffer, -5, stream=stream)


@pytest.mark.parametrize(
    "number",
    [8.0, numpy.float64(8), numpy.array([8.0]), numpy.array([8], dtype=">i8"), ctypes.c_double(8), "8", [8]],
    ids=lambda number: type(number).__name__,
)
def test_only_whole_numbers_are_accepted(host: engine.Engine, file: engine.BackingFile, number: Any) -> None:
    with engine.Buffer(host) as buffer, engine.Stream(host) as stream:
        for name in ("size", "file_offset", "buffer_offset", "count"):
            with pytest.raises(TypeError, match=f"^{name}: "):
                file.read_async(buffer, stream=stream, **{name: number})
        assert stream.outstanding == 0
        assert buffer.info.size == 0


def test_too_many_operations_are_eagain(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    with engine.Engine("host", devices=1, memory_bytes=64 * MIB) as host:
        engine.configure_operations(host, operations=6, stream_depth=4, timeout=0.01)
        with pytest.raises(engine.EngineError) as raised:
            engine.configure_operations(host)
        assert raised.value.errno == errno.EBUSY
        file, buffer, stream = engine.BackingFile.open(host, path), engine.Buffer(host), engine.Stream(host)
        gate = Gate(stream)
        futures = [file.read_async(buffer, 100, stream=stream) for _ in range(4)]
        with pytest.raises(engine.EngineError, match="4 operations are outstanding on the stream") as raised:
            file.read_async(buffer, 100, stream=stream)
        assert raised.value.errno == errno.EAGAIN
        gate.open()
        assert [future.result(60) for future in futures] == [100] * 4
    with engine.Engine("host", devices=1, memory_bytes=64 * MIB) as host, pytest.raises(engine.EngineError) as raised:
        engine.configure_operations(host, operations=1 << 40)
    assert raised.value.errno == errno.EINVAL


def test_cancelling_and_closing_with_work_outstanding(host: engine.Engine, file: engine.BackingFile) -> None:
    stream, buffer = engine.Stream(host), engine.Buffer(host)
    gate = Gate(stream)
    count = ctypes.c_int64(7)
    cancelled = file.read_async(buffer, 100, stream=stream, count=count)
    kept = file.read_async(buffer, 200, stream=stream)
    assert cancelled.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        cancelled.result(60)
    assert count.value == -errno.ECANCELED
    # What goes away is kept by the operation that needs it.
    stream.close()
    buffer.close()
    file.close()
    with pytest.raises(engine.EngineError) as raised:
        stream.call(print)
    assert raised.value.errno == errno.EBADF
    gate.open()
    assert kept.result(60) == 200
    assert not kept.cancel()


async def test_futures_are_awaited_in_trio(host: engine.Engine, file: engine.BackingFile) -> None:
    with engine.Stream(host) as stream, engine.Buffer(host) as buffer:
        assert await file.read_async(buffer, 1000, stream=stream) == 1000
        ended = file.read_async(buffer, 10, stream=stream)
        ended.result(60)
        assert await ended == 10
        gate = Gate(stream)
        waiting = file.read_async(buffer, 1000, stream=stream)
        with trio.move_on_after(0.05) as scope:
            await waiting
        assert scope.cancelled_caught
        assert waiting.cancelled()
        gate.open()
        size = ctypes.c_int64(10)
        gate = Gate(stream)
        failing = file.read_async(buffer, size, stream=stream)
        size.value = 20
        gate.open()
        with pytest.raises(engine.TransferError):
            await failing


def test_futures_are_awaited_in_asyncio(host: engine.Engine, file: engine.BackingFile) -> None:
    async def work() -> list[int]:
        with engine.Stream(host) as stream, engine.Buffer(host) as buffer:

            async def one(number: int) -> int:
                return await file.read_async(buffer, number, stream=stream)

            return await asyncio.gather(*map(one, range(1, 50)))

    assert asyncio.run(work()) == list(range(1, 50))


def test_batches(host: engine.Engine, file: engine.BackingFile) -> None:
    with engine.Batch(host, 64) as batch:
        buffers = [engine.Buffer(host) for _ in range(50)]
        operations = [
            engine.Operation("load", file, buffer, 10 * KIB, number * 10 * KIB, cookie=("read", number))
            for number, buffer in enumerate(buffers)
        ]
        batch.submit(operations)
        with pytest.raises(engine.EngineError) as raised:
            batch.submit(operations)
        assert raised.value.errno == errno.EAGAIN
        found: list[engine.OperationResult] = []
        while len(found) < 50:
            some = batch.wait(3, most=7, timeout=PATIENCE)
            assert 1 <= len(some) <= 7
            found += some
        assert {result.cookie for result in found} == {("read", number) for number in range(50)}
        assert all(result.error is None and result.bytes == 10 * KIB for result in found)
        for number, buffer in enumerate(buffers):
            assert_same(buffer.read_bytes(0, 10 * KIB), DATA[number * 10 * KIB : (number + 1) * 10 * KIB])
            buffer.close()
        assert batch.wait(1, timeout=0) == []
        assert batch.under_way == 0


def test_a_batch_waits_for_as_many_as_asked(host: engine.Engine, file: engine.BackingFile) -> None:
    """It waits until that number of operations has ended."""
    with engine.Buffer(host) as buffer, engine.Stream(host) as stream, engine.Batch(host) as batch:
        gate = Gate(stream)
        free = [engine.Operation("load", file, buffer, 4096, cookie=number) for number in range(2)]
        held = [engine.Operation("load", file, buffer, 4096, cookie=number, stream=stream) for number in range(2, 5)]
        batch.submit(free + held)
        opener = threading.Timer(0.7, gate.open)
        opener.start()
        assert sorted(result.cookie for result in batch.wait(5, timeout=PATIENCE)) == list(range(5))  # type: ignore[type-var]
        opener.join()
        batch.submit(free)
        assert len(batch.wait(100, timeout=PATIENCE)) == 2  # there are no more
        batch.submit(free)
        assert [len(batch.wait(100, most=1)) for _ in range(3)] == [1, 1, 0]


def test_a_batch_is_submitted_whole_or_not_at_all(host: engine.Engine, file: engine.BackingFile) -> None:
    with engine.Buffer(host) as buffer, engine.Buffer(host, 1) as other, engine.Batch(host) as batch:
        with engine.Stream(host) as stream:
            good = engine.Operation("load", file, buffer, 100, stream=stream)
            bad = engine.Operation("load", file, other, 100, stream=stream)
            with pytest.raises(engine.EngineError) as raised:
                batch.submit([good, good, bad])
            assert raised.value.__notes__ == ["operation 2 of 3"]
            assert batch.under_way == 0
            # One that waits for its stream is over as soon as the batch is cancelled.
            gate = Gate(stream)
            batch.submit([good])
            assert batch.wait(1, timeout=0.01) == []
            batch.cancel()
            (result,) = batch.wait(timeout=PATIENCE)
            assert result.error is not None
            assert result.error.errno == errno.ECANCELED
            gate.open()
            batch.submit([])
            batch.submit([good])  # is cancelled by the end of the block


def test_exceptions_of_host_calls_go_to_the_hook(host: engine.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("sys.unraisablehook", lambda what: seen.append(str(what.exc_value)))
    with engine.Stream(host) as stream:
        stream.call(lambda: [][0])
        stream.synchronize()
    assert seen == ["list index out of range"]
