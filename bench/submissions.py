"""Measures how many asynchronous reads a second threads can submit, and how many a second are over.

By the engine's C interface, one at a time in no order, one at a time on a stream of each thread's, and 64 at a time;
where KvikIO and a GPU are found also by that, from Python.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench import report

SOURCE = Path(__file__).with_name("submissions.cc")
ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "build" / "bench-submissions"
LIBRARY = ROOT / "build" / "cmake" / "native" / "libgpufs_core.a"
MODES = ("none", "stream", "batch")


def build_program() -> Path:
    """Compiles the program if it is older than its source or the engine."""
    newest = max(path.stat().st_mtime for path in (SOURCE, LIBRARY))
    if not PROGRAM.exists() or PROGRAM.stat().st_mtime < newest:
        words = ["g++", "-std=c++20", "-O2", "-Wall", "-Wextra", f"-I{ROOT / 'native/include'}", str(SOURCE)]
        subprocess.run([*words, str(LIBRARY), "-lpthread", "-ldl", "-o", str(PROGRAM)], check=True)
    return PROGRAM


def measure(program: Path, driver: str, file: Path, threads: int, operations: int, size: int, mode: str) -> list[float]:
    """Submissions a second, operations a second, and a submission's median and 99th percentile in microseconds."""
    words = [str(program), driver, str(file), str(threads), str(operations), str(size), mode]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
    submitted, over, median, high = map(float, done.stdout.split())
    count = threads * operations
    return [count / submitted, count / over, median, high]


def kvikio(file: Path, threads: int, operations: int, size: int) -> list[float]:
    """The same for KvikIO's futures, as far as it has something to compare; times are of single submissions."""
    import cupy
    import kvikio as library

    memory = cupy.empty(size * threads, dtype="u1")
    times: list[float] = []
    futures: list[Any] = []
    ready = threading.Barrier(threads + 1)

    def work(number: int, opened: Any) -> None:
        part = memory[number * size : (number + 1) * size]
        ready.wait()
        for _ in range(operations):
            start = time.perf_counter()
            futures.append(opened.pread(part, size, 0))
            times.append((time.perf_counter() - start) * 1e6)

    with library.CuFile(str(file), "r") as opened:
        workers = [threading.Thread(target=work, args=(number, opened)) for number in range(threads)]
        for worker in workers:
            worker.start()
        ready.wait()
        start = time.perf_counter()
        for worker in workers:
            worker.join()
        submitted = time.perf_counter() - start
        for future in futures:
            future.get()
        over = time.perf_counter() - start
    times.sort()
    count = threads * operations
    return [count / submitted, count / over, times[len(times) // 2], times[len(times) * 99 // 100]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.submissions", description=__doc__)
    parser.add_argument("--threads", type=lambda text: [int(x) for x in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--operations", type=int, default=6400, help="of each thread, default 6400")
    parser.add_argument("--bytes", type=int, default=4096, help="of each read, default 4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--driver", default="host")
    parser.add_argument("--json", type=Path, help="where the results go; default: bench/results/")
    chosen = parser.parse_args()
    program = build_program()
    machine = report.machine()
    systems = list(MODES)
    if chosen.driver == "cuda" and importlib.util.find_spec("kvikio") and importlib.util.find_spec("cupy"):
        systems.append("kvikio")
    found: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
    with tempfile.NamedTemporaryFile(prefix="gpufs-bench-", dir="/dev/shm") as file:
        file.write(bytes(chosen.bytes))
        file.flush()
        path = Path(file.name)
        for _ in range(chosen.rounds):
            for threads in chosen.threads:
                for system in systems:
                    if system == "kvikio":
                        result = kvikio(path, threads, chosen.operations, chosen.bytes)
                    else:
                        result = measure(program, chosen.driver, path, threads, chosen.operations, chosen.bytes, system)
                    found[system, threads].append(result)
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"{'':>8} {'threads':>8} {'submitted/s':>12} {'over/s':>12} {'median us':>10} {'99 % us':>10}")
    results = []
    for (system, threads), rounds in found.items():
        rates = [report.median(column) for column in zip(*rounds, strict=True)]
        print(f"{system:>8} {threads:>8} {rates[0]:>12,.0f} {rates[1]:>12,.0f} {rates[2]:>10.2f} {rates[3]:>10.2f}")
        names = ("submissions_per_second", "operations_per_second", "median_us", "high_us")
        columns = dict(zip(names, zip(*rounds, strict=True), strict=True))
        results.append({"system": system, "threads": threads, **columns})
    options = {name: getattr(chosen, name) for name in ("driver", "operations", "bytes", "rounds")}
    document = {"machine": machine, "options": options, "results": results}
    print(f"written to {report.write_json(document, chosen.json, 'submissions')}")


if __name__ == "__main__":
    main()
