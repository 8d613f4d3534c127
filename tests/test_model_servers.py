"""The plug-ins for model servers, against the sources of the servers' released packages.

The servers need a GPU and hundreds of packages. Here the modules with which the plug-ins work are the real ones, each
in a process of its own, and everything else that they import is replaced.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.mounting import REPOSITORY
from support.processes import PATIENCE
from support.server_sources import download_wheel

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
