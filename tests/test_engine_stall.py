"""A stalled device: copies of the program's own, behind blocked streams, hold all queues for copies."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support import fake_gpu
from support.mounting import REPOSITORY
from support.processes import PATIENCE

# Streams that a gate holds, each with a copy behind it: of the program's own (`behind` is None) or of an operation that
# `behind(number)` queues before.
_BEGIN = """
import ctypes, gc, os, sys, time, weakref
from gpufs import engine

QUEUES, COPY, SIZE = 4, 1 << 20, 3 << 20
cuda = ctypes.CDLL("libcuda.so.1")

def call(name, *arguments):
    assert getattr(cuda, name)(*arguments) == 0, name

def soon(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.01)

gpu = engine.Engine("cuda")
engine.io_configure(gpu, workers=QUEUES)
gate = engine.Cells(gpu, 1)
counts = engine.Cells(gpu, QUEUES)
context = ctypes.c_void_p()
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
streams = [ctypes.c_void_p() for _ in range(QUEUES)]
for stream in streams:
    call("cuStreamCreate", ctypes.byref(stream), 1)
host = ctypes.create_string_buffer(QUEUES * COPY)
device = ctypes.c_uint64()
call("cuMemAlloc_v2", ctypes.byref(device), ctypes.c_size_t(QUEUES * COPY))
own = engine.Stream(gpu)
path = os.path.join(sys.argv[1], "data")
with open(path, "wb") as made:
    made.write(os.urandom(SIZE))
file = engine.BackingFile.open(gpu, path)

def hold(behind=None):
    for number, stream in enumerate(streams):
        call("cuStreamWaitValue32_v2", stream, ctypes.c_uint64(gate.device_address), ctypes.c_uint32(1), 0)
        if behind is not None:
            behind(number)
        call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(device.value + number * COPY), host, ctypes.c_size_t(COPY), stream)
"""


def over_fake(folder: Path, program: str) -> None:
    """Runs a program, after the lines above, in a process whose GPU library is the fake one."""
    outcome = subprocess.run(
        [sys.executable, "-c", _BEGIN + textwrap.dedent(program), str(folder)],
        env={**os.environ, **fake_gpu.environment(folder), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_closing_times_out_and_keeps_the_memory(tmp_path: Path) -> None:
    over_fake(
        tmp_path,
        """
        hold()
        buffer = engine.Buffer(gpu)
        future = file.read_async(buffer, stream=own)
        batch = engine.Batch(gpu)
        other = engine.Buffer(gpu)
        batch.submit([engine.Operation("load", file, other, SIZE)])
        spare = engine.Cells(gpu, 1)
        known = weakref.ref(other)
        soon(lambda: gpu.io_statistics()["bounce_pool"]["used_bytes"])
        time.sleep(0.3)  # until what was read is queued for the device

        assert future.cancel() and not future.done()
        spare.close()
        try:
            with batch:
                raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            assert "1 cancelled operations have not ended in time" in error.__notes__[0], error.__notes__
        assert batch.closed
        del batch, other
        gc.collect()
        assert known() is not None, "the memory of an operation under way was freed"
        gate[0] = 1
        soon(lambda: known() is None)
        soon(future.done)
        gpu.close()
        """,
    )


@pytest.mark.slow  # it waits half a minute
def test_a_process_ends_while_a_device_is_stalled(tmp_path: Path) -> None:
    over_fake(
        tmp_path,
        """
        hold()
        batch = engine.Batch(gpu)
        batch.submit([engine.Operation("load", file, engine.Buffer(gpu), SIZE, stream=own)])
        transfer = engine.Transfer("load", file, engine.Buffer(gpu))
        time.sleep(0.5)
        """,
    )
