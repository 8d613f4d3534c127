"""`python -m campaigns.group`: a trainer and several engines of vLLM that share weights and follow it.

The engines map one processed copy. The trainer writes a checkpoint for each version onto the mount, and makes the
calls of an update to all engines at once. After each version the engines' tokens are equal; after every fourth, and
after each fault, they are those of an engine that starts freshly. Faults: the daemon is killed, the engine that
processes a version is killed, one engine sleeps over two versions. It prints times and memory, and ends with 1 if
anything was wrong.

GPUFS_VLLM_PYTHON: the Python of an environment with vLLM, or a script that runs one; gpufs is that of this checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.data import GIB, MIB
from support.model_servers import Servers
from support.mounting import REPOSITORY
from support.processes import run
from support.surviving import Survivor, mounted

from campaigns.servers import device_used, make_server, scratch

PATIENCE = 600.0

# Holds the model argv[1], and writes a version for each line of standard input, a number and a directory: each version
# has other weights.
TRAIN = """
import os, shutil, sys
import torch, gpufs.torch
from safetensors.torch import load_file
source = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
base = {}
for file in sorted(os.listdir(source)):
    if file.endswith(".safetensors"):
        base.update(load_file(os.path.join(source, file), device=device))
print("ready", flush=True)
for line in sys.stdin:
    number, target = line.rstrip().split(" ", 1)
    os.mkdir(target)
    shutil.copy(os.path.join(source, "config.json"), target)
    torch.manual_seed(int(number))
    tensors = {}
    for name, tensor in base.items():
        scaled = tensor * (1 + 0.2 * torch.rand((), device=device)).to(tensor.dtype)
        tensors[name] = scaled[torch.randperm(len(scaled), device=device)] if "proj" in name else scaled
    gpufs.torch.publish(tensors, os.path.join(target, "model.safetensors"))
    del tensors, scaled
    if device == "cuda":
        torch.cuda.empty_cache()
    print("written", flush=True)
"""


class Engine:
    """An engine that takes commands."""

    def __init__(self, servers: Servers[Any, Survivor], number: int, options: dict[str, Any]) -> None:
        self.name = f"engine {number}"
        self._log = servers.scratch / f"engine-{number}.log"
        here, there = os.pipe()
        os.set_inheritable(there, True)
        program = REPOSITORY / "tests" / "support" / "vllm_session.py"
        text = json.dumps({"model": str(servers.model), **options})
        command = f'exec 3>&{there} {there}>&-; exec "$@"'
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                ["bash", "-c", command, "bash", str(servers.python), str(program), text],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HOME": str(servers.scratch), "HF_HUB_OFFLINE": "1", **servers.environment},
                pass_fds=[there],
                start_new_session=True,
            )
        os.close(there)
        self._answers = os.fdopen(here, "rb", buffering=0)

    def answer(self) -> Any:
        """Waits for an answer. AssertionError with the engine's log if there is none."""
        ready, _, _ = select.select([self._answers], [], [], PATIENCE)
        line = self._answers.readline() if ready else b""
        if not line:
            raise AssertionError(f"{self.name} gave no answer:\n{self._log.read_text()[-6000:]}")
        return json.loads(line)

    def ask(self, do: str, **more: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self._answers.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


class Peak:
    """What the device and the mount hold at most, in bytes, while it is entered."""

    def __init__(self, mount: Survivor, *, on_gpu: bool) -> None:
        self._mount = mount
        self._on_gpu = on_gpu
        self.device = self.mount = 0
        self._ended = threading.Event()

    def __enter__(self) -> Peak:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            numbers = os.statvfs(self._mount.device)
            self.mount = max(self.mount, (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize)
            if self._on_gpu:
                self.device = max(self.device, device_used())


class Group:
    """The engines, the trainer's versions, and what was wrong."""

    def __init__(self, servers: Servers[Any, Survivor], options: dict[str, Any], *, on_gpu: bool) -> None:
        self._servers = servers
        self._options = options
        self._on_gpu = on_gpu
        self._engines: list[Engine] = []
        self._started = 0
        self._version = 0
        self._trainer = subprocess.Popen(
            [str(servers.python), "-c", TRAIN, str(servers.model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **servers.environment},
        )
        self.wrong: list[str] = []
        self.times: dict[str, list[float]] = {"prepared": [], "updated": [], "first_token": []}

    @property
    def checkpoint(self) -> Path:
        return self._servers.mount.device / f"step-{self._version}"

    def start(self, count: int) -> None:
        """Starts more engines, at once."""
        new = []
        for _ in range(count):
            new.append(Engine(self._servers, self._started, self._options))
            self._started += 1
        self._engines += new
        for engine in new:
            ready = engine.answer()
            assert ready == "ready", ready

    def end(self) -> None:
        for engine in self._engines:
            engine.end()
        self._trainer.kill()
        self._trainer.communicate()

    def train(self) -> None:
        """Writes the next checkpoint in the place of the last one."""
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        self._version += 1
        assert self._trainer.stdin is not None
        assert self._trainer.stdout is not None
        self._trainer.stdin.write(f"{self._version} {self.checkpoint}\n")
        self._trainer.stdin.flush()
        said = self._trainer.stdout.readline()
        assert said == "written\n", f"the trainer said {said!r}"

    def update(self, engines: list[Engine] | None = None, fault: str = "") -> None:
        """Makes the calls of an update to all engines at once, and notes the times."""
        chosen = self._engines if engines is None else engines
        with ThreadPoolExecutor(len(chosen) + 1) as pool:
            calls = [pool.submit(engine.ask, "update", path=str(self.checkpoint)) for engine in chosen]
            if fault == "daemon":
                time.sleep(random.uniform(0, 0.5))
                self._servers.mount.kill()
            for engine, call in zip(chosen, calls, strict=True):
                answer = call.result()
                if "error" in answer:
                    self.wrong.append(f"version {self._version}, {engine.name}: {answer['error']}")
                elif not fault:
                    for name, value in answer.items():
                        self.times[name].append(value)

    def kill_who_processes(self) -> None:
        """Kills the engine that processes a version in the middle. The others go on, and another one starts."""
        victim, *others = self._engines
        assert victim.process.stdin is not None
        victim.process.stdin.write(json.dumps({"do": "update", "path": str(self.checkpoint)}).encode() + b"\n")
        victim.process.stdin.flush()
        time.sleep(random.uniform(0.1, 0.6))
        victim.end()
        self._engines = others
        self.update()
        self.start(1)  # maps what the group has

    def check(self, label: str, *, fresh: bool) -> None:
        """Compares the tokens of all engines, and those of one that starts freshly."""
        tokens = [engine.ask("generate") for engine in self._engines]
        wanted = self._fresh() if fresh else tokens[0]
        for engine, found in zip(self._engines, tokens, strict=True):
            if found != wanted:
                self.wrong.append(f"version {self._version}, {label}, {engine.name}: {found} instead of {wanted}")

    def _fresh(self) -> Any:
        names = {"gpu_memory_utilization", "kv_cache_memory_bytes"} & self._options.keys()
        options = {name: self._options[name] for name in names}
        servers = replace(self._servers, model=self.checkpoint)
        engine = Engine(servers, 1000 + self._version, {"load_format": "auto", **options})
        try:
            engine.answer()
            return engine.ask("generate")
        finally:
            engine.end()

    def run(self, engines: int, versions: int) -> None:
        mount = self._servers.mount
        begun = time.perf_counter()
        self.start(1)
        self.start(engines - 1)
        assert self._trainer.stdout is not None
        assert self._trainer.stdout.readline() == "ready\n"
        print(f"{engines} engines were ready after {time.perf_counter() - begun:.1f} s", flush=True)
        tokens = [engine.ask("generate") for engine in self._engines]  # which also compiles kernels
        if any(each != tokens[0] for each in tokens):
            self.wrong.append(f"tokens at the start: {tokens}")
        held = self._used()
        addresses = [engine.ask("addresses") for engine in self._engines]
        kills = set(range(2, versions, max(1, versions // 5)))
        peak = Peak(mount, on_gpu=self._on_gpu)
        for number in range(1, versions + 1):
            self.train()
            killed = number in kills
            if killed:
                self.update(fault="daemon")
            else:
                with Peak(mount, on_gpu=self._on_gpu) as seen:
                    self.update()
                peak.device, peak.mount = max(peak.device, seen.device), max(peak.mount, seen.mount)
            self.check("daemon killed" if killed else "", fresh=killed or number % 4 == 1)
        if addresses != [engine.ask("addresses") for engine in self._engines]:
            self.wrong.append("parameters have moved")
        for name, values in self.times.items():
            print(f"{name}: median {statistics.median(values):.3f} s, worst {max(values):.3f} s, of {len(values)}")
        print(
            f"before: device {held[0] / GIB:.2f} GiB, mount {held[1] / GIB:.2f} GiB; at most, with the next checkpoint:"
        )
        print(f"        device {peak.device / GIB:.2f} GiB, mount {peak.mount / GIB:.2f} GiB ")
        print(f"daemon killed {len(kills)} times", flush=True)
        self.train()
        self.kill_who_processes()
        self.check("the engine that processed was killed", fresh=True)
        sleeper, *others = self._engines
        sleeper.ask("sleep")
        for _ in range(2):
            self.train()
            self.update(others)
        sleeper.ask("wake")
        self.update([sleeper])
        self.check("one slept over two versions", fresh=True)
        files = self._servers.published()
        if len(files) != 1:
            self.wrong.append(f"published files: {files}")

    def _used(self) -> tuple[int, int]:
        numbers = os.statvfs(self._servers.mount.device)
        return device_used() if self._on_gpu else 0, (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize


@contextmanager
def place(width: int, driver: str) -> Iterator[tuple[Survivor, Path, int]]:
    """A mount that has space for the weights, two versions and two checkpoints, and a folder with the model."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpufs-group-", dir=scratch())))
        run(
            sys.executable,
            "-m",
            "campaigns.servers",
            "--width",
            str(width),
            "--make",
            "bfloat16",
            str(folder / "model"),
            timeout=1200,
        )
        weights = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
        options = ["--memory", str(5 * weights + 512 * MIB), "--host-memory", str(2 * weights + 64 * MIB)]
        yield stack.enter_context(mounted(folder / "mnt", *options, driver=driver)), folder, weights


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaigns.group", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--driver", choices=["cuda", "host"], default="cuda", help="host: vLLM's build for CPUs")
    parser.add_argument("--width", type=int, help="of the model [default: 4096, 7.2 GiB; host: 512]")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--versions", type=int, default=20)
    given = parser.parse_args()
    on_gpu = given.driver == "cuda"
    python = Path(os.environ.get("GPUFS_VLLM_PYTHON", REPOSITORY / "build" / "vllm-venv" / "bin" / "python"))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(tempfile.gettempdir(), "gpufs-servers-compiled")))
    with place(given.width or (4096 if on_gpu else 512), given.driver) as (mount, folder, weights):
        print(f"weights: {weights / GIB:.2f} GiB", flush=True)
        options: dict[str, Any] = {
            "load_format": "gpufs",
            "model_loader_extra_config": {"group": "policy", "mount": str(mount.path)},
            "weight_transfer_config": {"backend": "gpufs"},
        }
        if on_gpu:
            options |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": GIB}
            options |= {"enable_sleep_mode": True, "sleep_mode_backend": "gpufs"}
        group = Group(make_server("vllm", python, given.driver, mount, folder), options, on_gpu=on_gpu)
        try:
            group.run(given.engines, given.versions)
        finally:
            group.end()
    print(*group.wrong, sep="\n")
    print(f"group: {'FAILED' if group.wrong else 'all good'}")
    return 1 if group.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
