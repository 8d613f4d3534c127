"""Waiting for the engine: Ctrl-C comes through, tasks of trio and asyncio await."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from support.data import MIB, noise
from support.hanging import HangingMount
from support.processes import PATIENCE

from gpufs import engine


@pytest.fixture
def host() -> Iterator[engine.Engine]:
    with engine.Engine("host", devices=1, memory_bytes=64 * MIB) as opened:
        yield opened


@pytest.fixture
def file(host: engine.Engine, tmp_path: Path) -> Iterator[engine.BackingFile]:
    (tmp_path / "file").write_bytes(noise(MIB))
    with engine.BackingFile.open(host, tmp_path / "file") as opened:
        yield opened


WAITS = {
    "finish": "file.read(buffer)",
    "future": "file.read_async(buffer).result()",
    "batch": "b = engine.Batch(opened); b.submit([engine.Operation('load', file, buffer)]); b.wait()",
    "stream": "s = engine.Stream(opened); file.read_async(buffer, stream=s); s.synchronize()",
}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
@pytest.mark.parametrize("how", WAITS)
def test_interrupted_while_the_file_hangs(how: str) -> None:
    """The file never answers: only KeyboardInterrupt can end the wait."""
    script = (
        "import os, signal, sys, threading, time\nfrom gpufs import engine\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "opened = engine.Engine('host', devices=1, memory_bytes=64 << 20)\n"
        "file = engine.BackingFile.open(opened, sys.argv[1]); buffer = engine.Buffer(opened)\n"
        "timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))\n"
        f"try:\n    timer.start()\n    {WAITS[how]}\nexcept KeyboardInterrupt: print('interrupted', flush=True)\n"
    )
    with HangingMount(good=0) as hung:
        child = subprocess.Popen([sys.executable, "-c", script, hung.file], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "interrupted\n"
        hung.release()  # a process whose request the kernel waits for cannot end
        assert child.wait(PATIENCE) == 0
        child.stdout.close()


def test_transfers_are_awaited(host: engine.Engine, file: engine.BackingFile) -> None:
    async def both(buffer: engine.Buffer) -> tuple[int, int]:
        return await file.read_async(buffer), await file.read_async(buffer)

    with engine.Buffer(host) as buffer:
        assert asyncio.run(both(buffer)) == (MIB, MIB)
        assert trio.run(both, buffer) == (MIB, MIB)


def test_handles_are_not_copied(host: engine.Engine, file: engine.BackingFile) -> None:
    with engine.Buffer(host) as buffer, engine.Stream(host) as stream, engine.Batch(host) as batch:
        for thing in (host, file, buffer, stream, batch):
            for make in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=f"a {type(thing).__name__} cannot be copied or pickled"):
                    make(thing)
            assert "closed" not in repr(thing)
    assert repr(buffer) == "<gpufs.engine.Buffer (closed)>"


def test_cells_are_checked(host: engine.Engine) -> None:
    with engine.Cells(host, 3) as cells:
        cells[-1] = -5
        assert cells[2] == -5
        wrong: Any = 1.5
        for index, error in ((wrong, TypeError), (3, IndexError), (-4, IndexError)):
            with pytest.raises(error):
                cells[index]
        with pytest.raises(ValueError, match=r"^value: .* 64 bits"):
            cells[0] = 1 << 63
    for count in (-1, 1 << 63):
        with pytest.raises(ValueError, match=r"^count: "):
            engine.Cells(host, count)


def test_a_trace_ends_with_its_block() -> None:
    for _ in range(2):
        with engine.Trace() as trace, pytest.raises(TypeError, match="size"):
            trace.read("x")  # type: ignore[arg-type]
