"""Checkpoints, files of other formats and files without a header: loaders, `gpufs inspect` and `gpufs diff`."""

from __future__ import annotations

import gzip
import json
import mmap
import os
import pickle
import re
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from support.cli import fails_here, gpufs_here, inspected
from support.data import MIB
from support.mounting import GPUFS
from support.processes import run

import gpufs.torch as in_place
from gpufs import register
from gpufs.torch import FormatError


def write_checkpoint(directory: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> Path:
    """The tensors in several files and their index."""
    directory.mkdir()
    places = {name: f"model-{number % shards}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        part = {name: tensor for name, tensor in tensors.items() if places[name] == file}
        safetensors.torch.save_file(part, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


def compared(code: int, *words: str | Path) -> dict[str, dict[str, Any]]:
    done = gpufs_here("diff", "--json", *words, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    return {one.pop("name"): one for one in json.loads(done.stdout)["tensors"]}


# Checkpoints


def test_a_checkpoint_is_one_thing_however_it_is_cut(root: Path, host: Path) -> None:
    tensors = {f"layer.{number}": torch.full((4, 3), float(number)) for number in range(7)}
    one, other = write_checkpoint(root / "one", tensors, 2), write_checkpoint(host / "other", tensors, 3)
    safetensors.torch.save_file(tensors, host / "whole.safetensors")
    for name in (one, one / "model.safetensors.index.json"):
        found = inspected("--stats", name)
        assert {tensor["name"]: tensor["stats"]["max"] for tensor in found["tensors"]} == {
            name: float(tensor.max()) for name, tensor in tensors.items()
        }
        assert (len(found["files"]), found["place"], found["format"]) == (2, "gpu0", "safetensors")
    assert compared(0, one, other) == compared(0, one, host / "whole.safetensors") == {}
    changed = {**tensors, "layer.3": torch.zeros(4, 3), "more": torch.ones(1)}
    differences = compared(1, one, write_checkpoint(root / "changed", changed, 4))
    assert {name: found["difference"] for name, found in differences.items()} == {
        "layer.3": "elements",
        "more": "missing",
    }
    assert "layer.6" in gpufs_here("inspect", one, host / "whole.safetensors").stdout
    assert [found["path"] for found in inspected(one, other)] == [str(one), str(other)]


def test_checkpoints_that_are_not_whole(root: Path, host: Path) -> None:
    tensors = {"a": torch.ones(1), "b": torch.ones(2)}
    lost = write_checkpoint(root / "lost", tensors, 2)
    (lost / "model-1.safetensors").unlink()
    assert "model-1.safetensors" in fails_here(1, "inspect", lost)
    wrong = write_checkpoint(root / "wrong", tensors, 2)
    safetensors.torch.save_file({"c": torch.ones(2)}, wrong / "model-1.safetensors")
    assert "'b'" in fails_here(1, "inspect", wrong)
    os.mkfifo(host / "model.safetensors.index.json")
    assert fails_here(1, "inspect", host)
    assert fails_here(2, "diff", wrong, host)


@pytest.mark.parametrize("target", ["nowhere", "/etc/passwd"])
def test_a_link_without_its_file(root: Path, target: str) -> None:
    (root / "model.safetensors").symlink_to(target)
    for load, path in ((in_place.load_file, root), (in_place.load, root / "model.safetensors")):
        with pytest.raises(OSError, match=rf"symbolic link to {target}.* cp -rL") as caught:
            load(path)
        assert caught.value.filename == str(root / "model.safetensors")
    assert target == "/etc/passwd" or target in fails_here(1, "inspect", root)


def test_a_directory_without_the_usual_names(root: Path) -> None:
    (root / "adapter.safetensors").touch()
    with pytest.raises(FileNotFoundError, match=r"adapter\.safetensors"):
        in_place.load_file(root)
    assert "adapter.safetensors" in fails_here(1, "inspect", root)


# Files of other formats


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        tar.add(__file__)


def write_npz(path: Path) -> None:
    with path.open("wb") as file:
        numpy.savez(file, a=numpy.ones(3))


OTHER_FORMATS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "torch.save": ("torch.load", lambda path: torch.save({"a": torch.ones(3)}, path)),
    "old torch.save": ("torch.load", lambda path: torch.save({}, path, _use_new_zipfile_serialization=False)),
    "pickle": ("pickle.load", lambda path: path.write_bytes(pickle.dumps({"a": 1}))),
    "npz": ("numpy.load", write_npz),
    "GGUF": ("GGUFReader", lambda path: path.write_bytes(b"GGUF\3\0\0\0" + bytes(64))),
    "HDF5": ("h5py", lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))),
    "Parquet": ("pyarrow", lambda path: path.write_bytes(b"PAR1" + bytes(64))),
    "gzip": ("unpack", lambda path: path.write_bytes(gzip.compress(bytes(MIB)))),
    "tar": ("unpack", write_tar),
    "LFS": ("git lfs", lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid 0\nsize 9\n")),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_a_file_of_another_format_is_named(root: Path, name: str) -> None:
    remedy, write = OTHER_FORMATS[name]
    for path in (root / "file", root / "file.safetensors"):
        write(path)
        with pytest.raises(FormatError, match=f"{name}.*{remedy}"):
            in_place.load_file(path)
    assert re.search(f"{name}.*{remedy}", fails_here(1, "inspect", root / "file.safetensors"))
    found = inspected(root / "file")
    if "tensors" in found:  # test_other_formats.py looks at these
        return
    assert name in found["format"]
    assert re.search(f"{name}.*{remedy}", gpufs_here("inspect", root / "file").stdout)
    assert remedy in gpufs_here("inspect", "--stats", root / "file", check=False).stderr


# Files without a header


def test_registered_arrays_have_a_type(root: Path) -> None:
    file = os.memfd_create("array")
    os.ftruncate(file, 4 * MIB)
    with mmap.mmap(file, 4 * MIB) as memory:
        os.close(file)
        array = numpy.frombuffer(memory, numpy.float32).reshape(1024, 1024)
        array[3, 4], array[5, 6] = numpy.nan, -2
        half = torch.from_numpy(array).view(torch.bfloat16)
        with register(array, root / "live"), register(half, root / "half"):
            assert "float32 1024x1024" in gpufs_here("inspect", root / "live").stdout
            (found,) = inspected("--stats", root / "live")["tensors"]
            assert (found["dtype"], found["shape"]) == ("float32", [1024, 1024])
            assert (found["stats"]["nan"], found["stats"]["min"], found["stats"]["max"]) == (1, -2, 0)
            (found,) = inspected("--stats", root / "half")["tensors"]
            assert (found["dtype"], found["shape"]) == ("bfloat16", [1024, 2048])
            numpy.save(root / "before.npy", array)
            assert compared(0, root / "live", root / "before.npy") == {}
            array[0, 1] = 7
            (found,) = compared(1, root / "live", root / "before.npy").values()
            assert (found["differing"], found["first"], found["max_abs_difference"]) == (1, [0, 1], 7)
        del array, half


def test_types_that_a_user_gives(root: Path) -> None:
    numpy.arange(12, dtype="<i4").tofile(root / "raw")
    (found,) = inspected("--stats", "--dtype", "int32", "--shape", "3x4", root / "raw")["tensors"]
    assert (found["shape"], found["stats"]["max"]) == ([3, 4], 11)
    assert inspected("--dtype", "bfloat16", root / "raw")["tensors"][0]["shape"] == [24]
    assert compared(0, "--dtype", "int32", root / "raw", root / "raw") == {}
    assert "48" in fails_here(1, "inspect", "--dtype", "int32", "--shape", "5", root / "raw")
    for words in (["--dtype", "nothing"], ["--shape", "3x4"], ["--dtype", "int8", "--shape", "3;4"], ["--dtype", "O"]):
        assert fails_here(2, "inspect", *words, root / "raw")
    assert "--dtype" in gpufs_here("inspect", "--stats", root / "raw", check=False).stderr
    os.setxattr(root / "raw", "user.tensor", b"float32 5x5")  # which does not fit
    assert inspected(root / "raw")["format"] is None


# Files that others made to harm


def test_large_headers_take_no_memory(root: Path) -> None:
    """Each would take gigabytes or minutes, by a reader that trusts it."""
    with (root / "long.npy").open("wb") as file:
        file.write(b"\x93NUMPY\x02\0" + (3 << 29).to_bytes(4, "little"))
        file.truncate(2 << 30)
    twice = ",".join(f'"{number}":0' for number in (*range(60_000), 59_999)).encode()
    header = b"{" + twice + b"}"
    (root / "twice.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    limit = 'ulimit -v 1500000 -t 10; exec "$@"'
    for name in ("long.npy", "twice.safetensors"):
        done = run("sh", "-c", limit, "sh", GPUFS[0], "inspect", root / name, check=False)
        assert done.returncode == 1, done.stderr
        assert name in done.stderr


def test_holes_are_not_read(root: Path, host: Path) -> None:
    """2 TiB, of which one element is not 0."""
    count = 1 << 39
    fields = {"a": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}
    header = json.dumps(fields).encode()
    for name, value in (("one", 2.0), ("other", 3.0)):
        with (host / name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + 4 * count)
            file.seek(8 + len(header) + 4 * (count // 2))
            file.write(numpy.float32(value).tobytes())
    (found,) = inspected("--stats", host / "one")["tensors"]
    assert (found["stats"]["min"], found["stats"]["max"]) == (0, 2)
    assert found["stats"]["mean"] == pytest.approx(2 / count)
    assert compared(1, host / "one", host / "other")["a"]["differing"] == 1
