"""`gpufs inspect` and `gpufs diff`, judged by safetensors, torch, numpy and sha256sum."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from support.cli import fails_here, gpufs_here, inspected
from support.data import MIB, noise
from support.mounting import GPUFS, REPOSITORY, GpufsMount
from support.processes import run

import gpufs as package

PAGE = REPOSITORY / "docs" / "howto" / "inspect-files.md"
FLOATS = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64)


def compared(code: int, *words: str | Path) -> dict[str, Any]:
    done = gpufs_here("diff", "--json", *words, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def every_bit_pattern(dtype: torch.dtype) -> torch.Tensor:
    """Each code of a small type; of larger types a sample with NaN and infinities, if it has them."""
    size = 3 * MIB + 8 * 5 if dtype is torch.bfloat16 else MIB // 4  # of one, more than a block
    codes = numpy.random.default_rng(1).integers(0, 256, size, numpy.uint8)
    codes[: 1 << 17] = numpy.arange(1 << 16, dtype="<u2").view(numpy.uint8)
    return torch.from_numpy(codes).view(dtype)


def test_tensors_are_those_that_safetensors_wrote(root: Path) -> None:
    tensors = {
        "weight": torch.zeros(3, 5, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
    }
    safetensors.torch.save_file(tensors, root / "file", metadata={"format": "pt"})
    found = inspected(root / "file")
    assert (found["format"], found["metadata"], found["place"]) == ("safetensors", {"format": "pt"}, "gpu0")
    assert found["size_bytes"] == (root / "file").stat().st_size
    content = (root / "file").read_bytes()
    assert {one["name"]: tuple(one["shape"]) for one in found["tensors"]} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    for one in found["tensors"]:
        raw = content[one["offset"] : one["offset"] + one["bytes"]]
        assert raw == tensors[one["name"]].reshape(-1).view(torch.uint8).numpy().tobytes()


def test_statistics_are_those_of_torch(root: Path) -> None:
    tensors = {str(dtype): every_bit_pattern(dtype) for dtype in (*FLOATS, *INTEGERS)}
    safetensors.torch.save_file(tensors, root / "file.safetensors")
    for one in inspected(root / "file.safetensors", "--stats")["tensors"]:
        values = tensors[one["name"]].to(torch.float64)
        finite = values[values.isfinite()]
        low, high = float(finite.min()), float(finite.max())
        found = one["stats"]
        assert (found["nan"], found["inf"]) == (int(values.isnan().sum()), int(values.isinf().sum())), one
        assert (float(found["min"]), float(found["max"])) == (low, high), one
        if high < 1e300:  # else the sum of float64 overflows
            assert found["mean"] == pytest.approx(float(finite.mean()), rel=1e-9, abs=high * 1e-9), one


def test_the_first_nan_has_its_index(root: Path) -> None:
    """Also behind the first block, in columns, and in types of less than a byte's size."""
    large = torch.zeros(3, 700_001)
    large[2, 5] = large[2, 7] = float("nan")
    tensors = {"large": large, "good": torch.ones(3), "none": torch.zeros(0), "whole": torch.ones(2, dtype=torch.int8)}
    tensors["small"] = torch.tensor([1.0, float("nan")], dtype=torch.bfloat16)
    safetensors.torch.save_file(tensors, root / "file.safetensors")
    found = inspected(root / "file.safetensors", "--nan")["tensors"]
    assert {one["name"]: (one["stats"]["nan"], one["stats"]["first_nan"]) for one in found} == {
        "large": (2, [2, 5]),
        "small": (1, [1]),
    }
    lines = gpufs_here("inspect", "--nan", root / "file.safetensors").stdout.splitlines()
    assert [line.split(maxsplit=1)[0] for line in lines[2:]] == ["large", "small"]
    columns = numpy.zeros((3, 4), numpy.float32, "F")
    columns[1, 2] = numpy.nan
    numpy.save(root / "columns.npy", columns)
    numpy.save(root / "scalar.npy", numpy.float64("nan"))
    for name, index in (("columns", [1, 2]), ("scalar", [])):
        (one,) = inspected(root / f"{name}.npy", "--nan")["tensors"]
        assert one["stats"]["first_nan"] == index
    numpy.save(root / "good.npy", numpy.zeros(3))
    assert not inspected(root / "good.npy", "--nan")["tensors"]
    assert len(gpufs_here("inspect", "--nan", root / "good.npy").stdout.splitlines()) == 1


def test_formats_are_compared_by_names_and_types(root: Path) -> None:
    model: Any = torch.nn.ModuleList([torch.nn.Linear(3, 4, dtype=dtype) for dtype in FLOATS[:4]]).share_memory()
    state = model.state_dict()
    safetensors.torch.save_file(state, root / "a.safetensors")
    torch.save(state, root / "b.pt")
    numpy.savez(root / "c.npz", **{name: tensor.numpy() for name, tensor in state.items() if not name.startswith("1")})
    with package.register(model, root / "live"):
        for pair in itertools.permutations(["a.safetensors", "b.pt", "live"], 2):
            assert compared(0, *(root / name for name in pair))["counts"]["equal"] == 8
        assert gpufs_here("diff", root / "live", root / "b.pt").stdout == ""
        with torch.no_grad():
            model[3].weight[2, 1] += 1
        (found,) = compared(1, root / "live", root / "a.safetensors")["tensors"]
        assert (found["name"], found["differing"], found["first"]) == ("3.weight", 1, [2, 1])
    found = compared(1, root / "a.safetensors", root / "c.npz")
    assert (found["counts"], {one["in"] for one in found["tensors"]}) == ({"a": 8, "b": 6, "equal": 6}, {"A"})
    numpy.save(root / "array.npy", state["0.bias"].numpy())
    assert fails_here(2, "diff", root / "array.npy", root / "a.safetensors")


def test_a_registered_module_is_one_table(root: Path) -> None:
    model: Any = torch.nn.ModuleList([torch.nn.BatchNorm1d(3) for _ in range(12)]).share_memory()
    with torch.no_grad():
        model[10].bias[1] = float("nan")
    with package.register(model, root / "live"):
        (root / "live" / "other").write_bytes(b"of another program")
        found = inspected(root / "live")
        assert (found["format"], found["registered"], len(found["tensors"])) == ("registered", True, 60)
        named = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        assert {one["name"]: one["shape"] for one in found["tensors"]} == named
        lines = gpufs_here("inspect", root / "live").stdout.splitlines()
        numbers = [int(line.partition(".")[0]) for line in lines[2:]]
        assert numbers == sorted(numbers)
        (one,) = inspected(root / "live", "--nan")["tensors"]
        assert (one["name"], one["stats"]["first_nan"]) == ("10.bias", [1])
    assert "model.safetensors" in fails_here(1, "inspect", root / "live")


def test_numpy_arrays(root: Path) -> None:
    array = numpy.asfortranarray(numpy.arange(6, dtype=">f4").reshape(2, 3))
    numpy.save(root / "array.npy", array)
    (found,) = inspected(root / "array.npy", "--stats")["tensors"]
    assert (found["shape"], found["fortran_order"], found["bytes"]) == ([2, 3], True, 24)
    assert (found["stats"]["min"], found["stats"]["max"], found["stats"]["mean"]) == (0, 5, 2.5)
    numpy.save(root / "records.npy", numpy.zeros(4, [("a", "<i4"), ("b", "<f8")]))
    (found,) = inspected(root / "records.npy", "--stats")["tensors"]
    assert (found["bytes"], found["stats"]) == (48, None)
    done = gpufs_here("diff", root / "records.npy", root / "records.npy")
    assert done.stdout == ""


@pytest.mark.parametrize("size", [0, 1, 20 * MIB + 3])
def test_the_checksum_is_that_of_sha256sum(root: Path, host: Path, size: int) -> None:
    for place in (root, host):
        path = place / ("file" if size else "new\nli\\ne")
        path.write_bytes(noise(size))
        assert gpufs_here("inspect", "--checksum", path).stdout == run("sha256sum", path).stdout


def test_other_files_are_shown_with_their_size_and_first_bytes(root: Path) -> None:
    (root / "file").write_bytes(b"some words\n")
    printed = gpufs_here("inspect", root / "file").stdout
    assert "11 B" in printed
    assert "some words" in printed
    assert inspected(root / "file")["format"] is None
    assert "cmp" in fails_here(2, "diff", root / "file", root / "file")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.safetensors", b"\x08\0\0"),
        ("long.safetensors", (1 << 40).to_bytes(8, "little") + b"{}"),
        ("gap.safetensors", b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'),
        ("not.npy", b"text"),
        ("short.npy", b"\x93NUMPY\x01\0\x40\0" + b"{'descr': '<f8', 'fortran_order': False, 'shape': (9,)}".ljust(64)),
        ("nonsense.npy", b"\x93NUMPY\x01\0\x04\0((((data"),
    ],
)  # fmt: skip
def test_damaged_headers_are_reported_with_their_figures(root: Path, name: str, content: bytes) -> None:
    if name == "gap.safetensors":
        content = len(content).to_bytes(8, "little") + content
    (root / name).write_bytes(content)
    text = fails_here(1, "inspect", root / name)
    assert name in text
    assert re.search(r"\d", text.replace(str(root / name), ""))
    assert fails_here(2, "diff", root / name, root / name)


def test_a_header_that_would_fill_the_memory(root: Path) -> None:
    header = b'{"a":[' + b"[]," * 5_000_000 + b"[]]}"
    (root / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "MiB of memory" in fails_here(1, "inspect", root / "model.safetensors")


def test_differences_of_tensors(root: Path, host: Path) -> None:
    ours = {name: torch.arange(1000, dtype=torch.float32) for name in ("same", "other", "kind", "gone")}
    theirs = {name: tensor.clone() for name, tensor in ours.items() if name != "gone"}
    theirs["other"][3] += 0.5
    theirs["other"][500] -= 2
    theirs["kind"] = theirs["kind"].half()
    theirs["new"] = torch.zeros(2)
    safetensors.torch.save_file(ours, root / "a")
    safetensors.torch.save_file(theirs, host / "b", metadata={"a": "b"})
    found = {one.pop("name"): one for one in compared(1, root / "a", host / "b")["tensors"]}
    assert set(found) == {"other", "kind", "gone", "new"}
    assert (found["other"]["differing"], found["other"]["first"], found["other"]["max_abs_difference"]) == (2, [3], 2.0)
    assert found["gone"] == {"difference": "missing", "in": "A"}
    lines = gpufs_here("diff", root / "a", host / "b", check=False).stdout.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["gone", "kind", "other", "new"]
    assert lines[0] == "tensors: 4 in A, 4 in B: 1 equal, 2 different, 1 only in A, 1 only in B"
    listed = gpufs_here("diff", "-v", root / "a", host / "b", check=False).stdout.splitlines()
    assert {line.split()[0] for line in listed[2:]} == {"same", *found}
    assert found["new"] == {"difference": "missing", "in": "B"}
    assert (found["kind"]["a"]["dtype"], found["kind"]["b"]["dtype"]) == ("F32", "F16")


@pytest.mark.parametrize(
    ("dtype", "ours", "theirs", "largest"),
    [
        (torch.int64, -(2**63), 2**63 - 1, 2**64 - 1),
        (torch.uint8, 255, 0, 255),
        (torch.bool, True, False, 1),
        (torch.float16, 65504.0, -65504.0, 131008.0),
        (torch.float32, float("nan"), 1.0, None),
        (torch.float32, float("inf"), float("-inf"), None),
        (torch.float32, 0.0, -0.0, 0),
    ],
)
def test_the_largest_difference(root: Path, dtype: torch.dtype, ours: Any, theirs: Any, largest: Any) -> None:
    for name, value in (("a", ours), ("b", theirs)):
        tensor = torch.zeros(5, dtype=dtype)
        tensor[4] = value
        safetensors.torch.save_file({"one": tensor}, root / name)
    (found,) = compared(1, root / "a", root / "b")["tensors"]
    assert (found["differing"], found["first"], found["max_abs_difference"]) == (1, [4], largest)
    assert compared(0, root / "a", root / "a")["equal"]


def test_equal_tensors_in_another_order_are_equal(root: Path) -> None:
    one = torch.arange(4, dtype=torch.int8)
    for name, tensors in (("a", [b"\0\1\2\3" + b"\0\0\xc0\x7f" * 2]), ("b", [b"\0\0\xc0\x7f" * 2 + b"\0\1\2\3"])):
        places = {"one": (0, 4), "other": (4, 12)} if name == "a" else {"other": (0, 8), "one": (8, 12)}
        kinds = {"one": ("I8", [4]), "other": ("F32", [2])}
        fields = {
            key: {"dtype": kinds[key][0], "shape": kinds[key][1], "data_offsets": list(place)}
            for key, place in places.items()
        }
        text = json.dumps(fields).encode()
        (root / name).write_bytes(len(text).to_bytes(8, "little") + text + tensors[0])
    loaded = safetensors.torch.load_file(root / "b")
    assert torch.equal(loaded["one"], one)
    assert loaded["other"].isnan().all()
    assert compared(0, root / "a", root / "b")["tensors"] == []


def test_what_cannot_be_read(root: Path) -> None:
    os.mkfifo(root / "fifo")
    for name in ("missing", "fifo", "."):
        assert fails_here(1, "inspect", root / name)
        assert fails_here(2, "diff", root / name, root / name)


def test_an_output_that_fails_is_no_difference(root: Path) -> None:
    for name in ("a", "b"):
        safetensors.torch.save_file({name: torch.zeros(1)}, root / name)
    assert run("sh", "-c", f"{GPUFS[0]} diff {root}/a {root}/b >/dev/full", check=False).returncode == 2


def test_the_howto(shared_mount: GpufsMount, host: Path) -> None:
    """Runs the page's commands in order, and compares what they print with what the page shows."""
    mnt = str(shared_mount.path)
    environment = {**os.environ, "PATH": f"{Path(GPUFS[0]).parent}:{os.environ['PATH']}"}
    shown: list[tuple[str, list[str]]] = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("    $ "):
            shown.append((line[6:], []))
        elif line.startswith("    ") and shown:
            shown[-1][1].append(line[4:])
    assert len(shown) > 5
    weight = torch.arange(12.0).reshape(3, 4).bfloat16()
    model = {"weight": weight, "bias": torch.tensor([0.5, float("nan"), -2.0])}
    safetensors.torch.save_file(model, host / "model.safetensors", metadata={"format": "pt"})
    weight[2, 1] = 100
    safetensors.torch.save_file({"weight": weight, "steps": torch.tensor([7])}, host / "tuned.safetensors")
    try:
        for command, output in shown:
            done = run("sh", "-c", command.replace("/mnt/gpufs", mnt), cwd=host, env=environment, check=False)
            text = (done.stdout + done.stderr).replace(mnt, "/mnt/gpufs").splitlines()
            assert [" ".join(line.split()) for line in text] == [" ".join(line.split()) for line in output], command
    finally:
        for path in shared_mount.device.glob("*.safetensors"):
            path.unlink()
