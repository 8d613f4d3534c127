"""Programs that use the engine: errors that name the mistake, waits that Ctrl-C ends, objects and their lifetimes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import ctypes
import errno
import gc
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import trio
from support.data import MIB, noise
from support.hanging import HangingMount
from support.processes import PATIENCE, in_child, run

from gpufs import engine


@pytest.fixture
def file(host: engine.Engine, tmp_path: Path) -> Iterator[engine.BackingFile]:
    path = tmp_path / "file"
    path.write_bytes(noise(MIB))
    with engine.BackingFile.open(host, path, "r+") as opened:
        yield opened


def test_arrays_of_objects_are_refused(host: engine.Engine, file: engine.BackingFile) -> None:
    """Overwriting Python references with bytes of a file would crash the interpreter."""
    with engine.Buffer(host) as buffer:
        buffer.write(0, bytes(4096))
        objects: Any = numpy.zeros(4, dtype=object)
        for array in (
            objects,
            numpy.zeros(4, dtype=[("number", "i4"), ("thing", "O")]),
            memoryview(objects),
            (ctypes.py_object * 4)(),
        ):
            moves: tuple[Callable[[], object], ...] = (
                lambda array=array: file.read(array),  # type: ignore[misc]
                lambda array=array: file.write(array),  # type: ignore[misc]
                lambda array=array: buffer.read(0, array),  # type: ignore[misc]
                lambda array=array: buffer.write(0, array),  # type: ignore[misc]
            )
            for move in moves:
                with pytest.raises(TypeError, match="references"):
                    move()
        gc.collect()
        named = numpy.zeros(4, dtype=[("Owner", "i4"), ("O", "f8")])  # nothing but its fields' names
        assert file.read(named) == named.nbytes


@pytest.mark.parametrize("name", ["size", "file_offset", "buffer_offset", "client"])
@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        (-1, ValueError, "negative"),
        (1 << 64, ValueError, "64 bits"),
        (1.5, TypeError, "whole"),
        ("1", TypeError, "whole"),
    ],
)
def test_numbers_are_named(
    host: engine.Engine, file: engine.BackingFile, name: str, value: Any, error: type[Exception], said: str
) -> None:
    with engine.Buffer(host) as buffer:
        for move in (file.read, file.write, file.read_async):
            with pytest.raises(error, match=f"^{name}: .*{said}"):
                move(buffer, **{name: value})


@pytest.mark.parametrize("address", [0, -1, 1 << 64, 1.5, "x", None])
def test_late_numbers_without_an_address(host: engine.Engine, file: engine.BackingFile, address: Any) -> None:
    late = engine.Late(address)
    with engine.Buffer(host) as buffer:
        calls: list[Callable[[], object]] = [
            lambda: file.read_async(buffer, late),
            lambda: file.read_async(buffer, 8, late),
            lambda: file.read_async(buffer, 8, 0, late),
            lambda: file.read_async(buffer, 8, count=late),
        ]
        for call in calls:
            with pytest.raises((TypeError, ValueError), match=r"^address: "):
                call()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_a_failing_callback_does_not_stop_other_futures(
    host: engine.Engine, file: engine.BackingFile, kind: type[BaseException]
) -> None:
    def fail(_: object) -> None:
        raise kind("on purpose")

    with engine.Buffer(host) as buffer:
        first = file.read_async(buffer)
        first.add_done_callback(fail)
        assert first.result(60) == MIB
        for _ in range(3):
            assert file.read_async(buffer).result(60) == MIB


def test_a_buffer_closed_while_others_use_it(host: engine.Engine, file: engine.BackingFile) -> None:
    """Each call succeeds or fails because the buffer is closed."""
    for _ in range(5):
        buffer = engine.Buffer(host)
        failures: list[BaseException] = []

        def use(buffer: engine.Buffer = buffer, failures: list[BaseException] = failures) -> None:
            try:
                for _ in range(200):
                    buffer.write(0, b"x" * 4096)
                    file.read(buffer)
            except engine.EngineError as error:
                if "not open" not in str(error):
                    failures.append(error)
            except BaseException as error:  # noqa: BLE001 - told below
                failures.append(error)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        buffer.close()
        for thread in threads:
            thread.join()
        assert failures == []
    assert host.devices[0].memory().held_bytes == 0


EXITS = {
    "a future under way": "future = file.read_async(buffer)",
    "a callback that never ends": (
        "begun = threading.Event()\n"
        "file.read_async(buffer).add_done_callback(lambda _: (begun.set(), threading.Event().wait())); begun.wait()"
    ),
    "everything in a cycle": "box = [opened, file, buffer]; box.append(box); del opened, file, buffer, box",
    "a thread that reads": (
        "def work():\n"
        "    try:\n"
        "        while True: file.read(buffer)\n"
        "    except engine.EngineError as error: assert error.errno in (errno.ECANCELED, errno.EBADF), error\n"
        "threading.Thread(target=work, daemon=True).start()"
    ),
    "a forked child": (
        "future = file.read_async(buffer); child = os.fork()\n"
        "if child == 0: sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0; assert future.result(60) == 64 << 20"
    ),
    "a child that goes on using it": (
        "file.read_async(buffer).result(60); child = os.fork()\n"
        "if child == 0:\n"
        "    for call in (lambda: file.read(buffer), lambda: engine.Engine('host', memory_bytes=2 << 20)):\n"
        "        try: call()\n"
        "        except engine.EngineError as error: assert 'does not survive fork()' in str(error), error\n"
        "        else: os._exit(1)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0"
    ),
}


@pytest.mark.parametrize("how", EXITS)
def test_the_interpreter_ends_with(tmp_path: Path, how: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * MIB))
    script = (
        "import errno, os, sys, threading\nfrom gpufs import engine\n"
        "opened = engine.Engine('host', devices=1, memory_bytes=256 << 20)\n"
        "file = engine.BackingFile.open(opened, sys.argv[1]); buffer = engine.Buffer(opened)\n" + EXITS[how]
    )
    for _ in range(4 if how == "a thread that reads" else 1):  # the end of its last read is one of many moments
        done = run(sys.executable, "-X", "dev", "-c", script, path, check=False, timeout=PATIENCE)
        assert (done.returncode, done.stderr) == (0, "")


def test_descriptors_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(noise(MIB))

    def once() -> None:
        with (
            engine.Engine("host", devices=1, memory_bytes=64 * MIB) as opened,
            engine.BackingFile.open(opened, path) as file,
            engine.Buffer(opened) as buffer,
        ):
            assert file.read(buffer) == MIB
            futures = [file.read_async(buffer) for _ in range(8)]
            concurrent.futures.wait(futures, PATIENCE)

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        once()
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # those of the thread that waits for futures


@pytest.mark.parametrize("words", [("read",), ("load", "sometimes"), ("store",)], ids=str)
def test_an_operation_is_refused_where_it_is_made(
    host: engine.Engine, file: engine.BackingFile, words: tuple[str, ...]
) -> None:
    names = dict(zip(("direction", "fastpath"), words, strict=False))
    if words == ("store",):
        names["sync"] = "later"
    with engine.Buffer(host) as buffer, pytest.raises(ValueError, match=names[list(names)[-1]]):
        engine.Operation(file=file, memory=buffer, **names)  # type: ignore[arg-type]


def test_a_range_outside_of_the_memory_is_named(file: engine.BackingFile) -> None:
    array = numpy.zeros(4096, dtype=numpy.uint8)
    for size, offset, figures in ((4000, 97, ("97", "4097", "4096")), (None, 5000, ("5000", "4096"))):
        with pytest.raises(engine.EngineError) as refused:
            file.read(array, size, 0, offset)
        for figure in figures:
            assert figure in str(refused.value)


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


def test_devices(host: engine.Engine) -> None:
    (device,) = host.devices
    info, memory = device.info, device.memory()
    assert (info.index, info.total_bytes, info.granule, info.cpu_addressable) == (0, 512 * MIB, 2 * MIB, True)
    assert (memory.free_bytes, memory.held_bytes, memory.health) == (512 * MIB, 0, None)


def test_wrong_engine_options_are_refused() -> None:
    for driver, memory in (("host", 0), ("host", 1), ("abacus", 4 * MIB)):
        with pytest.raises(engine.EngineError) as failure:
            engine.Engine(driver, memory_bytes=memory)
        assert (failure.value.errno, failure.value.device_code) == (errno.EINVAL, 0)
        assert str(failure.value)


def test_errors_keep_both_codes() -> None:
    error = engine.EngineError(errno.EIO, "the device is lost", 719)
    assert isinstance(error, OSError)
    assert str(error) == "the device is lost (device code 719)"
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.errno, copy.strerror, copy.device_code) == (errno.EIO, "the device is lost", 719)


def test_nested_pools_return_to_the_outer_one() -> None:
    """Pools divide addresses, which need not be memory. The functions are those that torch calls."""
    file, name, _ = engine.TORCH_ALLOCATOR
    allocate = ctypes.PyDLL(file)[name]
    allocate.restype, allocate.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

    def allocated() -> int:
        """The pool from which this thread allocates; 0 for none."""
        return int(allocate(512, 0, None) or 0) >> 32

    outer, inner = engine.AddressPool(1 << 32, MIB), engine.AddressPool(2 << 32, MIB)
    assert allocated() == 0
    outer.enter()
    assert allocated() == 1
    inner.enter()
    outer.enter()
    assert allocated() == 1
    outer.leave()
    assert allocated() == 2
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        assert other.submit(allocated).result() == 0
    inner.leave()
    assert allocated() == 1
    outer.leave()
    assert allocated() == 0


def test_cells_of_a_closed_engine_cannot_be_used() -> None:
    opened = engine.Engine("host", devices=1, memory_bytes=64 * MIB)
    cells = engine.Cells(opened, 4)
    cells[0] = 5
    opened.close()
    uses: list[Callable[[], object]] = [lambda: cells[0], lambda: cells.__setitem__(1, 7), lambda: cells.late(2)]
    for use in uses:
        with pytest.raises(ValueError, match="closed"):
            use()


def test_a_forked_child_leaves_what_its_parent_has_opened(host: engine.Engine, file: engine.BackingFile) -> None:
    with engine.Buffer(host) as buffer, engine.Cells(host) as cells, engine.HostLock(host, bytearray(4096)) as lock:

        def leave() -> None:
            for opened in (lock, cells, buffer, file, host):
                with opened:
                    pass

        in_child(leave)
        buffer.write(0, b"still here")
        assert buffer.read_bytes(0, 10) == b"still here"
        cells[0] = 5
        assert lock.locked


def test_closed_objects_raise_ebadf(host: engine.Engine) -> None:
    buffer = engine.Buffer(host)
    buffer.close()
    buffer.close()
    assert buffer.closed
    with pytest.raises(engine.EngineError) as failure:
        buffer.write(0, b"x")
    assert failure.value.errno == errno.EBADF


def test_buffer_keeps_its_engine_alive() -> None:
    buffer = engine.Buffer(engine.Engine("host", memory_bytes=4 * MIB))
    gc.collect()
    assert buffer.write(0, b"x") == 1
    kept = weakref.ref(buffer.engine)
    del buffer
    gc.collect()
    assert kept() is None


def test_a_checkout_that_hides_the_installed_gpufs_is_named(tmp_path: Path) -> None:
    shutil.copytree(
        Path(__file__).parents[2] / "gpufs", tmp_path / "gpufs", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    # -S, so that only this path leads to other packages: the test environment finds its own gpufs first.
    program = f"import sys; sys.path.append({sysconfig.get_path('purelib')!r}); import gpufs.engine"
    done = subprocess.run([sys.executable, "-S", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError")
    assert str(tmp_path) in last
    assert "make build" in last
