"""Measures reading and writing of files in a gpufs mount against tmpfs and against a plain pyfuse3 file system.

Every case is measured in several rounds; in each round the systems take turns, so that what else the machine does
hits them alike. The table shows medians.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from bench import report, systems

MIB = 1 << 20
CLIENT_SOURCE = Path(__file__).with_name("client.c")
CLIENT = Path(__file__).parents[1] / "build" / "bench-client"
OPERATIONS = ("read", "rewrite", "fresh")


def build_client() -> Path:
    """Compiles the client if it is older than its source."""
    if not CLIENT.exists() or CLIENT.stat().st_mtime < CLIENT_SOURCE.stat().st_mtime:
        CLIENT.parent.mkdir(exist_ok=True)
        subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-o", str(CLIENT), str(CLIENT_SOURCE)], check=True)
    return CLIENT


def measure(client: Path, operation: str, block: int, size: int, seconds: float, files: list[Path]) -> float:
    """Bytes a second of all streams together."""
    mode = {"read": "read", "rewrite": "write", "fresh": "fresh"}[operation]
    words = [str(client), mode, str(block), str(size), str(seconds), *map(str, files)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=seconds * 10 + 120)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
    rates = [int(line.split()[0]) / float(line.split()[1]) for line in done.stdout.splitlines()]
    return sum(rates)


def trace_cost(client: Path, system: systems.System, size: int, seconds: float, rounds: int) -> dict[str, list[float]]:
    """Seconds of a 4 KiB read of one file by one stream, with and without a recording, interleaved.

    A recording begins and ends for each measurement, so that whatever else changes with time hits both alike.
    """
    files = system.files(1, size)
    found: dict[str, list[float]] = {"off": [], "on": []}
    for round_ in range(rounds):
        for state in ("off", "on") if round_ % 2 == 0 else ("on", "off"):
            with systems.recording(system) if state == "on" else contextlib.nullcontext():
                found[state].append(4096 / measure(client, "read", 4096, size, seconds, files))
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
    parser.add_argument("--operations", type=words, default=list(OPERATIONS), help="of read,rewrite,fresh")
    parser.add_argument("--blocks", type=numbers, help="default 4K,128K,1M,16M")
    parser.add_argument("--streams", type=numbers, default=[1, 4], help="files at once, default 1,4")
    parser.add_argument("--file-bytes", type=numbers, default=[128 * MIB], help="size of each file, default 128M")
    parser.add_argument("--rounds", type=int, help="default 5")
    parser.add_argument("--seconds", type=float, help="of each measurement, default 0.4")
    parser.add_argument(
        "--threads", action="store_true", help="gpufs also with twice and four times its reader threads"
    )
    parser.add_argument(
        "--trace-rounds", type=int, help="reads of 4K with and without a recording, default 15; 0: none"
    )
    parser.add_argument("--driver", default="host", help="of the gpufs mount")
    parser.add_argument("--json", type=Path, help="where the results go; default: bench/results/")
    chosen = parser.parse_args()
    chosen.blocks = chosen.blocks or ([4096, MIB] if chosen.quick else [4096, 128 << 10, MIB, 16 * MIB])
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
    cases = [(o, b, s) for o in chosen.operations for b in chosen.blocks for s in chosen.streams]
    memory = size * most + 64 * MIB
    machine = report.machine()
    rates: dict[tuple[str, str, int, int], list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        ready = []
        if "gpufs" in chosen.systems:
            ready.append(stack.enter_context(systems.gpufs("gpufs", memory, driver=chosen.driver)))
            if chosen.threads:
                default = systems.reader_threads(chosen.driver)
                for factor in (2, 4):
                    option = ("--reader-threads", str(default * factor))
                    name = f"gpufs {factor}x{default}"
                    ready.append(stack.enter_context(systems.gpufs(name, memory, *option, driver=chosen.driver)))
        if "tmpfs" in chosen.systems:
            ready.append(stack.enter_context(systems.tmpfs()))
        if "pyfuse3" in chosen.systems:
            ready.append(stack.enter_context(systems.peer(size)))
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
                    files = system.files(streams, size)
                    rate = measure(client, operation, block, size, chosen.seconds, files)
                    rates[system.name, operation, block, streams].append(rate)
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
    print(report.table(cases, names, rates))
    if traced:
        print(report.trace_line(traced))
    results = [
        {"system": s, "operation": o, "block": b, "streams": n, "bytes_per_second": values}
        for (s, o, b, n), values in rates.items()
    ]
    options = {"file_bytes": size, "seconds": chosen.seconds, "rounds": chosen.rounds, "driver": chosen.driver}
    document = {"machine": machine, "options": options, "results": results, "trace_seconds_per_read": traced}
    path = report.write_json(document, chosen.json)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
