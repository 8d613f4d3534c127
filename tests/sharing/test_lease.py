"""Leases and mappings: programs that use one piece of device memory in place."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from support.data import MIB, assert_same, noise
from support.processes import errno_of

from gpufs import engine

pytestmark = pytest.mark.driver


@pytest.fixture
def opened(driver: str) -> Iterator[engine.Engine]:
    with engine.Engine(driver, devices=1, memory_bytes=512 * MIB, hip_memory="virtual") as made:
        yield made


@pytest.fixture
def buffer(opened: engine.Engine) -> Iterator[engine.Buffer]:
    with engine.Buffer(opened) as made:
        yield made


def free_bytes(opened: engine.Engine) -> int:
    return opened.devices[0].memory().free_bytes


def test_a_sparse_file_is_loaded_over_leased_memory(
    opened: engine.Engine, buffer: engine.Buffer, tmp_path: Path
) -> None:
    """Holes, which a load would punch otherwise, become zeros."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(noise(2 * MIB))
        file.seek(12 * MIB)
        file.write(b"end")
    buffer.write(0, noise(12 * MIB + 3))
    with engine.BackingFile.open(opened, path) as backing, engine.Lease(buffer):
        assert backing.read(buffer, sparse=True) == 12 * MIB + 3
        assert_same(buffer.read_bytes(0, 13 * MIB), path.read_bytes())


def test_many_leases_leak_no_descriptors_and_no_memory(opened: engine.Engine, buffer: engine.Buffer) -> None:
    pci = opened.devices[0].info.pci_address

    def cycle(number: int) -> None:
        # Files come and go, small ones in slabs too.
        with engine.Buffer(opened) as short:
            short.write(0, noise(100 + number % 3 * 5 * MIB))
            for found in (buffer, short):
                with engine.Lease(found, writable=True) as lease:
                    mapping = engine.Mapping(opened.driver, pci, writable=True, reserve=32 * MIB)
                    mapping.add(lease.pieces())
                    mapping.close()

    buffer.write(0, noise(9 * MIB))
    for number in range(5):
        cycle(number)
    gc.collect()
    descriptors, free = len(os.listdir("/proc/self/fd")), free_bytes(opened)
    with open("/proc/self/maps") as maps:
        mappings = len(maps.readlines())
    for number in range(30):
        cycle(number)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert free_bytes(opened) == free
    with open("/proc/self/maps") as maps:
        assert len(maps.readlines()) < mappings + 50


def test_pieces_that_are_refused(opened: engine.Engine, buffer: engine.Buffer, driver: str) -> None:
    pci = opened.devices[0].info.pci_address
    buffer.write(0, noise(4 * MIB))
    descriptors = len(os.listdir("/proc/self/fd"))
    with engine.Lease(buffer, writable=True) as lease, engine.Lease(buffer, writable=True) as other:
        with engine.Mapping(driver, pci, writable=True, reserve=64 * MIB) as mapping:
            for offset, size in ((2 * MIB, 2 * MIB), (0, 0), (0, 1 << 50), (1 << 63, 1 << 63)):
                piece = lease.pieces()[0]
                with pytest.raises(engine.EngineError):
                    mapping.add([engine.SharedPiece(offset, size, piece.fd)])
            for fd in (-1, 1 << 20):
                with pytest.raises(engine.EngineError):
                    mapping.add([engine.SharedPiece(0, 2 * MIB, fd)])
            with pytest.raises(engine.EngineError):
                mapping.add([engine.SharedPiece(0, 2 * MIB, os.open("/dev/null", os.O_RDWR))])
            assert mapping.bytes == 0
            mapping.add(lease.pieces())
            assert mapping.bytes == 4 * MIB
        with pytest.raises(engine.EngineError):
            mapping.add(other.pieces())
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 3  # the lease's own, where the driver keeps some
    with pytest.raises(engine.EngineError):
        lease.pieces()
    assert errno_of(lambda: engine.Mapping("none", pci, writable=True, reserve=1)) == errno.EINVAL
    assert errno_of(lambda: engine.Mapping(driver, pci, writable=True, reserve=0)) == errno.EINVAL
    if driver != "host":
        assert errno_of(lambda: engine.Mapping(driver, "0000:ee:1f.0", writable=True, reserve=1)) == errno.ENODEV


def test_plain_memory_is_shared_within_the_process_alone(driver: str) -> None:
    """HIP's plain memory has no descriptors: the error names the knob, and arrays of this process work."""
    with (
        engine.Engine(driver, devices=1, memory_bytes=64 * MIB, hip_memory="plain") as opened,
        engine.Buffer(opened) as buffer,
    ):
        buffer.write(0, noise(MIB))
        if driver == "hip":
            with pytest.raises(engine.EngineError, match="hip_memory") as failed:
                engine.Lease(buffer)
            assert failed.value.errno == errno.EOPNOTSUPP
        else:
            engine.Lease(buffer).close()
        buffer.write(MIB, noise(8 * MIB))
        capsule = buffer.__dlpack__()
        assert errno_of(buffer.resize, 1) == errno.EBUSY
        del capsule
        buffer.resize(1)


def test_closing_the_engine_closes_its_leases(driver: str) -> None:
    opened = engine.Engine(driver, devices=1, memory_bytes=64 * MIB, hip_memory="virtual")
    buffer = engine.Buffer(opened)
    buffer.write(0, b"x")
    lease = engine.Lease(buffer)
    opened.close()
    assert errno_of(lease.refresh) == errno.EBADF


def test_buffers_copy_from_each_other(opened: engine.Engine, buffer: engine.Buffer) -> None:
    content = noise(5 * MIB)
    buffer.write(3 * MIB, content)
    with engine.Buffer(opened) as copy:
        assert copy.copy_from(buffer) == 8 * MIB
        assert_same(copy.read_bytes(0, 9 * MIB), bytes(3 * MIB) + content)
        assert copy.copy_from(buffer, 4 * MIB, 1, 100) == 100
        assert copy.read_bytes(1, 100) == content[MIB : MIB + 100]
        assert copy.copy_from(buffer, 8 * MIB) == 0


def test_a_buffer_as_an_array(opened: engine.Engine, buffer: engine.Buffer, driver: str) -> None:
    content = noise(3 * MIB)
    buffer.write(0, content)
    assert len(buffer) == len(content)
    assert str(len(content)) in repr(buffer)
    assert buffer.__dlpack_device__() == ({"host": 1, "cuda": 2, "hip": 10}[driver], 0)
    if driver != "host":
        with pytest.raises(TypeError, match="GPU"):
            numpy.asarray(buffer)
        interface = buffer.__cuda_array_interface__
        assert (interface["shape"], interface["typestr"], interface["version"]) == ((len(content),), "|u1", 3)
        assert errno_of(buffer.resize, 0) == errno.EBUSY
        assert buffer.__cuda_array_interface__ == interface
        return
    assert not hasattr(buffer, "__cuda_array_interface__")
    array = numpy.asarray(buffer)
    assert array.dtype == numpy.uint8
    assert_same(array.tobytes(), content)
    array[5:9] = 7
    assert buffer.read_bytes(5, 4) == b"\7\7\7\7"
    buffer.write(0, b"seen")
    assert bytes(array[:4]) == b"seen"
    assert numpy.array(buffer, dtype=numpy.float32, copy=True)[0] == ord("s")
    # The array keeps the memory, whatever becomes of the buffer.
    assert errno_of(buffer.resize, 1) == errno.EBUSY
    buffer.write(300 * MIB, b"the buffer moves")
    buffer.close()
    opened.close()
    assert bytes(array[:4]) == b"seen"


def test_requests_of_consumers(opened: engine.Engine, buffer: engine.Buffer, driver: str) -> None:
    buffer.write(0, b"x")
    kind, device = buffer.__dlpack_device__()
    buffer.__dlpack__(stream=None, dl_device=(kind, device), copy=False)
    with pytest.raises(BufferError):
        buffer.__dlpack__(dl_device=(kind, device + 1))
    with pytest.raises(BufferError):
        buffer.__dlpack__(copy=True)
    with pytest.raises(TypeError):
        buffer.__dlpack__(stream="1")  # type: ignore[arg-type]
    good, bad = {"host": ((), (0, 1, -1)), "cuda": ((-1, 1, 2), (0, -2)), "hip": ((-1, 0), (1, 2, -2))}[driver]
    for stream in good:
        buffer.__dlpack__(stream=stream)
    for stream in bad:
        with pytest.raises(ValueError, match="stream"):
            buffer.__dlpack__(stream=stream)
    buffer.resize(0)
    assert buffer.__dlpack__() is not None
