"""Whole programs from their start: transformers on weights from tmpfs, from the mount, and by ``gpufs run``.

A program is a process of its own (program.py): it loads a model, computes, and reports how long each part took, what it
computed and how much memory it took. The ways take turns, so that what else happens on the machine meets all of them.

    .venv/bin/python bench/gpu/programs.py --layers 14 --rounds 3

Needs torch and transformers. The model has random weights in the form of Qwen3-8B, with fewer layers. ``--together 4``
also starts one to four programs at once, for the memory they take, and ``--json`` writes what bench/chart.py draws.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
GPUFS: Final = str(REPOSITORY / ".venv" / "bin" / "gpufs")
PROGRAM: Final = str(Path(__file__).with_name("program.py"))
TMPFS: Final = "from tmpfs"
IN_PLACE: Final = "by gpufs run"
WAYS: Final = (TMPFS, "from the mount", IN_PLACE)
_FREE: Final = "import torch; print(torch.cuda.mem_get_info()[0])"
_FIGURES: Final = (
    ("first_token_s", "process start to first token, s"),
    ("import_s", "of it imports, s"),
    ("rest_s", "the rest, s"),
    ("load_s", "first load, s"),
    ("second_load_s", "second load, s"),
    ("gpu_gib", "GPU memory of the program, GiB"),
)


@contextmanager
def mounted(path: Path) -> Iterator[Path]:
    path.mkdir()
    subprocess.run([GPUFS, "mount", path, "--driver", "cuda"], check=True)
    try:
        yield path / "gpu0"
    finally:
        subprocess.run([GPUFS, "umount", path], check=True)


def command_of(way: str, model: Path, *options: str) -> tuple[list[str], dict[str, str]]:
    """Return the command of a program and its environment."""
    words = [GPUFS, "run", "--"] if way == IN_PLACE else []
    # Where Python may not store compiled modules, compiling takes most of the time to the first token.
    compiled = {"PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir(), "gpufs-programs-compiled")), "TQDM_DISABLE": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | compiled
    return [*words, sys.executable, PROGRAM, str(model), *options], environment


def run(way: str, model: Path, *options: str) -> dict[str, Any]:
    """Start the program; returns what it reports. CalledProcessError if it fails."""
    command, environment = command_of(way, model, *options)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report | {"rest_s": report["first_token_s"] - report["import_s"]}


def free_memory(way: str, model: Path, count: int) -> list[int]:
    """Return the free bytes of the device after each of so many programs has loaded the model and keeps it."""
    with ExitStack() as ends:
        free = []
        for _ in range(count):
            command, environment = command_of(way, model, "--hold")
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            ends.callback(process.communicate)
            assert process.stdout is not None
            free.append(int(process.stdout.readline()))
        return free


def memory_rows(free: dict[str, list[int]], whole: int, mount: int) -> list[dict[str, Any]]:
    """Return the memory of one program, of two, ... in GiB. ``whole``: free bytes before; ``mount``: of the files."""
    rows = zip(free[TMPFS], free[IN_PLACE], strict=True)
    return [
        {
            "programs": number,
            "without": round((whole - copied) / 2**30, 2),
            "gpufs": round((whole - in_place) / 2**30, 2),
            "mount": round(mount / 2**30, 2),
        }
        for number, (copied, in_place) in enumerate(rows, 1)
    ]


def results_of(reports: dict[str, list[dict[str, Any]]], memory: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians in the form that bench/chart.py draws."""

    def row(title: str, key: str) -> dict[str, Any]:
        values = {way: statistics.median(report[key] for report in reports[way]) for way in (TMPFS, IN_PLACE)}
        return {"program": title, "without": round(values[TMPFS], 2), "gpufs": round(values[IN_PLACE], 2)}

    imports = row("", "import_s")
    first_token = {**row("to the first token", "first_token_s"), "imports": [imports["without"], imports["gpufs"]]}
    loads = [row("first load", "load_s"), row("second load", "second_load_s")]
    return {"load_s": loads, "start_s": [first_token], "memory_gib": memory}


def print_table(reports: dict[str, list[dict[str, Any]]]) -> bool:
    """Print medians, and ratios to tmpfs. Returns whether all ways computed the same."""
    ways = [way for way in WAYS if reports[way]]
    print(f"{'':34}" + "".join(f"{way:>24}" for way in ways))

    def row(title: str, values: dict[str, list[float]]) -> None:
        medians = {way: statistics.median(values[way]) for way in ways}
        cells = (f"{medians[way]:.3f} ({medians[way] / medians[TMPFS]:.2f})" for way in ways)
        print(f"{title:34}" + "".join(f"{cell:>24}" for cell in cells))

    for key, title in _FIGURES:
        row(title, {way: [report[key] for report in reports[way]] for way in ways})
    computed = {way: [report for report in reports[way] if "results" in report] for way in ways}
    for key, title in (("forward_ms", "forward of {} tokens, ms"), ("device_ms", "the device alone, {} tokens, ms")):
        for length in computed[TMPFS][0][key]:
            row(title.format(length), {way: [report[key][length] for report in computed[way]] for way in ways})
    row("decode of one token, ms", {way: [report["decode_ms"] for report in computed[way]] for way in ways})
    print(f"{'addresses of weights mod 16':34}" + "".join(f"{reports[way][0]['mod_16']!s:>24}" for way in ways))
    results = {way: {json.dumps(report["results"]) for report in computed[way]} for way in ways}
    equal = len(set.union(*results.values())) == 1
    print(f"logits and tokens: {'bit-equal in all runs' if equal else f'DIFFERENT: {results}'}")
    return equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=14, help="0.36 GiB each, beside 2.3 GiB (default: 14)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way runs (default: 3)")
    parser.add_argument(
        "--computing", type=int, default=1, help="in how many rounds the programs also compute (default: 1)"
    )
    parser.add_argument("--tokens", default="512,2048,8192", help="lengths of the forward passes")
    parser.add_argument("--together", type=int, default=0, metavar="N", help="also the memory of 1 to N programs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the medians there")
    args = parser.parse_args()
    if missing := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        return print(f"whole programs are left out: {', '.join(missing)} is not installed")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch, mounted(Path(scratch) / "mount") as device:
        model = Path(scratch) / "model"
        subprocess.run([sys.executable, PROGRAM, model, "--make", str(args.layers)], check=True)
        subprocess.run([GPUFS, "cp", "-r", model, device], check=True)
        for file in sorted(model.glob("*.safetensors")):
            header = int.from_bytes(file.open("rb").read(8), "little")
            print(f"{file.name}: {file.stat().st_size / 2**30:.2f} GiB, data begins at {(8 + header) % 256} mod 256")
        reports: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        run(IN_PLACE, device / model.name, "--start-only")  # compiles Python's modules
        for number in range(1, args.rounds + 1):
            options = ["--tokens", args.tokens] if number <= args.computing else ["--start-only"]
            for way in WAYS:
                source = model if way == TMPFS else device / model.name
                report = run(way, source, *options)
                reports[way].append(report)
                times = ", ".join(f"{key} {report[key]:.2f}" for key in ("first_token_s", "import_s", "load_s"))
                print(f"round {number}, {way}: {times}", flush=True)
        equal = print_table(reports)
        memory: list[dict[str, Any]] = []
        if args.together:
            whole = int(subprocess.check_output([sys.executable, "-c", _FREE]))
            free = {
                way: free_memory(way, model if way == TMPFS else device / model.name, args.together)
                for way in (TMPFS, IN_PLACE)
            }
            files = sum(file.stat().st_size for file in model.glob("*.safetensors"))
            memory = memory_rows(free, whole, files)
            for line in memory:
                print(
                    "{programs} programs: {without} GiB from tmpfs, {gpufs} beside the mount's {mount}".format(**line)
                )
        if args.json:
            args.json.write_text(json.dumps(results_of(reports, memory), indent=2) + "\n")
        same = subprocess.run(["diff", "-r", model, device / model.name], check=False).returncode == 0
        print(f"the files on the mount: {'as they were' if same else 'CHANGED'}")
    sys.exit(not (equal and same))


if __name__ == "__main__":
    main()
