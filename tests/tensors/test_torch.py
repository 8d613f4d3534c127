"""gpufs.torch: safetensors files of a mount as tensors in place, judged by safetensors itself."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping
from errno import ENOSPC, EOPNOTSUPP, EPERM, EXDEV
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cli import gpufs as gpufs_command
from support.data import MIB, noise
from support.mounting import GpufsMount, Mounter
from support.processes import NOBODY, PATIENCE, Snapshot, errno_of, wait_until

import gpufs.torch
from gpufs.torch import FormatError

DTYPES = {
    "BOOL": 8, "F4": 4, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64,
    "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


def raw(header: str | bytes | object, data: bytes = b"", length: int | None = None) -> bytes:
    """The bytes of a file, right or wrong."""
    text = header if isinstance(header, bytes) else header.encode() if isinstance(header, str) else b""
    if not text and not isinstance(header, (str, bytes)):
        text = json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def padded(header: object) -> bytes:
    """The first bytes of a file whose data begins at a multiple of 16."""
    text = json.dumps(header).encode()
    return raw(text + b" " * (-(8 + len(text)) % 16))


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in all bits, which torch.equal does not say of NaN and of small dtypes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(x.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) for x in (one, other)))


def same_tensors(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)


def used_bytes(directory: Path) -> int:
    numbers = os.statvfs(directory)
    return (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize


def wait_for_used(directory: Path, expected: int) -> None:
    """Memory of removed files is released shortly after the last call."""
    gc.collect()
    wait_until(lambda: used_bytes(directory) <= expected, 10, f"{expected} used bytes, not {used_bytes(directory)}")


def in_program(script: str, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=10 * PATIENCE, check=False, **options)


class Model(torch.nn.Module):
    """Tied weights, a buffer of each kind, and a weight that lies in memory column by column."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, width)
        self.middle = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.columns = torch.nn.Parameter(torch.randn(width, 2 * width).t())
        self.norm = torch.nn.BatchNorm1d(width)
        self.register_buffer("scale", torch.rand(width), persistent=False)
        self.scale: torch.Tensor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.middle(self.embedding(tokens))) * self.scale
        answer: torch.Tensor = self.head((hidden @ self.columns.t()) @ self.columns)
        return answer

    def answers(self) -> torch.Tensor:
        with torch.no_grad():
            return self.forward(torch.arange(32))


def a_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = Model().eval()
    model.norm.running_mean = torch.rand(64)
    return model


def an_empty_model() -> Model:
    with torch.device("meta"):
        return Model().eval()


# Reading


def test_every_dtype(root: Path) -> None:
    header: dict[str, object] = {"__metadata__": {"made": "here"}}
    data = b""
    for seed, (dtype, bits) in enumerate(DTYPES.items()):
        for shape in ([3, 4], [0, 2], [], [2, 3, 2]):
            count = 1
            for extent in shape:
                count *= extent
            if count * bits % 8:
                continue
            part = noise(count * bits // 8, seed)
            if dtype == "BOOL":
                part = bytes(byte & 1 for byte in part)
            header[f"{dtype}{shape}"] = entry(dtype, shape, len(data), len(data) + len(part))
            data += part
    for padding in range(8):  # of which only one aligns all tensors
        path = root / str(padding)
        text = json.dumps(header).encode()
        path.write_bytes(raw(text + b" " * padding, data))
        found = gpufs.torch.load_file(path, "cpu", backend="mmap")
        assert same_tensors(found, safetensors.torch.load_file(path)), padding
        assert list(found) == [name for name in header if name != "__metadata__"]


def test_tensors_are_the_file(root: Path) -> None:
    path = root / "model"
    safetensors.torch.save_file({"a": torch.zeros(1000), "b": torch.ones(7, dtype=torch.int16)}, path)
    one, two = (gpufs.torch.load_file(path, mode="r+") for _ in range(2))
    one["a"][5] = 3
    assert two["a"][5] == 3
    assert safetensors.torch.load_file(path)["a"][5] == 3
    with open(path, "r+b") as file:
        file.seek(-14, os.SEEK_END)
        file.write((1234).to_bytes(2, "little"))
    assert one["b"][0] == two["b"][0] == 1234


def storages(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    return [(one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()) for one in tensors]


def test_each_tensor_has_a_storage_of_its_own(root: Path) -> None:
    """Libraries save, copy and compare by storage. Only what was tied when it was published is tied again."""
    path = root / "model"
    safetensors.torch.save_file({"a": torch.randn(100, 10), "b": torch.ones(7).half(), "c": torch.zeros(0, 3)}, path)
    names = ["a", "b", "c"]
    found = [gpufs.torch.load_file(path), gpufs.torch.load(path)]
    with gpufs.torch.safe_open(path) as file:
        found += [file.get_tensors(), {name: file.get_tensor(name) for name in names}]
        found += [{name: file.get_slice(name)[...] for name in names}]
        rows, column = file.get_slice("a")[10:20], file.get_slice("a")[:, 3]
    for tensors in found:
        assert storages(tensors.values()) == [(one.data_ptr(), one.nbytes) for one in tensors.values()]
        assert len(set(storages(tensors.values()))) == 3
        assert copy.deepcopy(tensors["b"]).untyped_storage().nbytes() == 14
        written = io.BytesIO()
        torch.save(tensors["b"], written)
        assert len(written.getvalue()) < 3000
    whole = found[-1]["a"]
    assert same(rows, whole[10:20])
    assert same(column, whole[:, 3])
    assert storages([rows, column]) == [(whole[10:].data_ptr(), 400), (whole[0, 3:].data_ptr(), 99 * 40 + 4)]

    gpufs.torch.publish(a_model(), root / "published")
    tied = gpufs.torch.load_file(root / "published")
    shared = storages([tied["embedding.weight"], tied["head.weight"]])
    assert shared[0] == shared[1]
    assert len(set(storages(tied.values()))) == len(tied) - 1
    model = gpufs.torch.attach_module(an_empty_model(), root / "published")
    assert len(set(storages(model.state_dict().values()))) == len(model.state_dict()) - 1
    torch.save(model.middle.bias, written := io.BytesIO())
    assert len(written.getvalue()) < 3000


def test_misaligned_tensors_are_copied(root: Path) -> None:
    """Tensors after odd sizes are copied, the smallest first, up to 16 MiB, unless changes must reach the file."""
    header: dict[str, dict[str, Any]] = {}
    end = 0
    sizes = {"large": 24 * MIB, "odd": 8, "second": 12 * MIB, "small": 1024, "first": 3 * MIB, "tiny": 8, "last": 4000}
    for name, size in sizes.items():
        header[name] = entry("I64", [size // 8], end, end + size)
        end += size
    path = root / "model"
    path.write_bytes(padded(header) + noise(end))
    for mode in ("r", "c", "r+"):
        with gpufs.torch.safe_open(path, mode=mode) as file:
            found = file.get_tensors()
            rows = file.get_slice("small")[5:9]
        expected = safetensors.torch.load_file(path)
        assert same_tensors(found, expected)
        assert same(rows, expected["small"][5:9])
        assert rows.untyped_storage().nbytes() == 32
        start = found["large"].data_ptr()
        copied = {name for name, one in found.items() if one.data_ptr() - start != header[name]["data_offsets"][0]}
        assert copied == (set() if mode == "r+" else {"small", "first", "second"})
        assert all(found[name].data_ptr() % 16 == 0 for name in copied)
        del found
    header["odd again"] = entry("I64", [1], end, end + 8)
    header["third"] = entry("I64", [MIB // 4], end + 8, end + 8 + 2 * MIB)
    path = root / "more"
    path.write_bytes(padded(header) + noise(end + 8 + 2 * MIB))
    found = gpufs.torch.load_file(path)
    start = found["large"].data_ptr()
    copied = {name for name, one in found.items() if one.data_ptr() - start != header[name]["data_offsets"][0]}
    assert copied == {"small", "first", "third"}


def test_safe_open_answers_as_safetensors_does(root: Path) -> None:
    path = root / "model"
    tensors = {"z": torch.randn(4, 6), "a": torch.randn(8).half(), "half": torch.tensor(3)}
    safetensors.torch.save_file(tensors, path, metadata={"who": "me"})
    with safetensors.safe_open(path, framework="pt") as theirs, gpufs.torch.safe_open(path, framework="pt") as ours:
        assert ours.keys() == list(theirs.keys())
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata()
        for name in ours.keys():  # noqa: SIM118 - not a dict
            assert same(ours.get_tensor(name), theirs.get_tensor(name))
            assert ours.get_slice(name).get_shape() == theirs.get_slice(name).get_shape()
            assert ours.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype()
        for index in (slice(1, 3), (slice(None), slice(2, 5)), (1, 2), ...):
            assert same(ours.get_slice("z")[index], theirs.get_slice("z")[index])
        with pytest.raises(KeyError):
            ours.get_tensor("absent")
        kept = ours.get_tensor("z")
    with pytest.raises(ValueError):
        ours.get_tensor("z")
    assert same(kept, tensors["z"])


VALID = raw({"a": entry("F32", [2], 0, 8), "b": entry("U8", [3], 8, 11)}, bytes(11))
HUGE = 2**64 - 1
FILES: dict[str, bytes] = {
    "valid": VALID,
    "no tensors": raw("{}"),
    "empty header": raw(""),
    "length beyond the end": raw("{}", length=100),
    "length of 2^64-1": raw("{}", length=HUGE),
    "length beyond the limit": raw("{}", length=100_000_001),
    "blanks around": raw("\n\t {} \r\n "),
    "NUL at the end": raw("{}\0"),
    "not UTF-8": raw(b'{"\xff": 1}'),
    "byte order mark": raw(b"\xef\xbb\xbf{}"),
    "a number": raw("1"),
    "control character": raw('{"a\n":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "empty name": raw({"": entry("U8", [1], 0, 1)}, b"1"),
    "hole in the middle": raw({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"123"),
    "overlap": raw({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"123"),
    "the same bytes twice": raw({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 0, 2)}, b"12"),
    "end before start": raw({"a": entry("U8", [0], 0, 2), "b": entry("U8", [0], 2, 1)}, b"1"),
    "beyond the end": raw({"a": entry("U8", [3], 0, 3)}, b"12"),
    "too few bytes": raw({"a": entry("F32", [2], 0, 4)}, b"1234"),
    "no elements": raw({"a": entry("F32", [0, 5], 0, 0), "b": entry("F32", [5, 0], 0, 0)}),
    "scalar": raw({"a": entry("F64", [], 0, 8)}, b"12345678"),
    "shape beyond 64 bits": raw({"a": entry("U8", [2**32, 2**32], 0, 0)}),
    "shape beyond 64 bits, then 0": raw({"a": entry("U8", [2**32, 2**32, 0], 0, 0)}),
    "offset of 2^64-1": raw({"a": entry("U8", [1], HUGE, HUGE)}, b"1"),
    "negative extent": raw({"a": entry("U8", [-1, -1], 0, 1)}, b"1"),
    "extent of 1.0": raw('{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}', b"1"),
    "extent of true": raw('{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', b"1"),
    "extent as text": raw({"a": {"dtype": "U8", "shape": ["1"], "data_offsets": [0, 1]}}, b"1"),
    "three offsets": raw({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 1]}}, b"1"),
    "unknown dtype": raw({"a": entry("F33", [1], 0, 4)}, b"1234"),
    "half a byte": raw({"a": entry("F4", [3], 0, 2)}, b"12"),
    "six bits": raw({"a": entry("F6_E2M3", [4], 0, 3), "b": entry("F6_E3M2", [4], 3, 6)}, b"123456"),
    "no dtype": raw({"a": {"shape": [1], "data_offsets": [0, 1]}}, b"1"),
    "one more field": raw({"a": {**entry("U8", [1], 0, 1), "note": [1.5, None, {"x": "y"}]}}, b"1"),
    "NaN": raw('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"note":NaN}}', b"1"),
    "a number beyond doubles": raw('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"note":1e999}}', b"1"),
    "deeply nested": raw('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "metadata": raw({"__metadata__": {"a": "b", "": ""}}),
    "metadata null": raw({"__metadata__": None}),
    "metadata of numbers": raw({"__metadata__": {"a": 1}}),
    "metadata twice": raw('{"__metadata__":{},"__metadata__":{}}'),
}  # fmt: skip


def is_valid(data: bytes) -> bool:
    """Returns what safetensors says."""
    try:
        safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        return False
    return True


def is_accepted(path: Path, data: bytes) -> bool:
    path.write_bytes(data)
    try:
        with gpufs.torch.safe_open(path, framework="pt"):
            return True
    except FormatError:
        return False


@pytest.mark.parametrize("what", FILES)
def test_the_verdict_is_that_of_safetensors(root: Path, what: str) -> None:
    assert is_accepted(root / "file", FILES[what]) == is_valid(FILES[what])


@pytest.mark.parametrize(
    "header",
    [
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"__metadata__":{"x":"1","x":"2"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    ],
)
def test_a_name_that_appears_twice_is_refused(root: Path, header: str) -> None:
    """The format forbids it, and readers differ in which one they take."""
    assert not is_accepted(root / "file", raw(header, b"1"))


HEADER = VALID[8:-11]
EDITS = st.lists(
    st.tuples(
        st.integers(0, len(HEADER)),
        st.integers(0, 3),
        st.sampled_from(b'_0_1_8_-_.5_e1_"_[_]_{_}_,_:_ _null'.split(b"_")),
    ),
    min_size=1,
    max_size=3,
)  # fmt: skip


@settings(max_examples=100)
@given(edits=EDITS, cut=st.integers(-2, 2))
def test_damaged_headers(shared_mount: GpufsMount, edits: list[tuple[int, int, bytes]], cut: int) -> None:
    text = HEADER
    for at, removed, inserted in edits:
        text = text[:at] + inserted + text[at + removed :]
    data = raw(text, bytes(11 + cut))
    path = shared_mount.device / "damaged"
    try:
        assert is_accepted(path, data) == is_valid(data)
    finally:
        path.unlink(missing_ok=True)


# Several files


def write_shards(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {name: torch.randn(10, 10) for name in "abcd"}
    places = {
        "a": "model-1.safetensors",
        "b": "model-2.safetensors",
        "c": "model-1.safetensors",
        "d": "x/model-3.safetensors",
    }
    (directory / "x").mkdir()
    for file in set(places.values()):
        safetensors.torch.save_file({n: t for n, t in tensors.items() if places[n] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return tensors


def test_a_checkpoint_of_several_files(root: Path) -> None:
    tensors = write_shards(root)
    for path in (root, root / "model.safetensors.index.json"):
        assert same_tensors(gpufs.torch.load_file(path), tensors)
        with gpufs.torch.safe_open(path, framework="pt") as file:
            assert file.keys() == ["a", "b", "c", "d"]
            assert same(file.get_slice("d")[2:4], tensors["d"][2:4])


def test_a_directory_with_one_file(root: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(3)}, root / "model.safetensors")
    assert gpufs.torch.load_file(root)["a"].tolist() == [1, 1, 1]
    # What an earlier version of the model has left beside it.
    stale = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (root / "model.safetensors.index.json").write_text(json.dumps(stale))
    assert gpufs.torch.load_file(root)["a"].tolist() == [1, 1, 1]
    gpufs_command("diff", root, root / "model.safetensors")


@pytest.mark.parametrize(
    "index",
    [
        "",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": "../other/model-1.safetensors"}}',
        '{"weight_map": {"b": "model-1.safetensors"}}',
        '{"weight_map": {"a": "model-1.safetensors", "a": "model-2.safetensors"}}',
    ],
)
def test_an_index_that_is_wrong(root: Path, index: str) -> None:
    write_shards(root)
    (root / "model.safetensors.index.json").write_text(index)
    with pytest.raises(FormatError):
        gpufs.torch.load_file(root)


def test_an_index_that_names_a_missing_file(root: Path) -> None:
    write_shards(root)
    (root / "model-2.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        gpufs.torch.load_file(root)


# Publishing


def test_other_tools_read_what_is_published(root: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "matrix": torch.randn(32, 20),
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 3),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "small": torch.randn(5).to(torch.float8_e4m3fn),
        "packed": torch.arange(12, dtype=torch.uint8).view(3, 4).view(torch.float4_e2m1fn_x2),
        "wide": torch.randn(1000, 10)[:, ::5],
        "ünïcode": torch.randn(3).bfloat16(),
    }
    path = root / "model.safetensors"
    gpufs.torch.publish(tensors, path, metadata={"step": "12"})
    assert same_tensors(safetensors.torch.load_file(path), tensors)
    assert same_tensors(gpufs.torch.load_file(path), tensors)
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata()["step"] == "12"
        assert file.metadata()["format"] == "pt"


def test_what_was_published(root: Path) -> None:
    model = torch.nn.BatchNorm1d(3)
    model.register_buffer("cache", torch.ones(5), persistent=False)
    path = root / "model.safetensors"
    written = gpufs.torch.publish(model, path)
    assert f"{path}: {len(written.tensors)} tensors" in repr(written)
    assert len(repr(written)) < len(str(path)) + 100
    assert (written.path, written.nbytes, written.in_place) == (path, path.stat().st_size, False)
    assert set(written.tensors) == {*model.state_dict(), "cache"} == set(gpufs.torch.load_file(path))
    assert set(gpufs.torch.publish(model, path, buffers=False).tensors) == set(model.state_dict())


def sizes_of_a_model() -> dict[str, torch.Tensor]:
    """Weights in 8 bits with a scale each, a vocabulary of an odd size, and others that disturb those behind them."""
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(4):
        tensors[f"{layer}.weight"] = torch.randn(96, 64).to(torch.float8_e4m3fn)
        tensors[f"{layer}.weight_scale"] = torch.tensor(0.5 + layer)
        tensors[f"{layer}.norm"] = torch.randn(100)
        tensors[f"{layer}.bias"] = torch.randn(64).bfloat16()
        tensors[f"{layer}.flags"] = torch.ones(257 + layer, dtype=torch.bool)
    tensors["head"] = torch.randn(30522 + 1).half()
    tensors["none"] = torch.empty(0, 3)
    tensors["transposed"] = torch.randn(33, 65).t()
    return tensors


def test_published_tensors_are_aligned(root: Path) -> None:
    """Tensors of 256 bytes or more begin at a multiple of 256, whatever the sizes; others at one of their dtype."""
    path = root / "model"
    tensors = sizes_of_a_model()
    generator = torch.Generator().manual_seed(0)
    for number, size in enumerate(torch.randint(1, 3000, (60,), generator=generator).tolist()):
        dtype = (torch.uint8, torch.int16, torch.float32, torch.float64)[number % 4]
        tensors[f"random {number}"] = torch.zeros(size, dtype=dtype)
    gpufs.torch.publish(tensors, path)
    found = gpufs.torch.load_file(path)
    assert same_tensors(found, tensors)
    for name, tensor in found.items():
        assert tensor.data_ptr() % (256 if tensor.nbytes >= 256 else tensor.itemsize) == 0, name
    assert path.stat().st_size < sum(tensor.nbytes + 256 for tensor in tensors.values()) + 16 * 1024
    others = safetensors.torch.load_file(path)
    plain = {name: tensor for name, tensor in others.items() if not name.startswith("gpufs.padding.")}
    renamed = {name: tensor for name, tensor in tensors.items() if name != "transposed"}
    assert same_tensors({name: tensor for name, tensor in plain.items() if name in renamed}, renamed)
    assert plain.keys() - renamed.keys() == {"transposed.strided"}

    written = gpufs.torch.publish(others, root / "again")  # with the padding that the other reader has returned
    assert set(written.tensors) == plain.keys() == set(gpufs.torch.load_file(root / "again"))


def test_tensors_of_usual_sizes_need_no_padding(root: Path) -> None:
    tensors = {"b": torch.ones(1024), "scale": torch.ones(3), "d": torch.ones(2048), "bias": torch.ones(30522)}
    gpufs.torch.publish(tensors, root / "model")
    assert safetensors.torch.load_file(root / "model").keys() == tensors.keys()
    found = gpufs.torch.load_file(root / "model")
    assert {name: found[name].data_ptr() % 4096 for name in "bd"} == {"b": 0, "d": 0}


def test_strides_and_ties_come_back(root: Path) -> None:
    base = torch.randn(8, 12)
    padded = torch.randn(6, 10)[:, :9]
    tensors = {
        "transposed": torch.randn(4, 6).t(),
        "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "padded": padded,
        "padded again": padded,
        "expanded": torch.randn(3, 1).expand(3, 5),
        "tied to base": base,
        "base": base,
        "base transposed": base.t(),
        "base flat": base.view(-1),
    }
    path = root / "model"
    gpufs.torch.publish(tensors, path)
    found = gpufs.torch.load_file(path)
    assert same_tensors(found, tensors)
    assert {n: t.stride() for n, t in found.items()} == {n: t.stride() for n, t in tensors.items()}
    for one, other in (("padded", "padded again"), ("base", "base transposed"), ("base", "base flat")):
        assert found[one].data_ptr() == found[other].data_ptr()
    assert found["base"].data_ptr() == found["tied to base"].data_ptr()
    others = safetensors.torch.load_file(path)
    assert "transposed" not in others  # so that no tool takes it for a contiguous one
    assert (
        sum(tensor.nbytes for tensor in others.values())
        < 1.3
        * sum(
            tensors[name].untyped_storage().nbytes() for name in tensors if "again" not in name and "base" not in name
        )
        + 1.3 * base.nbytes
    )


@pytest.mark.parametrize(
    "notes",
    [
        "",
        '{"a": {"unknown": 1}}',
        '{"b": {"entry": "absent"}}',
        '{"a": {"same_as": "a"}}',
        '{"b": {"same_as": "a", "shape": [9], "strides": [1]}}',
        '{"b": {"same_as": "a", "shape": [2, 2], "strides": [1, 7]}}',
        '{"b": {"same_as": "a", "shape": [2], "strides": [-1]}}',
        '{"a": {"attributes": []}}',
    ],
)
def test_notes_that_are_wrong(root: Path, notes: str) -> None:
    """What publish notes in the metadata is checked like the header: it cannot lead out of a tensor's bytes."""
    safetensors.torch.save_file({"a": torch.ones(8), "z": torch.ones(8)}, root / "model", metadata={"gpufs": notes})
    with pytest.raises(FormatError):
        gpufs.torch.load_file(root / "model")


def test_readers_keep_the_file_that_is_replaced(root: Path) -> None:
    path = root / "model"
    gpufs.torch.publish({"a": torch.full((1000,), 1.0)}, path)
    path.chmod(0o600)
    owner = NOBODY if os.geteuid() == 0 else os.geteuid()
    os.chown(path, owner, -1)
    old = gpufs.torch.load_file(path)
    gpufs.torch.publish({"a": torch.full((1000,), 2.0)}, path)
    new = gpufs.torch.load_file(path)
    assert old["a"].sum() == 1000
    assert new["a"].sum() == 2000
    assert os.listdir(root) == ["model"]
    assert (path.stat().st_mode & 0o777, path.stat().st_uid) == (0o600, owner)
    gpufs.torch.publish({"a": new["a"] + 1, "b": old["a"]}, path)
    assert gpufs.torch.load_file(path)["a"].sum() == 3000


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, dtype=torch.complex128),
        torch.eye(3).to_sparse(),
        torch.ones(3, device="meta"),
        "text",
    ],
)
def test_what_no_file_can_hold(root: Path, tensor: Any) -> None:
    with pytest.raises(TypeError, match="name of it"):
        gpufs.torch.publish({"name of it": tensor}, root / "model")
    assert os.listdir(root) == []


@pytest.mark.parametrize("source", [torch.ones(3), [torch.ones(3)], {3: torch.ones(3)}, None])
def test_what_has_no_names(root: Path, source: Any) -> None:
    with pytest.raises(TypeError, match="by name"):
        gpufs.torch.publish(source, root / "model")
    assert os.listdir(root) == []


def test_publishing_on_a_full_device(mount: Mounter) -> None:
    device = mount(memory=64 * MIB).device
    gpufs.torch.publish({"a": torch.ones(MIB)}, device / "model")
    used = used_bytes(device)
    with pytest.raises(OSError) as caught:
        gpufs.torch.publish({"a": torch.ones(20 * MIB)}, device / "model")
    assert caught.value.errno == ENOSPC
    assert os.listdir(device) == ["model"]
    assert gpufs.torch.load_file(device / "model")["a"].numel() == MIB
    wait_for_used(device, used)


def test_publishing_elsewhere(shared_mount: GpufsMount, tmp_path: Path) -> None:
    for path, number, advice in (
        (tmp_path / "model", EXDEV, "mount"),
        (shared_mount.path / "model", EPERM, f"{shared_mount.path}/gpu0"),
    ):
        with pytest.raises(OSError, match=advice) as caught:
            gpufs.torch.publish({"a": torch.ones(3)}, path)
        assert (caught.value.errno, caught.value.filename) == (number, str(path))
    assert os.listdir(tmp_path) == []


# Each publisher is a fork of a program that has imported torch, which takes seconds. It may not have used the engine.
KILLED_PUBLISHERS = """
    import os, random, signal, sys, time
    import torch
    import gpufs.torch
    path, count = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    tensors = {str(index): torch.full((1 << 17,), float(index)) for index in range(16)}

    def fork(action):
        child = os.fork()
        if child == 0:
            try:
                action()
                os._exit(0)
            finally:
                os._exit(1)
        return child

    def end_of(child):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def publish():
        gpufs.torch.publish(tensors, path)

    def publish_forever():
        while True:
            publish()

    def check():
        found = gpufs.torch.load_file(path)
        assert len(found) == len(tensors)
        assert all((tensor == float(name)).all() for name, tensor in found.items())

    begin = time.monotonic()
    assert end_of(fork(publish)) == 0
    longest = 3 * (time.monotonic() - begin)
    for attempt in range(count):
        child = fork(publish_forever)
        time.sleep(random.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        assert end_of(child) == -signal.SIGKILL
        assert end_of(fork(check)) == 0
    assert end_of(fork(publish)) == 0
"""


@pytest.mark.slow
def test_killed_publishers_leave_nothing(mount: Mounter) -> None:
    """What a program may leave is a complete file with a temporary name, which the next call removes."""
    mounted = mount(memory=256 * MIB)
    device = mounted.device

    def run_publishers(cycles: int) -> None:
        done = in_program(KILLED_PUBLISHERS, device / "model", str(cycles))
        assert done.returncode == 0, done.stderr
        assert os.listdir(device) == ["model"]

    run_publishers(1)
    used = used_bytes(device)
    before = Snapshot.of(mounted.pid)
    run_publishers(5)
    wait_for_used(device, used)
    wait_until(lambda: Snapshot.of(mounted.pid).descriptors <= before.descriptors, 10, "the daemon's descriptors")
    assert Snapshot.of(mounted.pid).memfds <= before.memfds


# Modules


def test_an_attached_module_answers_as_the_published_one(root: Path) -> None:
    model = a_model()
    vars(model.middle.weight).update(group=[1, {"a": None}], loader=print)
    model.middle.bias.requires_grad_(False)
    path = root / "model"
    gpufs.torch.publish(model, path)
    attached = gpufs.torch.attach_module(an_empty_model(), path)
    assert same(attached.answers(), model.answers())
    assert attached.head.weight is attached.embedding.weight
    assert attached.columns.stride() == model.columns.stride()
    assert vars(attached.middle.weight) == {"group": [1, {"a": None}]}
    assert not any(parameter.requires_grad for parameter in attached.parameters())
    attached.scale += 1  # private
    assert same(gpufs.torch.attach_module(an_empty_model(), path).answers(), model.answers())
    assert used_bytes(root) > 0


def test_training_an_attached_module(root: Path) -> None:
    model = a_model()
    model.middle.bias.requires_grad_(False)
    path = root / "model"
    gpufs.torch.publish(model, path)
    trained = gpufs.torch.attach_module(an_empty_model(), path, mode="r+")
    assert {n: p.requires_grad for n, p in trained.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    trained(torch.arange(8)).square().mean().backward()
    optimizer.step()
    assert not same(trained.answers(), model.answers())
    seen = gpufs.torch.attach_module(an_empty_model(), path)
    assert same(seen.answers(), trained.answers())


def test_a_module_from_a_plain_file(root: Path) -> None:
    """As safetensors writes it, with one name for tied tensors and without buffers that are not persistent."""
    model = a_model()
    safetensors.torch.save_model(model, str(root / "model"))
    module = an_empty_model()
    with pytest.raises(RuntimeError, match="scale"):
        gpufs.torch.attach_module(module, root / "model")
    assert module.middle.weight.is_meta
    module.scale = model.scale.clone()
    gpufs.torch.attach_module(module, root / "model")
    assert same(module.answers(), model.answers())
    assert module.head.weight is module.embedding.weight


def test_a_module_that_does_not_fit(root: Path) -> None:
    gpufs.torch.publish({"weight": torch.ones(2, 3), "other": torch.ones(1)}, root / "model")
    with torch.device("meta"):
        module = torch.nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match=r"bias(.|\n)*other"):
        gpufs.torch.attach_module(module, root / "model")
    gpufs.torch.attach_module(module, root / "model", strict=False)
    assert module.weight.tolist() == [[1, 1, 1], [1, 1, 1]]
    with torch.device("meta"), pytest.raises(RuntimeError, match="weight"):
        gpufs.torch.attach_module(torch.nn.Linear(4, 2), root / "model", strict=False)


def test_long_lists_of_what_does_not_fit(root: Path) -> None:
    gpufs.torch.publish({f"layer{number}": torch.ones(1) for number in range(400)}, root / "model.safetensors")
    with torch.device("meta"):
        module = torch.nn.BatchNorm1d(4)
        module.register_buffer("frequencies", torch.ones(4), persistent=False)
    with pytest.raises(RuntimeError) as caught:
        gpufs.torch.attach_module(module, root)
    text = str(caught.value)
    assert f"{root}:" in text  # the path that was given
    assert "layer0" in text
    assert "395 more" in text
    assert "publish" in text  # how the buffer gets a value
    assert len(text.splitlines()) < 20


def test_load_model_does_what_safetensors_does(root: Path) -> None:
    model = a_model()
    path = root / "model"
    safetensors.torch.save_model(model, str(path))
    ours, theirs = a_model(1), a_model(1)
    before = ours.middle.weight.data_ptr()
    assert gpufs.torch.load_model(ours, path, backend="pread") == ([], [])
    safetensors.torch.load_model(theirs, path)
    assert same(ours.answers(), theirs.answers())
    assert ours.middle.weight.data_ptr() == before
    assert ours.middle.weight.requires_grad
    with torch.device("meta"):
        empty = torch.nn.Linear(4, 2)
    gpufs.torch.publish({"weight": torch.ones(2, 4), "more": torch.ones(2)}, path)
    assert gpufs.torch.load_model(empty, path, strict=False) == (["bias"], ["more"])
    assert empty.weight.sum() == 8


# Memory


@pytest.mark.slow
def test_no_growth(root: Path) -> None:
    gpufs.torch.publish({str(index): torch.randn(100, 100) for index in range(10)}, root / "model")

    def cycles(count: int) -> None:
        for _ in range(count):
            tensors = gpufs.torch.load_file(root / "model")
            part = tensors["3"][5]
            del tensors
            assert part.shape == (100,)

    def held() -> tuple[int, int, int]:
        gc.collect()
        maps = len(Path("/proc/self/maps").read_text().splitlines())
        return Snapshot.of(os.getpid()).descriptors, Snapshot.of(os.getpid()).threads, maps

    cycles(20)
    used = used_bytes(root)
    before = held()
    cycles(1000)
    wait_for_used(root, used)
    after = held()
    assert after[:2] == before[:2]
    assert after[2] <= before[2] + 8  # the allocator's own


def test_a_pool_needs_a_gpu(root: Path, shared_mount: GpufsMount) -> None:
    """Host memory is torch's own: the error says what to use, and no memory stays behind."""
    held = os.statvfs(root).f_bfree
    assert errno_of(gpufs.torch.pool, root / "model", "8M") == EOPNOTSUPP
    assert not list(root.iterdir())
    wait_until(lambda: os.statvfs(root).f_bfree == held, 10, "the pool's memory to come back")
    for wrong in (0, -5, "lots", "0"):
        with pytest.raises(ValueError, match="size") as refused:
            gpufs.torch.pool(root / "model", wrong)
        assert repr(wrong) in str(refused.value)
