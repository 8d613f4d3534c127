"""`python -m campaigns.servers`: vLLM or SGLang with weights from a mount: time, memory and tokens of each start.

For a model in bfloat16, one in FP8 and a mixture of experts: the default load, the first start with gpufs, which
publishes the weights, the second, two at once, one whose daemon is killed before it loads and before it generates, and
starts that free the checkpoint. On a GPU by turns with starts from vLLM's own cache (`vllm preload`, `ipc_cache`). It
ends with 1 if tokens differ, or if an engine that maps weights takes memory too.

GPUFS_VLLM_PYTHON and GPUFS_SGLANG_PYTHON are the Python of an environment with the server, or a script that runs one;
gpufs is that of this checkout.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from support import model_servers, sglang_engine, vllm_engine
from support.cli import gpufs
from support.data import GIB, MIB
from support.model_servers import Servers, python_path
from support.mounting import REPOSITORY
from support.processes import run, wait_until
from support.surviving import Survivor, mounted

COLUMNS = {"model": 9, "start": 22, "load_s": 8, "LLM()_s": 8, "own": 6, "device": 7, "mount": 6, "held_GiB": 9, "": 0}
ROUNDS = 3  # of later starts on a GPU, with the model in bfloat16
KINDS = ("bfloat16", "fp8", "experts")
Outcome = vllm_engine.Outcome | sglang_engine.Outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaigns.servers", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--driver", choices=["cuda", "host"], default="cuda", help="host: vLLM's build for CPUs")
    parser.add_argument("--server", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--kind", choices=KINDS, action="append", help="of the models [default: all]")
    parser.add_argument("--width", type=int, help="of the model in bfloat16 [default: 4096, 7.2 GiB; host: 1024]")
    parser.add_argument("--make", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    width = given.width or (1024 if given.driver == "host" else 4096)
    if given.make:
        kind, folder = given.make
        make(kind, folder, width)
        return 0
    variable = f"GPUFS_{given.server.upper()}_PYTHON"
    python = Path(os.environ.get(variable, REPOSITORY / "build" / f"{given.server}-venv" / "bin" / "python"))
    if not python.exists():
        parser.error(f"there is no {python}: set {variable} to the Python of an environment with the server")
    # Python compiles what a server imports once: half a minute for each start where it may not store that.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(tempfile.gettempdir(), "gpufs-servers-compiled")))
    wrong = []
    print("Memory in multiples of the weights. own: what the load takes of the engine's, device: of the device's")
    print("held_GiB: of the device, while an engine is there, by all that this way needs: engine, cache or mount")
    print_row(*COLUMNS)
    for kind in given.kind or KINDS:
        with tempfile.TemporaryDirectory(prefix="gpufs-servers-", dir=scratch()) as folder:
            # Built by another process: the device's memory is free again when it has ended.
            words = ["--width", str(width), "--make", kind, f"{folder}/model"]
            run(sys.executable, "-m", "campaigns.servers", *words, timeout=1200)
            weights = sum(file.stat().st_size for file in Path(folder, "model").glob("*.safetensors"))
            memory = 3 * weights + 256 * MIB
            before = device_used() if given.driver == "cuda" else 0
            with mounted(Path(folder, "mnt"), "--memory", str(memory), driver=given.driver) as mount:
                server = make_server(given.server, python, given.driver, mount, Path(folder))
                wrong += Check(kind, server, given.driver, weights, before).run()
    print(*wrong, sep="\n")
    print(f"servers: {'FAILED' if wrong else 'all good'}")
    return 1 if wrong else 0


def scratch() -> str | None:
    """Host memory, from which a default load is fastest, if there is enough of it for the models."""
    return "/dev/shm" if shutil.disk_usage("/dev/shm").free > 24 * GIB else None


def make(kind: str, folder: str, width: int) -> None:
    target = Path(folder)
    if kind == "experts":
        model_servers.make_experts(target, seed=0)
    elif kind == "fp8":
        model_servers.make_model(target.with_name("plain"), seed=0, width=1024)
        model_servers.quantise_to_fp8(target.with_name("plain"), target)
        shutil.rmtree(target.with_name("plain"))
    else:
        model_servers.make_model(target, seed=0, width=width, layers=6 if width < 4096 else 20, shards="3GB")


def make_server(name: str, python: Path, driver: str, mount: Survivor, folder: Path) -> Servers[Any, Survivor]:
    """Returns starts of a server with the model in a folder, and with the mount's plug-in."""
    if name == "vllm":
        environment = {
            "PYTHONPATH": python_path(folder, "vllm.general_plugins", name),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_PLUGINS": "none",  # the program registers the plug-in
        }
        return Servers(name, vllm_engine.Outcome, python, environment, mount, folder / "model", folder)
    environment = {
        "PYTHONPATH": python_path(folder, "sglang.srt.plugins", name, "measure_loads"),
        "SGLANG_PLUGINS": "gpufs,measure_loads",
    }
    if driver == "host":
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    return Servers(name, sglang_engine.Outcome, python, environment, mount, folder / "model", folder)


def device_used() -> int:
    """The bytes of the first GPU's memory that are in use."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(run(*words).stdout) << 20


def print_row(*cells: str) -> None:
    print(" ".join(cell.ljust(size) for cell, size in zip(cells, COLUMNS.values(), strict=True)).rstrip(), flush=True)


class Check:
    """Starts of engines with one model, and what was wrong with them."""

    def __init__(self, kind: str, servers: Servers[Any, Survivor], driver: str, weights: int, before: int) -> None:
        """before: what the device held before there was a mount."""
        self._kind = kind
        self._servers = servers
        self._folder = servers.scratch
        self._mount = servers.mount
        self._on_gpu = driver == "cuda"
        self._weights = weights
        self._before = before
        self._rounds = ROUNDS if self._on_gpu and kind == "bfloat16" else 1
        self._tokens: list[int] = []
        self._beside = 0  # bytes that an engine takes beside weights
        self._wrong: list[str] = []
        self._options: dict[str, Any] = {}
        if self._on_gpu and servers.program == "vllm":
            self._options = {"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": 1 << 30}
        elif self._on_gpu:
            self._options = {"mem_fraction_static": 0.4}
        self._shared: dict[str, Any] = {"extra": {"mount": str(servers.mount.path)}}

    def run(self) -> list[str]:
        try:
            # The first start of all compiles kernels, which the server then finds in its folder.
            self._judge("default, cold caches", self._engine(load_format="auto"))
            for number in range(1, self._rounds if self._on_gpu else 1):
                self._judge(f"default, {number}", self._engine(load_format="auto"))
        except AssertionError as error:
            last = str(error).strip().splitlines()[-1]
            print_row(self._kind, "default", "-", "-", "-", "-", "-", "-", f"cannot be loaded: {last}"[:160])
            return [f"{self._kind}: the server cannot load the model by itself"] if self._on_gpu else []
        self._judge("first start", self._engine(**self._shared))
        maps = bool(self._servers.published())
        if not maps and self._kind == "bfloat16":
            self._wrong.append(f"{self._kind}: nothing was published")
        if self._on_gpu and self._servers.program == "vllm":
            self._beside_the_servers_cache(maps)
        else:
            for number in range(2, 2 + self._rounds):
                self._judge(f"start {number}", self._engine(**self._shared), maps=maps)
        self._two_at_once(maps)
        self._daemon_killed(maps)
        if maps:
            self._checkpoint_freed()
        return self._wrong

    def _engine(self, **settings: Any) -> Outcome:
        outcome: Outcome = self._servers.start(options=self._options, **settings)
        return outcome

    def _judge(
        self, label: str, outcome: Outcome, *, maps: bool = False, alone: bool = True, held: int | None = None
    ) -> None:
        """Prints a row. maps: whether the engine must take no memory for weights. alone: whether no other one ran."""
        if not self._tokens:  # the default load
            self._tokens, self._beside = outcome.tokens, max(outcome.own_bytes - self._weights, 0)
        problems = []
        if outcome.tokens != self._tokens:
            problems.append(f"tokens {outcome.tokens} instead of {self._tokens}")
        python = 0 if self._on_gpu else 32 * MIB  # which takes host memory, too
        allowed = self._beside + self._weights // 4 + python
        if maps and (outcome.own_bytes > allowed or not outcome.external_bytes):
            problems.append(f"{outcome.own_bytes} bytes of its own, {outcome.external_bytes} mapped")
        self._wrong += [f"{self._kind}, {label}: {problem}" for problem in problems]
        numbers = os.statvfs(self._mount.device)
        used = (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize
        print_row(
            self._kind,
            label,
            f"{outcome.load_seconds:.2f}",
            f"{outcome.start_seconds:.1f}",
            f"{outcome.own_bytes / self._weights:.2f}",
            f"{outcome.device_bytes / self._weights:.2f}" if alone and self._on_gpu else "-",
            f"{used / self._weights:.2f}",
            "-" if held is None else f"{held / GIB:.2f}",
            "WRONG" if problems else "",
        )
        for line in outcome.log:
            print(f"  {line}", flush=True)

    def _beside_the_servers_cache(self, maps: bool) -> None:
        """Later starts with gpufs and with vLLM's own cache, by turns; at the end the cache's process is killed."""
        before_cache = device_used()
        sockets = self._folder / "sockets"
        sockets.mkdir(mode=0o700)
        cached: dict[str, Any] = {"load_format": "ipc_cache", "extra": {"socket_dir": str(sockets), "fallback": False}}
        self._start("second start", self._before, maps, **self._shared)
        try:
            with self._servers.preload(sockets, self._options) as cache:
                print(f"  vllm preload was ready after {cache.seconds:.1f} s", flush=True)
                for number in range(1, 1 + self._rounds):
                    self._start(f"ipc_cache, {number}", before_cache, True, **cached)
                    self._start(f"second start, {number}", None, maps, **self._shared)
                self._start("ipc_cache, killed", before_cache, True, cache.kill, **cached)
        except AssertionError as error:
            last = str(error).strip().splitlines()[-1]
            print_row(self._kind, "ipc_cache", "-", "-", "-", "-", "-", "-", f"vLLM's cache does not: {last}"[:160])
        cached["extra"]["fallback"] = True
        self._start("ipc_cache, after that", before_cache, False, **cached)

    def _start(
        self, label: str, before: int | None, maps: bool, act: Callable[[], None] = lambda: None, **settings: Any
    ) -> None:
        """Starts an engine; when it has loaded, sees what the device holds more than before, and acts."""
        folder = self._folder / label.replace(" ", "-")
        folder.mkdir()
        (folder / "load-go").touch()
        with ThreadPoolExecutor(1) as pool:
            engine = pool.submit(self._engine, stops=str(folder), **settings)
            self._wait((folder / "generate").exists, [engine])
            held = None if before is None else device_used() - before
            act()
            (folder / "generate-go").touch()
            (folder / "end-go").touch()
            self._judge(label, engine.result(), maps=maps, held=held)

    def _two_at_once(self, maps: bool) -> None:
        def both_there(stop: str, folders: list[Path]) -> bool:
            return all(Path(folder, stop).exists() for folder in folders)

        with ThreadPoolExecutor(2) as pool:
            folders = [self._folder / "one", self._folder / "two"]
            engines = [self._in_background(pool, folder) for folder in folders]
            for stop in ("load", "generate", "end"):
                self._wait(partial(both_there, stop, folders), engines)
                for folder in folders:
                    (folder / f"{stop}-go").touch()
            for number, engine in enumerate(engines, 1):
                self._judge(f"two at once, {number}", engine.result(), maps=maps, alone=False)

    def _daemon_killed(self, maps: bool) -> None:
        folder = self._folder / "killed"
        with ThreadPoolExecutor(1) as pool:
            engine = self._in_background(pool, folder)
            for stop in ("load", "generate", "end"):
                self._wait((folder / stop).exists, [engine])
                if stop != "end":
                    self._mount.kill()
                (folder / f"{stop}-go").touch()
            self._judge("daemon killed twice", engine.result(), maps=maps)

    def _in_background(self, pool: ThreadPoolExecutor, folder: Path) -> Future[Outcome]:
        folder.mkdir()
        return pool.submit(self._engine, stops=str(folder), **self._shared)

    def _wait(self, condition: Callable[[], bool], engines: list[Future[Outcome]]) -> None:
        """Waits for engines to reach a stop. One that ends before raises what it ended with, when it is asked."""
        wait_until(lambda: condition() or any(engine.done() for engine in engines), 600, "engines")

    def _checkpoint_freed(self) -> None:
        for published in self._servers.published():
            published.unlink()
        gpufs("cp", "-rL", self._folder / "model", self._mount.device)
        self._servers.model = self._mount.device / "model"
        self._judge("cp, keep_checkpoint no", self._engine(extra={"keep_checkpoint": False}))
        self._judge("the second such start", self._engine(), maps=True)
        numbers = os.statvfs(self._mount.device)
        used = (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize
        if used > 1.05 * self._weights + 32 * MIB:
            self._wrong.append(f"{self._kind}: the mount uses {used} bytes for {self._weights} bytes of weights")


if __name__ == "__main__":
    sys.exit(main())
