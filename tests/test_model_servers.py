"""The plug-ins for model servers: vLLM itself on the CPU, and the sources of SGLang's released package.

vLLM is in an environment of its own, which scripts/setup-vllm makes; GPUFS_VLLM_PYTHON names the Python of another one.
SGLang needs a GPU. Here the modules with which the plug-in works are the real ones, in a process of their own, and
everything else that they import is replaced.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.cli import gpufs
from support.data import MIB
from support.mounting import REPOSITORY, GpufsMount, Mounter
from support.processes import NOBODY, PATIENCE
from support.server_sources import download_wheel
from support.vllm_engine import Outcome

SGLANG = "sglang==0.5.23"
CACHE = REPOSITORY / "build" / "servers"
pytestmark = pytest.mark.slow


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


def test_sglang(model: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    sources = download_wheel(SGLANG, CACHE)
    arguments = ast.parse((sources / "sglang/srt/server_args.py").read_text())
    imported = {alias.name for node in ast.walk(arguments) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert "add_load_format_choices" in imported
    assert [point.value for point in entry_points(group="sglang.srt.plugins")] == ["gpufs.integrations.sglang:register"]
    plugins = (sources / "sglang/srt/plugins/__init__.py").read_text()
    assert '"sglang.srt.plugins"' in plugins
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
        """,
        sources,
        model,
    )


VLLM_PYTHON = Path(os.environ.get("GPUFS_VLLM_PYTHON", REPOSITORY / "build" / "vllm-venv" / "bin" / "python"))


class Servers:
    """Engines of vLLM that load one model from a mount, or from a directory of this machine."""

    def __init__(self, mount: GpufsMount, model: Path, scratch: Path) -> None:
        self.mount = mount
        self.model = model
        self.scratch = scratch
        self.log = ""  # of the last engine

    def start(self, *prefix: str, model: Path | None = None, **settings: object) -> Outcome:
        """Runs an engine to its end. prefix: a program that runs it, with its arguments."""
        text = json.dumps({"model": str(model or self.model), **settings})
        environment = {
            **os.environ,
            "HOME": str(self.scratch),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_PLUGINS": "none",  # the program registers the plug-in
        }
        program = REPOSITORY / "tests" / "support" / "vllm_engine.py"
        command = [*prefix, str(VLLM_PYTHON), str(program), text]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        self.log = done.stdout + done.stderr
        return Outcome(**json.loads(done.stdout.splitlines()[-1]))

    def published(self) -> list[Path]:
        """The weights that engines have published."""
        return sorted(self.mount.device.glob("vllm/*"))

    def bytes_read(self) -> int:
        """Bytes of the model's and of published weights that were ever read through the mount."""
        files = [*self.model.glob("*.safetensors"), *self.published()]
        return sum(int(os.getxattr(file, "user.gpufs.bytes_read")) for file in files)


def make_model(folder: Path, seed: int) -> int:
    """Writes a small random model; returns the bytes of its weights."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    module: Any = transformers.Qwen3ForCausalLM(config).bfloat16()
    module.save_pretrained(folder, max_shard_size="20MB")
    return sum(parameter.nbytes for parameter in module.parameters())


@pytest.fixture
def servers(mount: Mounter, tmp_path: Path) -> Servers:
    if not VLLM_PYTHON.exists():
        pytest.skip(f"there is no {VLLM_PYTHON}: scripts/setup-vllm makes it")
    mounted = mount(memory=512 * MIB, allow_other=True)
    model = mounted.device / "Tiny-Qwen3"
    make_model(tmp_path / "model", seed=0)
    shutil.copytree(tmp_path / "model", model)
    return Servers(mounted, model, tmp_path)


def test_vllm_engines_share_weights(servers: Servers) -> None:
    """The first start publishes, later ones and those beside it map: nothing is read, and no memory is private."""
    weights = sum(file.stat().st_size for file in servers.model.glob("*.safetensors"))
    default = servers.start(load_format="auto")
    first = servers.start()
    (published,) = servers.published()
    assert published.stat().st_size == pytest.approx(weights, rel=0.02)
    assert published.name in gpufs("ls", published.parent).stdout
    read = servers.bytes_read()
    second = servers.start()
    assert servers.bytes_read() == read
    assert first.tokens == second.tokens == default.tokens
    for engine in (first, second):
        assert engine.private_bytes < default.private_bytes - 0.9 * weights
    assert second.external_bytes == published.stat().st_size

    published.unlink()
    assert not servers.published()
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: servers.start(), range(2)))
    assert [engine.tokens for engine in both] == [default.tokens] * 2
    assert servers.published() == [published]


def test_vllm_keeps_weights_apart(servers: Servers) -> None:
    """Models with equal headers have weights of their own, also under the other's name; damaged ones are replaced."""
    make_model(servers.scratch / "other", seed=1)
    other = servers.scratch / "other"  # on the machine's disk: only its processed weights are on the mount
    mount = {"mount": str(servers.mount.path)}
    expected = servers.start(load_format="auto").tokens, servers.start(load_format="auto", model=other).tokens
    assert expected[0] != expected[1]
    assert (servers.start().tokens, servers.start(model=other, extra=mount).tokens) == expected
    first, second = servers.published()
    os.replace(first, second)
    assert servers.start(model=other, extra=mount).tokens == expected[1]
    assert servers.published() == [second]

    for damage in ("contents", "size", "header"):
        with open(second, "r+b") as file:
            if damage == "size":
                file.truncate(MIB)
            else:
                file.seek(100 if damage == "header" else 20 * MIB)
                file.write(b"damaged")
        assert servers.start(model=other, extra=mount).tokens == expected[1], damage
        assert second.stat().st_size > 20 * MIB, damage
        read = servers.bytes_read()
        assert servers.start(model=other, extra=mount).tokens == expected[1], damage
        assert servers.bytes_read() == read, damage


def test_vllm_copies_where_weights_cannot_be_shared(servers: Servers) -> None:
    """With oneDNN vLLM moves weights out of the parameters; with share=false nothing is published."""
    expected = servers.start(load_format="auto", onednn=True).tokens
    found = servers.start(onednn=True)
    assert (found.tokens, found.external_bytes) == (expected, 0)
    assert not servers.published()
    took = float(servers.log.partition("Loading weights took ")[2].split()[0])
    assert took < PATIENCE
    found = servers.start(extra={"share": False})
    assert (found.tokens, found.external_bytes) == (expected, 0)
    assert not servers.published()
    servers.mount.device.joinpath("full").write_bytes(bytes(455 * MIB))
    assert servers.start().tokens == expected  # no memory to publish
    assert not servers.published()


def test_vllm_refuses_to_change_shared_weights(servers: Servers) -> None:
    found = servers.start(attempts=("sleep", "reload"))
    for text in found.errors:
        assert '"share": false' in text


def test_vllm_uses_weights_of_trusted_users(servers: Servers) -> None:
    """Root's weights serve all users; those of another user only engines that trust it."""
    servers.scratch.chmod(0o777)
    expected = servers.start().tokens
    (published,) = servers.published()
    read = servers.bytes_read()
    # The capability to read: the Python here may be closed to other users.
    capability = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    nobody = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *capability)
    assert servers.start(*nobody).tokens == expected
    assert servers.bytes_read() == read
    published.unlink()
    assert servers.start(*nobody).tokens == expected  # root's directory is closed to it
    assert not servers.published()
    assert servers.start().tokens == expected
    os.chown(published, NOBODY, NOBODY)
    assert servers.start(extra={"trust": ["nobody"]}).tokens == expected
    assert published.stat().st_uid == NOBODY
    assert servers.start().tokens == expected
    assert published.stat().st_uid == 0  # replaced
