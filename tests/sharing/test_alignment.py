"""Tensors in place are aligned, however long the header before them is and whatever way the file came."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import safetensors.torch
import torch
from support.cli import gpufs as command

import gpufs.torch


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = {"embed": (128, 64), "up": (64, 256), "norm": (128,), "down": (256, 64)}
    return {name: torch.randn(size, generator=generator).bfloat16() for name, size in sizes.items()}


def with_header(path: Path, phase: int) -> None:
    """Write a file whose data begins at this remainder of 256, as a writer with other metadata would."""
    safetensors.torch.save_file(weights(), path, metadata={"format": "pt"})
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length].rstrip(), content[8 + length :]
    header += b" " * ((phase - 8 - len(header)) % 256)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def _in_parts(source: Path, target: Path) -> None:
    content = source.read_bytes()
    with target.open("wb") as file:
        for start in reversed(range(0, len(content), 10_000)):
            os.pwrite(file.fileno(), content[start : start + 10_000], start)


_WAYS: dict[str, Callable[[Path, Path], object]] = {
    "gpufs cp": lambda source, target: command("cp", source, target),
    "cp": lambda source, target: subprocess.run(["cp", source, target], check=True),
    "parts": _in_parts,
}


def test_tensors_are_aligned_with_every_header(root: Path, host: Path) -> None:
    expected = weights()
    for phase, way in zip(range(0, 256, 8), itertools.cycle(_WAYS), strict=False):
        with_header(host / "source", phase)
        file = root / f"{phase}.safetensors"
        _WAYS[way](host / "source", file)
        digest = hashlib.sha256(file.read_bytes()).digest()
        tensors = gpufs.torch.load_file(file)
        assert {name: tensor.data_ptr() % 256 for name, tensor in tensors.items()} == dict.fromkeys(expected, 0)
        assert all(torch.equal(tensors[name].cpu(), expected[name]) for name in expected)
        del tensors
        assert (
            hashlib.sha256(file.read_bytes()).digest()
            == digest
            == hashlib.sha256((host / "source").read_bytes()).digest()
        )


def test_memory_in_use_stays_and_a_warning_says_so(root: Path, host: Path, caplog: pytest.LogCaptureFixture) -> None:
    with_header(host / "source", 8)
    file = root / "held.safetensors"
    command("cp", host / "source", file)
    with gpufs.attach(file, "r+", placement=0):
        held = gpufs.torch.load_file(file)
        assert held["up"].data_ptr() % 16 == 8
        assert torch.equal(held["up"].cpu(), weights()["up"])
        assert [record.levelname for record in caplog.records if str(file) in record.getMessage()] == ["WARNING"]
        del held
    assert gpufs.torch.load_file(file)["up"].data_ptr() % 256 == 0


def test_most_bytes_are_aligned_where_not_all_can_be(root: Path) -> None:
    """A tensor of odd size puts those behind it at odd addresses."""
    first = {"odd": torch.arange(5, dtype=torch.uint8), "large": torch.ones(4096, dtype=torch.uint8)}
    header = json.dumps(
        {
            "odd": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
            "large": {"dtype": "U8", "shape": [4096], "data_offsets": [8, 4104]},
        }
    ).encode()
    content = len(header).to_bytes(8, "little") + header.ljust(-(-len(header) // 8) * 8) + bytes(8) + b"\1" * 4096
    content = (-(-len(header) // 8) * 8).to_bytes(8, "little") + content[8:]
    file = root / "model.safetensors"
    file.write_bytes(content)
    loaded = gpufs.torch.load_file(file)
    assert loaded["large"].data_ptr() % 256 == 0
    assert torch.equal(loaded["large"].cpu(), first["large"])


@pytest.mark.parametrize("form", ["torch.save", "npz", "npy"])
def test_other_formats_are_aligned_too(form: str, root: Path, host: Path) -> None:
    tensor = torch.randn(300, 64)
    source = host / "source"
    if form == "torch.save":
        torch.save({"weight": tensor}, source)
    elif form == "npz":
        with source.open("wb") as file:
            numpy.savez(file, weight=tensor.numpy())
    else:
        with source.open("wb") as file:
            numpy.save(file, tensor.numpy())
    (root / "file").write_bytes(source.read_bytes())
    loaded = gpufs.torch.load(root / "file")
    found = loaded if form == "npy" else loaded["weight"]
    assert found.data_ptr() % 64 == 0
    assert torch.equal(found.cpu(), tensor)
