"""gpufs run --caches: where libraries keep what they compile, and whose directory that may be."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from support.cli import fails_here, gpufs
from support.processes import NOBODY

NAMES = {
    "CUDA_CACHE_PATH", "FLASHINFER_WORKSPACE_BASE", "SGLANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
    "VLLM_CACHE_ROOT",
}  # fmt: skip
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def variables(caches: Path, **more: str) -> dict[str, str]:
    """The variables that a program gets."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | more
    done = gpufs("run", "--caches", caches, sys.executable, "-c", SHOW, env=environment)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def folder_of(found: dict[str, str], caches: Path) -> Path:
    """The directory of this machine and of the program's versions."""
    return caches / Path(found["TRITON_CACHE_DIR"]).relative_to(caches).parts[0]


def test_each_library_gets_a_directory(tmp_path: Path) -> None:
    """Below one that only the user can read; where the user has set one, it stays."""
    caches = tmp_path / "new" / "caches"
    found = variables(caches, VLLM_CACHE_ROOT="/elsewhere", TRITON_CACHE_DIR=f"{caches}/mine/triton")
    assert (found["VLLM_CACHE_ROOT"], found["TRITON_CACHE_DIR"]) == ("/elsewhere", f"{caches}/mine/triton")
    found = variables(caches)
    folder = folder_of(found, caches)
    assert len({found[name] for name in NAMES}) == len(NAMES)
    assert all(found[name].startswith(f"{folder}/") for name in NAMES)
    for made in (caches.parent, caches, folder):
        assert made.stat().st_mode & 0o777 == 0o700
    assert folder_of(variables(caches), caches) == folder


def test_other_versions_have_other_directories(tmp_path: Path) -> None:
    """Those of the packages that the program finds."""
    caches = tmp_path / "caches"
    folders = set()
    for version in ("9.8", "9.9"):
        package = tmp_path / version / "vllm-0.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        path = os.pathsep.join([os.fspath(package.parent), os.environ["PYTHONPATH"]])
        folders.add(folder_of(variables(caches, PYTHONPATH=path), caches).name)
    assert all(any(f"vllm-{version}" in name for name in folders) for version in ("9.8", "9.9"))


@pytest.mark.skipif(os.geteuid() != 0, reason="changes owners")
def test_a_directory_that_others_can_change_is_refused(tmp_path: Path) -> None:
    """Or whose name they can exchange: what lies there is run."""
    outer = tmp_path / "outer"
    caches = outer / "caches"
    caches.mkdir(parents=True)

    def refused() -> str:
        return fails_here(1, "run", "--caches", caches, "true")

    gpufs("run", "--caches", caches, "true")
    for mode in (0o720, 0o702, 0o1777):
        caches.chmod(mode)
        assert f"chmod go-w {caches}" in refused()
    caches.chmod(0o755)
    outer.chmod(0o777)
    assert f"chmod go-w {outer}" in refused()
    outer.chmod(0o1777)  # as /tmp
    gpufs("run", "--caches", caches, "true")
    (folder,) = caches.iterdir()
    folder.chmod(0o777)
    assert os.fspath(folder) in refused()
    folder.chmod(0o700)
    for path in (caches, outer):
        os.chown(path, NOBODY, NOBODY)
        assert os.fspath(path) in refused()
        os.chown(path, 0, 0)
    (tmp_path / "file").touch()
    assert "file" in fails_here(2, "run", "--caches", tmp_path / "file", "true")
    fails_here(2, "run", "--caches", "", "true")


def test_caches_go_with_the_model(root: Path) -> None:
    """A directory beside the model: a copy has it, and is used."""
    root.chmod(0o755)
    caches = root / "model" / "caches"
    place = Path(variables(caches)["TRITON_CACHE_DIR"])
    place.mkdir(parents=True)
    (place / "kernel").write_bytes(b"compiled")
    gpufs("cp", "-a", root / "model", root / "copy")
    found = variables(root / "copy" / "caches")
    assert (Path(found["TRITON_CACHE_DIR"]) / "kernel").read_bytes() == b"compiled"


COMPILES = """
import json, time
began = time.monotonic()
import torch
from torch._dynamo.utils import counters
imported = time.monotonic()
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64))]
with torch.no_grad():
    torch.compile(torch.nn.Sequential(*layers))(torch.ones(8, 64))
found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}
print(json.dumps({**found, "import": imported - began, "seconds": time.monotonic() - imported}))
"""


@pytest.mark.slow
def test_a_second_start_compiles_nothing(root: Path, tmp_path: Path) -> None:
    """On a disk and on a mount. The first start does not find what other programs have compiled."""
    root.chmod(0o755)
    for caches in (tmp_path / "caches", root / "caches"):
        starts = []
        for _ in range(2):
            environment = {name: value for name, value in os.environ.items() if name not in NAMES}
            done = gpufs("run", "--caches", caches, sys.executable, "-c", COMPILES, env=environment)
            starts.append(json.loads(done.stdout.splitlines()[-1]))
        print(starts)
        first, second = starts
        assert (first["hit"], first["miss"]) == (0, 1)
        assert (second["hit"], second["miss"]) == (1, 0)
        assert second["seconds"] < first["seconds"]
