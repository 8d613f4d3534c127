"""`gpufs cp hf://`, from a stand-in for the Hugging Face Hub."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli import fails, gpufs, refused
from support.data import assert_same, left, noise
from support.processes import run
from support.stores import PART, Model, WebServer, is_partition, web_server

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


def at(*keys: str | int, value: object) -> Callable[[Any], None]:
    """What changes one place of an answer."""

    def change(answer: Any) -> None:
        for key in keys[:-1]:
            answer = answer[key]
        answer[keys[-1]] = value

    return change


def test_a_hub_that_lies(root: Path, hub: WebServer, tmp_path: Path) -> None:
    """Each field has its form, or nothing is copied: no file of this machine, either. The line names both."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"{}")  # of the size of config.json
    lies: list[tuple[str, Callable[[Any], object]]] = [
        ("blobId", at("siblings", 0, "blobId", value=value))
        for value in (str(secret), f"../../../../../..{secret}", ["x"], None, "", "0" * 40 + "\n")
    ]
    lies += [("sha256", at("siblings", 1, "lfs", "sha256", value=value)) for value in (str(secret), "0" * 40, 7)]
    lies += [("size", at("siblings", 0, "size", value=value)) for value in (-1, 1 << 63, 1.5, "2", None)]
    names = ("../x", "/etc/x", "a/../x", "a//b", ".", "", "a\0b", "a\x1b[31m", None, "n" * 5000)
    lies += [("siblings[0]", at("siblings", 0, "rfilename", value=value)) for value in names]
    lies += [("siblings", at("siblings", 0, "rfilename", value="weights.safetensors"))]
    lies += [("sha", at("sha", value=value)) for value in ("../../x", "main", None, 5)]
    lies += [("siblings", lambda answer: answer.pop("siblings")), ("lastModified", at("lastModified", value="today"))]
    for number, (_, lie) in enumerate(lies):
        hub.models[f"org/model{number}"] = Model(dict(FILES), lfs=("weights.safetensors",), lie=lie)
    texts = (b"[" * 100_000, b'{"sha":' + b"[" * 100_000, b"\xff", b'"\xf5"', b"", b"null", b'{"sha": "\\ud800"}')
    for number, text in enumerate(texts, len(lies)):
        hub.models[f"org/model{number}"] = Model({}, answer=text or b" ")
    count = len(lies) + len(texts)
    program = f"""
import sys
from gpufs.cli import run_command_line
print(*[run_command_line(["cp", "-r", f"hf://org/model{{n}}", {str(root)!r}]) for n in range({count})])
"""
    done = run(sys.executable, "-c", program)
    assert done.stdout.split() == ["1"] * count
    lines = done.stderr.splitlines()
    assert len(lines) == count
    for number, line in enumerate(lines):
        assert line.startswith(f"gpufs cp: hf://org/model{number}: {hub.url} "), line
        assert number >= len(lies) or lies[number][0] in line, line
    assert left(root) == []


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
    # In a process of its own: huggingface_hub reads these variables when it is imported.
    call = f"import gpufs; gpufs.copy('hf://org/model/weights.safetensors', {str(root / 'one')!r})"
    run(sys.executable, "-c", call)
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
    assert "is a directory" in refused("hf://org/model", root)
    assert "org/mo..del" in refused("hf://org/mo..del/file", root)
    assert left(root) == []
