"""The plug-ins in servers that have other names, or lack them: nobody who does not use gpufs may notice them."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from support.processes import PATIENCE

# As the servers do: without a try.
REGISTER = """
from importlib.metadata import entry_points
for point in entry_points(group={group!r}):
    if point.name == "gpufs":
        point.load()()
print("the server goes on")
"""
LOADERS = "def register_model_loader(name): return lambda loader: loader"
SERVERS = {
    "vllm": ("vllm.general_plugins", ["vllm/__init__.py"]),
    "vllm with a loader": (
        "vllm.general_plugins",
        ["vllm/__init__.py", "vllm/model_executor/__init__.py", "vllm/model_executor/model_loader/__init__.py"],
    ),
    "sglang": ("sglang.srt.plugins", ["sglang/__init__.py"]),
}


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_with_other_names_starts(tmp_path: Path, server: str) -> None:
    group, modules = SERVERS[server]
    assert "gpufs" in {point.name for point in entry_points(group=group)}
    for module in modules:
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module).write_text(LOADERS if "loader" in module else "")
    command = [sys.executable, "-c", REGISTER.format(group=group)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=10 * PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (0, "the server goes on\n"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("gpufs")
