"""Files and device memory from a program: reading, writing, futures, arrays."""

from __future__ import annotations

import concurrent.futures
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from support.data import KIB, MIB, assert_same, noise
from support.mounting import GpufsMount
from support.processes import PATIENCE, wait_until

from gpufs import engine, statistics


def counted(opened: engine.Engine) -> dict[str, Any]:
    return statistics.parse(opened.statistics_read())


@pytest.fixture
def opened(driver: str) -> Iterator[engine.Engine]:
    """An engine of the driver under test."""
    with engine.Engine(driver, devices=1, memory_bytes=512 * MIB) as made:
        yield made


@pytest.mark.driver
def test_read_and_write_move_what_is_asked_for(opened: engine.Engine, tmp_path: Path) -> None:
    data = noise(9 * MIB + 77)
    path = tmp_path / "file"
    path.write_bytes(data)
    with engine.Buffer(opened) as buffer, engine.BackingFile.open(opened, path) as file:
        assert file.read(buffer) == len(data)
        assert buffer.info.size == len(data)
        assert_same(buffer.read_bytes(0, len(data)), data)
        assert file.read(buffer, 1000, file_offset=5, buffer_offset=3) == 1000
        assert_same(buffer.read_bytes(3, 1000), data[5:1005])
        assert file.read(buffer, 100, file_offset=len(data) - 30) == 30
        assert file.read(buffer, 100, file_offset=len(data)) == 0
        assert file.read(buffer, 0) == 0
        assert file.read(buffer, file_offset=0) == len(data)

        copy = tmp_path / "copy"
        with engine.BackingFile.open(opened, copy, "w") as target:
            assert target.write(buffer, sync="full") == len(data)
            assert_same(copy.read_bytes(), data)
            assert target.write(buffer, 10, file_offset=len(data) + 90, buffer_offset=20) == 10
        assert_same(copy.read_bytes(), data + bytes(90) + data[20:30])


@pytest.mark.driver
def test_wrong_modes(opened: engine.Engine, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    with engine.Buffer(opened) as buffer:
        buffer.write(0, b"y" * 100)
        with engine.BackingFile.open(opened, path) as file, pytest.raises(engine.EngineError) as refused:
            file.write(buffer)
        assert refused.value.errno == errno.EBADF
        fd = os.open(path, os.O_RDWR | os.O_APPEND)
        with engine.BackingFile(opened, fd) as file:
            os.close(fd)
            with pytest.raises(engine.EngineError) as refused:
                file.write(buffer)
        assert refused.value.errno == errno.EBADF
    with pytest.raises(FileNotFoundError):
        engine.BackingFile.open(opened, tmp_path / "missing")
    with pytest.raises(engine.EngineError) as refused:
        engine.BackingFile.open(opened, tmp_path)
    assert refused.value.errno == errno.EISDIR


def wait_for_the_futures_thread() -> None:
    """Waits for the end of the thread and its descriptors, also of an earlier test's."""
    wait_until(
        lambda: not any(thread.name == "gpufs-futures" for thread in threading.enumerate()), 30, "the thread to end"
    )


@pytest.mark.driver
def test_futures(opened: engine.Engine, tmp_path: Path) -> None:
    data = noise(8 * MIB)
    path = tmp_path / "file"
    path.write_bytes(data)
    with engine.Buffer(opened) as buffer, engine.BackingFile.open(opened, path) as file:
        file.read_async(buffer, MIB).result(60)  # opens the engine's queue of operations, which stays
    wait_for_the_futures_thread()
    before = len(os.listdir("/proc/self/fd"))
    with engine.Buffer(opened) as buffer, engine.BackingFile.open(opened, path) as file:
        parts = [file.read_async(buffer, MIB, at, at) for at in range(0, len(data), MIB)]
        assert [part.result(60) for part in parts] == [MIB] * 8
        assert_same(buffer.read_bytes(0, len(data)), data)
        assert not parts[0].cancel()
        assert parts[0].exception() is None
        with engine.BackingFile.open(opened, tmp_path / "copy", "w") as target:
            done, pending = concurrent.futures.wait([target.write_async(buffer)], PATIENCE)
            assert not pending
            assert [future.result() for future in done] == [len(data)]
        failing = file.read_async(buffer, 100, 1, fastpath="require")
        with pytest.raises(engine.TransferError):
            failing.result(60)
    wait_for_the_futures_thread()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.driver
def test_cancelled_future(opened: engine.Engine, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "wb") as sparse:
        sparse.truncate(256 * MIB)
    with engine.Buffer(opened) as buffer, engine.BackingFile.open(opened, path) as file:
        for _ in range(100):  # one may be over before a busy machine comes to cancel it
            buffer.resize(0)
            future = file.read_async(buffer, fastpath="off", share=1)
            future.cancel()
            concurrent.futures.wait([future], PATIENCE)
            if future.cancelled():
                break
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(60)
        assert buffer.info.size < 256 * MIB


def test_interrupt_cancels_a_read(host: engine.Engine, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "wb") as sparse:
        sparse.truncate(8 << 40)
    array = numpy.empty(400 * MIB, dtype=numpy.uint8)
    with engine.BackingFile.open(host, path) as file:

        def repeat() -> None:
            timer.start()
            while True:  # until it is interrupted: one reading alone might be over before
                file.read(array, share=1, fastpath="off")

        timer = threading.Timer(0.5, signal.raise_signal, (signal.SIGINT,))
        with pytest.raises(KeyboardInterrupt):
            repeat()
        timer.join()
    wait_until(lambda: counted(host)["gauges"]["transfers_active"] == 0, 10, "the end of what was interrupted")


@pytest.mark.driver
def test_own_mount_is_refused(opened: engine.Engine, mount: Callable[..., GpufsMount]) -> None:
    with mount() as session:
        path = session.device / "file"
        path.write_bytes(b"x")
        for flags in (os.O_RDONLY, os.O_RDWR):
            fd = os.open(path, flags)
            try:
                with pytest.raises(engine.EngineError) as refused:
                    engine.BackingFile(opened, fd)
                assert refused.value.errno == errno.EDEADLK
            finally:
                os.close(fd)


@pytest.mark.driver
def test_options_are_set_once(opened: engine.Engine, tmp_path: Path) -> None:
    with pytest.raises(engine.EngineError, match="chunk_bytes"):
        engine.io_configure(opened, chunk_bytes=3)
    engine.io_configure(opened, chunk_bytes=64 * KIB, workers=2, pinned_bytes=MIB, fastpath="off")
    with pytest.raises(engine.EngineError) as late:
        engine.io_configure(opened)
    assert late.value.errno == errno.EBUSY
    path = tmp_path / "file"
    path.write_bytes(noise(MIB))
    with engine.Buffer(opened) as buffer, engine.BackingFile.open(opened, path) as file:
        assert file.read(buffer) == MIB
    found = counted(opened)
    assert found["devices"][0]["backends"]["fallback"]["in"]["operations"] == 16
    assert found["gauges"]["bounce_capacity_bytes"] == MIB
    if opened.driver == "host":
        assert found["gauges"]["bounce_pinned_bytes"] == 0  # it needs no slots
