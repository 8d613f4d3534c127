"""Loads of one hot file by gpufs and by other libraries, interleaved; and the limits of the host beside them.

    .venv/bin/python bench/gpu/loaders.py [--gib N] [--rounds N] [--file-in FOLDER] [--only NAME,...]

Each library runs in a process of its own that waits for its turn, so that all of them meet the same state of the
machine. The first load of a process is reported apart, as the median of several processes: that is what a command or a
server that starts sees. Libraries that are not installed are left out, with a message.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from libcuda import GIB, MIB, Cuda
from peaks import DevicePeaks, read_file

Load = Callable[[], object]

PINNED = "pinned copies"
PAGE_CACHE = "page cache read"
ENGINE = "gpufs.engine"
FRESH = "gpufs.engine (fresh buffer)"
KVIKIO = "KvikIO"
DISTRIBUTIONS = {KVIKIO: "kvikio-cu13"}  # where a package is called otherwise than its row


# ---- in the worker: what loads the file once, with imports and the GPU's context made before


def pinned(path: Path) -> Load:
    size = path.stat().st_size
    device = DevicePeaks(Cuda())
    address = device.allocate(size)
    return lambda: device.copy_in(address, size)


def page_cache(path: Path) -> Load:
    """The host alone: what threads can copy out of the page cache, without a GPU."""
    return lambda: read_file(path, min(16, os.cpu_count() or 1), False)


def engine(path: Path, fresh: bool, options: dict[str, int]) -> Load:
    from gpufs import engine as gpufs

    size = path.stat().st_size
    made = gpufs.Engine("cuda")
    if options:
        gpufs.io_configure(made, **options)
    kept = gpufs.Buffer(made)

    def load() -> None:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(gpufs.BackingFile.open(made, path))
            buffer = stack.enter_context(gpufs.Buffer(made)) if fresh else kept
            with gpufs.Transfer("load", file, buffer, size=size) as transfer:
                if transfer.finish() != size:
                    raise OSError("the load came out short")

    if not fresh:
        kept.resize(size)
        kept.allocate(0, size)
    return load


def kvikio(path: Path) -> Load:
    import cupy
    import kvikio.defaults

    kvikio.defaults.set({"num_threads": 16, "task_size": 4 * MIB})
    size = path.stat().st_size
    array = cupy.empty(size, dtype=cupy.uint8)

    def load() -> None:
        with kvikio.CuFile(str(path), "r") as file:
            if file.read(array) != size:
                raise OSError("a short read")

    return load


def instanttensor(path: Path) -> Load:
    import torch
    from instanttensor import safe_open

    torch.zeros(1, device="cuda")

    def load() -> None:
        with safe_open(str(path), framework="pt", device=0) as file:
            tensors = dict(file.tensors())
        torch.cuda.synchronize()
        del tensors

    return load


def fastsafetensors(path: Path) -> Load:
    import torch
    from fastsafetensors import fastsafe_open

    torch.zeros(1, device="cuda")

    def load() -> None:
        with fastsafe_open(str(path), device="cuda:0", nogds=True) as file:
            tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118  it has no __iter__
            torch.cuda.synchronize()
            del tensors

    return load


def safetensors(path: Path) -> Load:
    import torch
    from safetensors.torch import load_file

    torch.zeros(1, device="cuda")

    def load() -> None:
        tensors = load_file(str(path), device="cuda")
        torch.cuda.synchronize()
        del tensors

    return load


def loader(name: str, path: Path) -> Load:
    """The load of a row. Options of the engine may follow its name: "gpufs.engine workers=3"."""
    base, *words = name.split(" ") if "=" in name else [name]
    options = {key: int(value) for key, _, value in (word.partition("=") for word in words)}
    makers: dict[str, Callable[[Path], Load]] = {
        PINNED: pinned,
        PAGE_CACHE: page_cache,
        ENGINE: lambda path: engine(path, False, options),
        FRESH: lambda path: engine(path, True, {}),
        KVIKIO: kvikio,
        "InstantTensor": instanttensor,
        "fastsafetensors": fastsafetensors,
        "safetensors": safetensors,
    }
    return makers[base](path)


NAMES = (PINNED, PAGE_CACHE, ENGINE, FRESH, KVIKIO, "InstantTensor", "fastsafetensors", "safetensors")


def work(name: str, path: Path) -> None:
    """Loads once for each line of stdin, and says how many seconds it took."""
    try:
        load = loader(name, path)
    except ImportError as error:
        print(f"missing {error}", flush=True)
        return
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        load()
        print(time.perf_counter() - began, flush=True)


# ---- in the benchmark


class Worker:
    """A process that loads the file when asked."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        words = [sys.executable, __file__, "--worker", name, str(path)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.missing = ""
        # Libraries may print lines of their own before.
        for line in self._lines():
            if line == "ready":
                return
            if line.startswith("missing "):
                self.missing = line.removeprefix("missing ")
                break
        self.missing = self.missing or "it failed before the first load"

    def _lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield line.strip()

    def load(self) -> float:
        """Seconds that one load took."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        for line in self._lines():
            with contextlib.suppress(ValueError):
                return float(line)
        raise OSError(f"{self.name} ended with {self.process.wait()}")

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def measure(
    path: Path, names: list[str], rounds: int, firsts: int, skip: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each row's loads, interleaved, and of first loads in processes of their own.

    Parameters
    ----------
    path
        A safetensors file in the page cache or in tmpfs.
    rounds, firsts
        How many loads of each kind; the first load of a worker counts among the first ones.
    skip
        Called with a line for each row that is left out.
    """
    first: dict[str, list[float]] = {}
    later: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        workers = []
        for name in names:
            worker = Worker(name, path)
            stack.callback(worker.close)
            if worker.missing:
                skip(f"{name}: {worker.missing}")
                continue
            workers.append(worker)
        for number in range(rounds + 1):
            for worker in list(workers):
                try:
                    seconds = worker.load()
                except OSError as error:
                    skip(str(error))
                    workers.remove(worker)
                    continue
                (later if number else first).setdefault(worker.name, []).append(seconds)
    for _ in range(firsts - 1):
        for name in first:
            worker = Worker(name, path)
            try:
                if not worker.missing:
                    first[name].append(worker.load())
            except OSError as error:
                skip(f"{error}, in its first load")
            finally:
                worker.close()
    return first, later


def version(name: str) -> str:
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return ""


def table(size: int, first: dict[str, list[float]], later: dict[str, list[float]]) -> str:
    """GB/s of each row, the range of its rounds, and its ratios."""
    rates = {name: size / statistics.median(times) / 1e9 for name, times in later.items()}
    bus, ours = rates.get(PINNED), rates.get(ENGINE)
    lines = [f"{'':<38} {'GB/s':>6} {'slowest':>8} {'fastest':>8} {'first':>6}  {'/ pinned':>8}  {'engine / it':>11}"]
    for name, rate in rates.items():
        begin = size / statistics.median(first[name]) / 1e9
        ratios = f"{rate / bus:8.2f}" if bus else f"{'':8}"
        beaten = f"{ours / rate:11.2f}" if ours else ""
        label = f"{name} {version(name)}".strip()
        slow, fast = size / max(later[name]) / 1e9, size / min(later[name]) / 1e9
        lines.append(f"{label:<38} {rate:6.1f} {slow:8.1f} {fast:8.1f} {begin:6.1f}  {ratios}  {beaten}")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--worker"]:
        work(arguments[1], Path(arguments[2]))
        return
    from run import make_file

    parser = argparse.ArgumentParser(description="Hot loads by gpufs and other libraries, interleaved.")
    parser.add_argument("--gib", type=int, default=8, help="size of the file (8)")
    parser.add_argument("--rounds", type=int, default=9, help="loads of each kind (9)")
    parser.add_argument("--firsts", type=int, default=3, help="processes whose first load is timed (3)")
    parser.add_argument("--file-in", type=Path, default=Path("/dev/shm"), help="folder of the file (/dev/shm)")
    parser.add_argument("--only", default=",".join(NAMES), help="the rows, separated by commas")
    args = parser.parse_args(arguments)
    path = args.file_in / f"gpufs-bench-{os.getpid()}.safetensors"
    try:
        make_file(path, args.gib * GIB)
        read_file(path, 8, False)
        first, later = measure(
            path, args.only.split(","), args.rounds, args.firsts, lambda line: print(f"left out: {line}")
        )
        print(table(path.stat().st_size, first, later))
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
