"""`gpufs cp hf://`, from a stand-in for the Hugging Face Hub."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import fails, gpufs, refused
from support.data import assert_same, left, noise
from support.processes import run
from support.stores import PART, Model, WebServer, is_partition, web_server

import gpufs as package

WEIGHTS = noise(2 * PART + 5)
FILES = {"config.json": b"{}", "weights.safetensors": WEIGHTS, "deep/a b.txt": b"text"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A Hub with the model org/model."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with web_server() as server:
        server.models["org/model"] = Model(dict(FILES), lfs=("weights.safetensors",))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        yield server


def test_a_model(root: Path, hub: WebServer) -> None:
    """All files, with the SHA-256 of the large ones and Git's checksum of the others."""
    gpufs("cp", "-r", "--verify", "hf://org/model", root)
    for path, data in FILES.items():
        assert_same((root / "model" / path).read_bytes(), data)
    assert is_partition(hub.requested("/blobs/org/model/weights.safetensors"), len(WEIGHTS))


def test_the_cache_comes_first(root: Path, hub: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What huggingface_hub has loaded is not loaded again, and is all that is needed without a network."""
    with web_server() as hub.redirects_to:
        program = "from huggingface_hub import hf_hub_download\n"
        program += "for name in ('weights.safetensors', 'config.json'): hf_hub_download('org/model', name)"
        run(sys.executable, "-c", program)
    hub.redirects_to = None
    hub.requests.clear()
    summary = json.loads(gpufs("cp", "-rT", "--json", "hf://org/model", root / "model").stdout)
    assert {copy["method"] for copy in summary["copies"]} >= {"transfer", "remote"}
    assert not hub.requested("/blobs/org/model/weights.safetensors")
    for path, data in FILES.items():
        assert_same((root / "model" / path).read_bytes(), data)
    hub.models["org/model"].files["config.json"] = b"{1}"
    gpufs("cp", "hf://org/model/config.json", root)
    assert (root / "config.json").read_bytes() == b"{1}"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    gpufs("cp", "-r", "hf://org/model", root / "offline")
    assert left(root / "offline") == ["config.json", "weights.safetensors"]
    assert_same((root / "offline/weights.safetensors").read_bytes(), WEIGHTS)
    package.copy("hf://org/model/weights.safetensors", root / "one")
    assert_same((root / "one").read_bytes(), WEIGHTS)
    assert "HF_HUB_OFFLINE" in refused("hf://org/other/config.json", root)


def test_a_dataset(root: Path, hub: WebServer) -> None:
    hub.models["datasets/org/data"] = Model({"train/a.bin": noise(5), "README.md": b"data"})
    gpufs("cp", "-r", "hf://datasets/org/data", root)
    assert_same((root / "data" / "train" / "a.bin").read_bytes(), noise(5))
    gpufs("cp", "hf://datasets/org/data@main/README.md", root)
    assert left(root) == ["README.md", "data"]
    assert "dataset org/none does not exist" in refused("hf://datasets/org/none", root)
    assert "names buckets" in fails(2, "cp", "hf://buckets/org/data/x", root)


def test_files_of_a_revision(root: Path, hub: WebServer) -> None:
    hub.models["org/model"].revision = "v1/x"
    gpufs("cp", "hf://org/model@v1%2Fx/deep/a b.txt", root)
    gpufs("cp", "hf://org/model@v1%2Fx/*.json", root)
    gpufs("cp", "-r", "hf://org/model@v1%2Fx/deep", root / "new")
    assert (left(root), left(root / "new")) == (["a b.txt", "config.json", "new"], ["a b.txt"])
    assert "the revision v2 does not exist" in refused("hf://org/model@v2/config.json", root)


@pytest.mark.parametrize(("file", "kind"), [("weights.safetensors", "SHA-256"), ("config.json", "Git object")])
def test_a_copy_that_differs(root: Path, hub: WebServer, file: str, kind: str) -> None:
    """Such a copy is not kept, and the name's old content stays."""
    hub.models["org/model"].wrong = (file,)
    (root / file).write_bytes(b"old")
    assert f"the copy differs: the store's {kind}" in refused("--verify", "--partial", f"hf://org/model/{file}", root)
    assert left(root) == [file]
    assert (root / file).read_bytes() == b"old"


def test_models_with_conditions(root: Path, hub: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.models["org/model"].token = "hf_right"
    assert "accept the model's conditions" in refused("hf://org/model/config.json", root)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "HF_TOKEN" in refused("hf://org/model/config.json", root)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    with web_server() as other:
        hub.redirects_to = other
        gpufs("cp", "hf://org/model/config.json", root)
        assert other.requests
        assert other.authorizations == []  # the token is for the Hub alone
    assert "Bearer hf_right" in hub.authorizations
    assert (root / "config.json").read_bytes() == b"{}"


def test_what_does_not_exist(root: Path, hub: WebServer) -> None:
    assert "the model org/none does not exist" in refused("hf://org/none/file", root)
    assert "the file or directory does not exist" in refused("hf://org/model/none", root)
    assert "is a directory (-r copies it)" in refused("hf://org/model", root)
    assert "org/mo..del" in refused("hf://org/mo..del/file", root)
    assert left(root) == []
