"""The plug-in for SGLang: the names that it uses in released packages, and SGLang itself on the CPU.

SGLang is in an environment of its own, which scripts/setup-sglang makes; GPUFS_SGLANG_PYTHON names the Python of
another one. It is the whole server with its CPU engine. Only its package of kernels is a stand-in: that engine calls
none of them on a processor without AMX.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.cli import gpufs
from support.data import MIB
from support.model_servers import Mount, Servers, make_model, python_path
from support.mounting import REPOSITORY, GpufsMount, Mounter
from support.processes import PATIENCE, wait_until
from support.server_sources import download_wheel
from support.sglang_engine import PROMPT, Outcome
from support.surviving import Survivor
from support.surviving import mounted as surviving_mount

VERSIONS = ("0.5.22", "0.5.23")
CACHE = REPOSITORY / "build" / "servers"
PYTHON = Path(os.environ.get("GPUFS_SGLANG_PYTHON", REPOSITORY / "build" / "sglang-venv" / "bin" / "python"))
PLUGINS = "sglang.srt.plugins"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=VERSIONS)
def sources(request: pytest.FixtureRequest) -> Path:
    """The sources of a released package."""
    CACHE.mkdir(parents=True, exist_ok=True)
    return download_wheel(f"sglang=={request.param}", CACHE)


def used_names() -> Iterator[tuple[str, str]]:
    """Modules of SGLang and the names that the plug-in imports from them."""
    for file in (REPOSITORY / "gpufs" / "integrations").glob("*sglang*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                yield from ((str(node.module), alias.name) for alias in node.names)


def module_file(sources: Path, module: str) -> Path:
    path = sources.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def definitions(file: Path) -> dict[str, ast.AST]:
    """What a module defines or imports, and the methods of its classes."""
    found: dict[str, ast.AST] = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, node)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = node
            found |= {f"{node.name}.{part.name}": part for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_names_exist(sources: Path) -> None:
    """The released packages have all names that the plug-in imports, with the signatures with which it calls them."""
    used = list(used_names())
    assert len(used) > 10
    for module, name in used:
        file = module_file(sources, module)
        assert name in definitions(file) or (file.parent / f"{name}.py").exists(), (module, name)
    loader = definitions(sources / "sglang/srt/model_loader/loader.py")
    cache = definitions(sources / "sglang/srt/weight_cache/ipc_loader.py")
    protocol = definitions(sources / "sglang/srt/weight_cache/protocol.py")
    updater = sources / "sglang/srt/model_executor/model_runner_components/weight_updater.py"
    update = "WeightUpdater.update_weights_from_disk"
    runner = definitions(sources / "sglang/srt/model_executor/model_runner.py")
    signatures = [
        ("model_config load_config", loader["_get_quantization_config"]),
        ("model_config load_config quant_config", loader["_initialize_model"]),
        ("self model_config device_config", loader["DefaultModelLoader.load_model"]),
        ("model weights target_device", loader["DefaultModelLoader.load_weights_and_postprocess"]),
        (
            "self model_name_or_path revision fall_back_to_pt allow_patterns_overrides",
            loader["DefaultModelLoader._prepare_weights"],
        ),
        ("model", loader["PreshardedModelLoader._collect_extra_tensors"]),
        ("model", loader["PreshardedModelLoader._rebind_parameter_aliases"]),
        ("self model_config", cache["IpcModelLoader._resolve_engine_quant"]),
        ("quant_method quant_config", protocol["is_ipc_quant_supported"]),
        ("self model_path load_format weight_name_filter recapture_cuda_graph", definitions(updater)[update]),
        ("self new_model model_path load_format load_config", runner["ModelRunner.update_model_fields"]),
        ("self model_config model", loader["DefaultModelLoader._get_all_weights"]),
    ]
    for names, function in signatures:
        assert isinstance(function, ast.FunctionDef)
        arguments = [*function.args.args, *function.args.kwonlyargs]
        assert [argument.arg for argument in arguments] == names.split(), function.name
    assert "preloaded_weights_bytes" in loader
    assert '"_derived_weight_cache_error"' in updater.read_text()


@pytest.fixture
def model(root: Path) -> Path:
    """A model in two files, and one file that its index does not name."""
    places = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    for name, file in places.items():
        safetensors.torch.save_file({name: torch.randn(100).bfloat16()}, root / file)
    safetensors.torch.save_file({"a": torch.zeros(1)}, root / "consolidated.safetensors")
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return root


def run_in_server(script: str, *arguments: str | Path) -> None:
    """Runs a script that ends with an exception unless all is well."""
    prologue = f"""
        import sys
        sys.path.insert(0, {str(REPOSITORY / "tests")!r})
        from pathlib import Path
        from support.server_sources import SourceFinder
        sources, model = map(Path, sys.argv[1:])
        def expect_weights(found, prefix):
            import safetensors.torch, torch
            expected = {{}}
            for number in "12":
                expected |= safetensors.torch.load_file(model / f"model-{{number}}.safetensors")
            found = dict(found)
            assert found.keys() == {{prefix + name for name in expected}}, found.keys()
            assert all(torch.equal(found[prefix + name], expected[name]) for name in expected)
    """
    text = textwrap.dedent(prologue) + textwrap.dedent(script)
    command = [sys.executable, "-c", text, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr


def test_copies_in_order(sources: Path, model: Path) -> None:
    """SGLang's own loader of the released packages finds the files, and gets their tensors."""
    arguments = ast.parse((sources / "sglang/srt/server_args.py").read_text())
    imported = {alias.name for node in ast.walk(arguments) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert "add_load_format_choices" in imported
    assert [point.value for point in entry_points(group=PLUGINS)] == ["gpufs.integrations.sglang:register"]
    plugins = (sources / "sglang/srt/plugins/__init__.py").read_text()
    assert f'"{PLUGINS}"' in plugins
    run_in_server(
        """
        real = '''
            sglang.srt.arg_groups.choices
            sglang.srt.configs.load_config
            sglang.srt.environ
            sglang.srt.model_loader.loader
            sglang.srt.model_loader.weight_utils
            sglang.srt.plugins.hook_registry
        '''.split()
        missing = "filelock huggingface_hub orjson pydantic requests tqdm transformers triton".split()
        sys.meta_path.append(SourceFinder(sources, "sglang", real, missing))

        import sglang.srt.arg_groups.choices as choices
        import sglang.srt.server_args
        import transformers.utils
        transformers.utils.SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
        sglang.srt.server_args.add_load_format_choices = choices.add_load_format_choices
        from sglang.srt.configs.load_config import LoadConfig, LoadFormat
        from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
        from sglang.srt.plugins.hook_registry import HookRegistry
        import gpufs.integrations.sglang

        gpufs.integrations.sglang.register()
        HookRegistry.apply_hooks()
        assert "gpufs" in choices.LOAD_FORMAT_CHOICES
        assert LoadConfig(load_format="auto").load_format is LoadFormat.AUTO
        try:
            LoadConfig(load_format="unknown")
        except ValueError:
            pass
        else:
            raise AssertionError("an unknown format was accepted")

        source = DefaultModelLoader.Source(str(model), None, prefix="p.")
        for format in ("gpufs", gpufs.integrations.sglang.loader_class()):
            loader = get_model_loader(LoadConfig(load_format=format))
            assert type(loader) is gpufs.integrations.sglang.loader_class()
            expect_weights(loader._get_weights_iterator(source), "p.")
            # As for adapters, with the settings of the model.
            for extra in ({}, {"share": False}):
                loader = DefaultModelLoader(LoadConfig(load_format=format, model_loader_extra_config=extra))
                expect_weights(loader._get_weights_iterator(source), "p.")
        assert DefaultModelLoader(LoadConfig(load_format="pt")).load_config.load_format is LoadFormat.PT
        """,
        sources,
        model,
    )


@pytest.fixture
def servers(mount: Mounter, tmp_path: Path) -> Servers[Outcome, GpufsMount]:
    return make_servers(mount(memory=1024 * MIB), tmp_path)


def make_servers(mounted: Mount, tmp_path: Path) -> Servers[Outcome, Mount]:
    if not PYTHON.exists():
        pytest.skip(f"there is no {PYTHON}: scripts/setup-sglang makes it")
    plugins = python_path(tmp_path, PLUGINS, "sglang", "change_model", "enable_memory_saver", "stop_loads")
    environment = {
        "PYTHONPATH": os.pathsep.join([plugins, str(REPOSITORY / "tests/support/memory_saver")]),
        "SGLANG_PLUGINS": "gpufs",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # the processors of each rank
    }
    model = mounted.device / "Tiny-Qwen3"
    make_model(tmp_path / "model", seed=0, width=1024)
    shutil.copytree(tmp_path / "model", model)
    return Servers("sglang", Outcome, PYTHON, environment, mounted, model, tmp_path)


def test_engines_share_weights(servers: Servers[Outcome, GpufsMount]) -> None:
    """The first start publishes, later ones and those beside it map: nothing is read, and no memory is private."""
    weights = sum(file.stat().st_size for file in servers.model.glob("*.safetensors"))
    default = servers.start(load_format="auto")
    first = servers.start()
    (published,) = servers.published()
    assert published.stat().st_size == pytest.approx(weights, rel=0.02)
    assert published.name in gpufs("ls", published.parent).stdout
    read = servers.bytes_read()
    second = servers.start(attempts=["reload", "tensor"])
    assert servers.bytes_read() < read + MIB  # headers alone
    assert first.tokens == second.tokens == default.tokens
    for engine in (first, second):
        assert engine.private_bytes < default.private_bytes - 0.7 * weights
    for text in second.errors:
        assert '"share": false' in text

    published.unlink()
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: servers.start(), range(2)))
    assert [engine.tokens for engine in both] == [default.tokens] * 2
    assert servers.published() == [published]


def test_a_published_checkpoint_is_freed(servers: Servers[Outcome, GpufsMount]) -> None:
    """With keep_checkpoint=false the model's files keep their headers alone, and later engines need no more."""
    expected = servers.start(load_format="auto").tokens
    assert servers.start(extra={"keep_checkpoint": False}).tokens == expected
    assert all(file.stat().st_size < MIB for file in servers.model.glob("*.safetensors"))
    assert servers.start().tokens == expected
    assert len(servers.published()) == 1


def test_keeps_weights_apart(servers: Servers[Outcome, GpufsMount]) -> None:
    """Another dtype has weights of its own, also under the other's name; damaged ones are replaced."""
    other = {"dtype": "float32"}
    expected = servers.start(load_format="auto", options=other).tokens
    assert servers.start(options=other).tokens == expected
    (second,) = servers.published()
    tokens = servers.start().tokens
    (first,) = set(servers.published()) - {second}
    os.replace(first, second)
    assert servers.start(options=other).tokens == expected
    assert servers.published() == [second]
    for damage in ("contents", "header"):
        with open(second, "r+b") as file:
            file.seek(100 if damage == "header" else 20 * MIB)
            file.write(b"damaged")
        assert servers.start(options=other).tokens == expected, damage
        read = servers.bytes_read()
        assert servers.start(options=other).tokens == expected, damage
        assert servers.bytes_read() < read + MIB, damage
    assert servers.start(extra={"share": False}).tokens == tokens
    assert servers.published() == [second]


def test_copies_where_weights_cannot_be_shared(servers: Servers[Outcome, GpufsMount]) -> None:
    """With a model that has more than weights, nothing is published. Sleep needs host memory."""
    expected = servers.start(load_format="auto").tokens
    assert servers.start(plugins="gpufs,change_model").tokens == expected
    assert "model.layers.0.object" in servers.log
    assert not servers.published()
    servers.mount.device.joinpath("full").write_bytes(bytes(740 * MIB))
    assert servers.start().tokens == expected  # no memory to publish
    assert not servers.published()
    with pytest.raises(AssertionError, match="--host-memory"):
        servers.start(plugins="gpufs,enable_memory_saver")


def test_weights_sleep_with_the_memory_saver(mount: Mounter, tmp_path: Path) -> None:
    """Shared weights are parked, and come back; when they sleep alone, the KV cache stays.

    The package that frees memory of CUDA is a stand-in here.
    """
    with mount("--host-memory", str(1024 * MIB), memory=1024 * MIB) as mounted:
        servers = make_servers(mounted, tmp_path)
        expected = servers.start(load_format="auto").tokens
        for _ in range(2):  # the one that publishes, and one that maps
            engine = servers.start(plugins="gpufs,enable_memory_saver", attempts=["sleep"])
            before, asleep, after, tokens, again, cached = json.loads(engine.errors[0])
            (published,) = servers.published()
            assert (before, after) == (0, 0)
            assert asleep >= published.stat().st_size
            assert tokens == again == engine.tokens == expected
            assert cached > 0


def test_ranks_share_weights(servers: Servers[Outcome, GpufsMount]) -> None:
    """Each rank has weights of its own, and all ranks of an engine map or all load."""
    ranks = {"tp_size": 2}
    expected = servers.start(load_format="auto", options=ranks).tokens
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: servers.start(options=ranks), range(2)))
    assert [engine.tokens for engine in both] == [expected] * 2
    published = servers.published()
    assert len(published) == 2
    published[1].unlink()
    assert servers.start(options=ranks).tokens == expected
    assert servers.published() == published


@pytest.mark.timeout(1200)
def test_ranks_take_versions_together(servers: Servers[Outcome, GpufsMount]) -> None:
    ranks = {"tp_size": 2}
    version = servers.model.with_name("version")
    make_model(version, seed=1, width=1024)
    expected = servers.start(load_format="auto", options=ranks, model=version).tokens
    engine = servers.start(options=ranks, extra={"group": "policy"}, attempts=[f"update {version}"])
    assert engine.tokens != expected
    assert json.loads(engine.errors[0]) == expected
    assert len(servers.published()) == ranks["tp_size"]


# ---- engines that take new versions together ----


@dataclass
class Engine:
    """A server of SGLang, through its HTTP interface. armed: while this file exists, it stops in each load."""

    address: str
    stops: Path

    @property
    def armed(self) -> Path:
        return self.stops / "armed"

    def post(self, call: str, **body: object) -> Any:
        """Returns the answer, also of a call that failed."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address}{call}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            return json.loads(error.read())

    def tokens(self) -> list[int]:
        parameters = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        found: list[int] = self.post("/generate", input_ids=PROMPT, sampling_params=parameters)["output_ids"]
        return found

    def update(self, path: Path, **more: object) -> str:
        """Updates the weights; returns why that failed, or ""."""
        answer = self.post("/update_weights_from_disk", model_path=str(path), **more)
        return "" if answer["success"] else str(answer["message"])

    def version(self) -> str:
        with urllib.request.urlopen(f"{self.address}/model_info", timeout=60) as answer:
            return str(json.loads(answer.read())["weight_version"])


@contextmanager
def serve(servers: Servers[Outcome, Mount], name: str, model: Path) -> Iterator[Engine]:
    """Runs an engine of a group."""
    scratch = servers.scratch / name
    scratch.mkdir()
    arguments = f"""
        --model-path {model} --load-format gpufs --skip-tokenizer-init --skip-server-warmup --device cpu
        --dtype bfloat16 --attention-backend torch_native --sampling-backend pytorch --grammar-backend none
        --context-length 64 --max-total-tokens 256 --max-running-requests 2 --disable-cuda-graph
    """.split()
    group = ("--model-loader-extra-config", json.dumps({"group": "policy"}))
    plugins = {"SGLANG_PLUGINS": "gpufs,enable_memory_saver,stop_loads", "GPUFS_TEST_STOPS": str(scratch)}
    command = f"exec {servers.python} -m sglang.launch_server"
    with replace(servers, scratch=scratch).serve(command, *arguments, *group, **plugins) as address:
        yield Engine(address, scratch)


@pytest.mark.timeout(1800)
def test_engines_take_versions_together(tmp_path: Path) -> None:
    """One engine of a group processes a new version, and the others map it; what is refused changes nothing."""
    with surviving_mount(tmp_path / "mnt", "--host-memory", "1G", memory="1G") as mounted:
        servers = make_servers(mounted, tmp_path)
        versions = [mounted.device / f"v{number}" for number in range(3)]
        for seed, version in enumerate(versions):
            make_model(tmp_path / version.name, seed=seed, layers=3)
            shutil.copytree(tmp_path / version.name, version)
        with ThreadPoolExecutor(len(versions)) as pool:
            fresh = list(pool.map(lambda each: servers.start(load_format="auto", model=each).tokens, versions))
        assert len({tuple(tokens) for tokens in fresh}) == len(versions)
        with serve(servers, "a", versions[0]) as a, serve(servers, "b", versions[0]) as b:
            take_versions(servers, a, b, versions, fresh)
            refuse_versions(a, versions[1], fresh[1], tmp_path)
            sleep_and_take_versions(a, b, versions, fresh)
            fail_while_versions_change(servers, a, b, versions, fresh)


def device_bytes(servers: Servers[Outcome, Survivor]) -> int:
    return int(servers.mount.report()["devices"][0]["held_bytes"])


def take_versions(
    servers: Servers[Outcome, Survivor], a: Engine, b: Engine, versions: list[Path], fresh: list[list[int]]
) -> None:
    (first,) = servers.published()
    used = device_bytes(servers)
    assert a.tokens() == b.tokens() == fresh[0]
    for number, engines in ((1, (a, b)), (2, (b, a))):  # b has mapped what a has published
        for engine in engines:
            assert engine.update(versions[number], weight_version=f"step {number}") == ""
            assert engine.tokens() == fresh[number]
            assert engine.version() == f"step {number}"
    assert servers.published() == [first]
    assert device_bytes(servers) == used
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda engine: engine.update(versions[1]), (a, b))) == ["", ""]
    assert a.tokens() == b.tokens() == fresh[1]
    assert device_bytes(servers) == used


def refuse_versions(engine: Engine, good: Path, tokens: list[int], folder: Path) -> None:
    """What cannot be a version is refused with a reason, and the engine goes on."""
    wrong = {name: folder / name for name in ("gone", "empty", "other-shapes", "no-shard", "no-tensor", "cut-off")}
    wrong["empty"].mkdir()
    make_model(wrong["other-shapes"], seed=0, width=640, layers=3)
    for name in ("no-shard", "no-tensor", "cut-off"):
        shutil.copytree(good, wrong[name])
    last = max(wrong["no-shard"].glob("*.safetensors"))
    tensors = safetensors.torch.load_file(good / last.name)
    tensors.popitem()
    safetensors.torch.save_file(tensors, wrong["no-tensor"] / last.name)
    os.truncate(wrong["cut-off"] / last.name, last.stat().st_size - 4096)
    last.unlink()
    for name, path in wrong.items():
        assert engine.update(path, weight_version="wrong"), name
        assert engine.tokens() == tokens, name
        assert engine.version() != "wrong", name
    assert "pt" in engine.update(good, load_format="pt")
    assert engine.update(good, load_format="auto") == ""
    assert engine.tokens() == tokens


def sleep_and_take_versions(a: Engine, b: Engine, versions: list[Path], fresh: list[list[int]]) -> None:
    """An engine that sleeps wakes on the version that it had, and takes a new one when it is asked to."""
    assert b.tokens() == fresh[1]
    b.post("/release_memory_occupation", tags=["weights"])
    assert "resume" in b.update(versions[2])
    for number in (2, 0):
        assert a.update(versions[number]) == ""
        assert a.tokens() == fresh[number]
    b.post("/resume_memory_occupation", tags=["weights"])
    assert b.tokens() == fresh[1]
    assert b.update(versions[0]) == ""
    assert a.tokens() == b.tokens() == fresh[0]


def fail_while_versions_change(
    servers: Servers[Outcome, Survivor], a: Engine, b: Engine, versions: list[Path], fresh: list[list[int]]
) -> None:
    """The daemon, and then the engine that processes a version, are killed in the middle."""
    used = device_bytes(servers)
    with ThreadPoolExecutor(2) as pool:
        a.armed.touch()
        updating = pool.submit(a.update, versions[1])
        wait_until((a.stops / "loaded").exists, PATIENCE, "the load")
        servers.mount.kill()
        a.armed.unlink()
        (a.stops / "loaded-go").touch()
        failed = updating.result()
        assert a.tokens() == fresh[0 if failed else 1]
        assert b.tokens() == fresh[0]
        assert [engine.update(versions[1]) for engine in (b, a)] == ["", ""]
        assert a.tokens() == b.tokens() == fresh[1]
        assert device_bytes(servers) == used

        for left in ("loaded", "loaded-go"):
            (a.stops / left).unlink()
        a.armed.touch()
        dying = pool.submit(a.update, versions[2])
        wait_until((a.stops / "loaded").exists, PATIENCE, "the load")
        taking = pool.submit(b.update, versions[2])
        os.kill(int((a.stops / "pid").read_text()), signal.SIGKILL)
        assert taking.result() == ""
        assert b.tokens() == fresh[2]
        assert dying.exception() is not None or dying.result()
    wait_until(lambda: device_bytes(servers) == used, PATIENCE, "the end of the lease of the engine that is dead")
    assert len(servers.published()) == 1
