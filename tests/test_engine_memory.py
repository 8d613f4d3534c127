"""Operations for which each allocation of the engine fails in turn end well or with ENOMEM, and so does closing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from support.failing_memory import FailingMemory
from support.processes import run

SCRIPT = """
import errno, faulthandler, os, sys, time
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from support.failing_memory import FailingMemory
from gpufs import engine

SIZE = 1 << 20
content = Path(sys.argv[1]).read_bytes()
memory = FailingMemory(Path(sys.argv[2]), create=False)
failures = 0
with engine.Engine("host", devices=1, memory_bytes=64 << 20) as gpu:
    file, buffer = engine.BackingFile.open(gpu, sys.argv[1]), engine.Buffer(gpu)
    with file, buffer, engine.Stream(gpu) as stream, engine.Batch(gpu) as batch:
        operation = engine.Operation("load", file, buffer, SIZE, stream=stream)
        batch.submit([operation])  # with which threads and pools are there
        batch.wait()
        skip = 0
        while True:
            faulthandler.dump_traceback_later(120, exit=True)
            results = []
            with memory.failing(skip, 1):
                try:
                    batch.submit([operation])
                    submitted = True
                except (engine.EngineError, MemoryError) as failure:
                    assert isinstance(failure, MemoryError) or failure.errno == errno.ENOMEM, failure
                    submitted = False
                while submitted and not results:
                    try:
                        results = batch.wait(timeout=1)
                    except engine.EngineError as failure:
                        assert failure.errno == errno.ENOMEM, failure
            for result in results:
                if result.error is None:
                    read = bytearray(SIZE)
                    assert buffer.read(0, read) == SIZE and read == content
                else:
                    failures += 1
                    assert result.error.errno == errno.ENOMEM, result.error
            failures += not submitted
            assert batch.under_way == 0
            while stream.outstanding:
                time.sleep(0.001)
            if memory.seen <= skip:
                break
            skip += 1
assert failures > 10, failures
"""


def test_each_allocation_of_an_operation_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(1 << 20))
    memory = FailingMemory(tmp_path / "order")
    words = (tmp_path / "file", tmp_path / "order", Path(__file__).parent)
    run(sys.executable, "-c", SCRIPT, *words, env={**os.environ, **memory.environment})
