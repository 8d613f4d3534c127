"""Measures a gpufs mount against tmpfs and against a plain pyfuse3 file system: reads and writes, mappings, files that
are opened, made and removed, and loads of tensors.

Every case is measured in several rounds; in each round the systems take turns, so that what else the machine does
hits them alike. The table shows medians.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from bench import plot, report, systems

MIB = 1 << 20
CLIENT_SOURCE = Path(__file__).with_name("client.c")
LOADER = (sys.executable, str(Path(__file__).with_name("loads.py")))
CLIENT = Path(__file__).parents[1] / "build" / "bench-client"
STREAMED = ("read", "rewrite", "fresh")  # for each size of a block and number of streams
METADATA = ("open", "create", "unlink")
LOADS = ("numpy.memmap", "safetensors", "torch.load")
OPERATIONS = (*STREAMED, "map", *METADATA, *LOADS)
# The peer allocates a whole file when it is made, and files without a cache have no shared mappings there.
NOT_FOR_THE_PEER = {"map", "create", "unlink", *LOADS}


def build_client() -> Path:
    """Compiles the client if it is older than its source."""
    if not CLIENT.exists() or CLIENT.stat().st_mtime < CLIENT_SOURCE.stat().st_mtime:
        CLIENT.parent.mkdir(exist_ok=True)
        subprocess.run(["cc", "-O3", "-Wall", "-Wextra", "-o", str(CLIENT), str(CLIENT_SOURCE)], check=True)
    return CLIENT


@dataclass
class Sample:
    """One measurement: bytes a second of all streams together, and the seconds of a call (0 where unknown)."""

    rate: float
    median: float = 0.0
    percentile99: float = 0.0


def measure(client: Path, operation: str, block: int, size: int, seconds: float, files: list[Path]) -> Sample:
    """Runs the client with one process for each file."""
    mode = "write" if operation == "rewrite" else operation
    words = [str(client), mode, str(block), str(size), str(seconds), *map(str, files)]
    lines = [line.split() for line in output(words, seconds).splitlines()]
    rate = sum(int(line[0]) / float(line[1]) for line in lines)
    return Sample(rate, report.median([float(line[3]) for line in lines]), max(float(line[4]) for line in lines))


def measure_load(kind: str, directory: Path, seconds: float, driver: str) -> Sample:
    """Runs bench/loads.py; tensors go to the GPU if the mount shows one."""
    device = "cpu" if driver == "host" else "cuda"
    moved, taken = output([*LOADER, kind, str(directory), str(seconds), device], seconds).split()
    return Sample(int(moved) / float(taken))


def output(words: list[str], seconds: float) -> str:
    """Returns what a program prints."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=seconds * 10 + 300)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
    return done.stdout


def trace_cost(client: Path, system: systems.System, size: int, seconds: float, rounds: int) -> dict[str, list[float]]:
    """Seconds of a 4 KiB read of one file by one stream, with and without a recording, interleaved.

    A recording begins and ends for each measurement, so that whatever else changes with time hits both alike.
    """
    files = system.files(1, size)
    found: dict[str, list[float]] = {"off": [], "on": []}
    for round_ in range(rounds):
        for state in ("off", "on") if round_ % 2 == 0 else ("on", "off"):
            with systems.recording(system) if state == "on" else contextlib.nullcontext():
                found[state].append(4096 / measure(client, "read", 4096, size, seconds, files).rate)
    return found


def numbers(text: str) -> list[int]:
    units = {"K": 1 << 10, "M": 1 << 20}
    return [int(x[:-1]) * units[x[-1].upper()] if x[-1].upper() in units else int(x) for x in text.split(",")]


def words(text: str) -> list[str]:
    return text.split(",")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a first impression in less than a minute")
    parser.add_argument("--systems", type=words, default=["gpufs", "tmpfs", "pyfuse3"], help="default: all three")
    parser.add_argument("--operations", type=words, default=list(OPERATIONS), help=f"default: {','.join(OPERATIONS)}")
    parser.add_argument("--blocks", type=numbers, help="default 4K,128K,1M,16M")
    parser.add_argument("--streams", type=numbers, help="files at once; default 1,4, with more than 4 CPUs 1,2,4,8,16")
    parser.add_argument("--file-bytes", type=numbers, default=[128 * MIB], help="size of each file, default 128M")
    parser.add_argument("--rounds", type=int, help="default 5")
    parser.add_argument("--seconds", type=float, help="of each measurement, default 0.4")
    parser.add_argument(
        "--trace-rounds", type=int, help="reads of 4K with and without a recording, default 15; 0: none"
    )
    parser.add_argument("--driver", default="host", help="of the gpufs mount")
    parser.add_argument("--load-bytes", type=numbers, default=[256 * MIB], help="tensors to load, default 256M")
    parser.add_argument("--plot", type=Path, help="where the picture goes; default: beside the JSON")
    parser.add_argument("--json", type=Path, help="where the results go; default: bench/results/")
    chosen = parser.parse_args()
    chosen.blocks = chosen.blocks or ([4096, MIB] if chosen.quick else [4096, 128 << 10, MIB, 16 * MIB])
    chosen.streams = chosen.streams or ([1, 4] if (os.cpu_count() or 1) <= 4 else [1, 2, 4, 8, 16])
    chosen.rounds = chosen.rounds or (3 if chosen.quick else 5)
    chosen.seconds = chosen.seconds or (0.2 if chosen.quick else 0.4)
    if chosen.trace_rounds is None:
        chosen.trace_rounds = 5 if chosen.quick else 15
    unknown = set(chosen.systems) - {"gpufs", "tmpfs", "pyfuse3"} | set(chosen.operations) - set(OPERATIONS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    return chosen


def main() -> None:
    chosen = arguments()
    client = build_client()
    size, most = chosen.file_bytes[0], max(chosen.streams)
    cases = [(o, b, s) for o in STREAMED if o in chosen.operations for b in chosen.blocks for s in chosen.streams]
    cases += [("map", size, 1)] if "map" in chosen.operations else []
    cases += [(operation, 4096, 1) for operation in METADATA if operation in chosen.operations]
    loads = [kind for kind in LOADS if kind in chosen.operations]
    if loads and not all(importlib.util.find_spec(name) for name in ("torch", "safetensors")):
        print("bench: torch and safetensors are not installed: loads of tensors are left out", file=sys.stderr)
        loads = []
    if "pyfuse3" in chosen.systems and not importlib.util.find_spec("pyfuse3"):
        print("bench: pyfuse3 is not installed: it is left out (scripts/setup bench installs it)", file=sys.stderr)
        chosen.systems.remove("pyfuse3")
    load_bytes = chosen.load_bytes[0]
    cases += [(kind, load_bytes, 1) for kind in loads]
    memory = size * most + 64 * MIB + (2 * load_bytes + 64 * MIB if loads else 0)
    machine = report.machine()
    samples: dict[tuple[str, str, int, int], list[Sample]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        ready = []
        if "gpufs" in chosen.systems:
            ready.append(stack.enter_context(systems.gpufs("gpufs", memory, driver=chosen.driver)))
        if "tmpfs" in chosen.systems:
            ready.append(stack.enter_context(systems.tmpfs()))
        if "pyfuse3" in chosen.systems:
            ready.append(stack.enter_context(systems.peer(size)))
        for system in ready:
            if loads and system.name != "pyfuse3":
                output([*LOADER, "make", str(system.directory), str(load_bytes)], 0)
        for round_ in range(chosen.rounds):
            # The order of creation decides which pages a file gets, and so its speed for as long as it exists (by a
            # fifth in a virtual machine). So each round creates the files again, in another order.
            for system in ready:
                system.remove_files()
            turn = round_ % len(ready)
            ready_in_turn = ready[turn:] + ready[:turn]
            for system in ready_in_turn:
                system.files(most, size)
            for number, (operation, block, streams) in enumerate(cases):
                for system in ready_in_turn:
                    if system.name == "pyfuse3" and operation in NOT_FOR_THE_PEER:
                        continue
                    if operation in LOADS:
                        sample = measure_load(operation, system.directory, chosen.seconds, chosen.driver)
                    else:
                        files = system.files(streams, size)
                        sample = measure(client, operation, block, size, chosen.seconds, files)
                    samples[system.name, operation, block, streams].append(sample)
                if sys.stderr.isatty():
                    print(
                        f"\rround {round_ + 1}/{chosen.rounds}, case {number + 1}/{len(cases)} ",
                        end="",
                        file=sys.stderr,
                    )
        traced: dict[str, list[float]] = {}
        if "gpufs" in chosen.systems and chosen.trace_rounds:
            traced = trace_cost(client, ready[0], size, chosen.seconds, chosen.trace_rounds)
    if sys.stderr.isatty():
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    names = [system.name for system in ready]
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(report.table(cases, names, samples))
    if traced:
        print(report.trace_line(traced))
    results = [
        {
            "system": system,
            "operation": operation,
            "block": block,
            "streams": streams,
            "bytes_per_second": [sample.rate for sample in found],
            "call_seconds": [(sample.median, sample.percentile99) for sample in found],
        }
        for (system, operation, block, streams), found in samples.items()
    ]
    options = {"file_bytes": size, "seconds": chosen.seconds, "rounds": chosen.rounds, "driver": chosen.driver}
    document = {"machine": machine, "options": options, "results": results, "trace_seconds_per_read": traced}
    path = report.write_json(document, chosen.json)
    print(f"written to {path}")
    picture = chosen.plot or path.with_suffix(".png")
    if not {"read", "rewrite"} <= set(chosen.operations):
        return
    try:
        plot.draw(document, picture)
        print(f"drawn in {picture}")
    except ImportError:
        print("bench: matplotlib is not installed: no picture (pip install matplotlib)", file=sys.stderr)


if __name__ == "__main__":
    main()
