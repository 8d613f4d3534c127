"""gpufs.torch.load: files of torch.save(), npz, npy and GGUF in place, judged by torch and numpy."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cli import gpufs_here as gpufs_command

import gpufs.torch
from gpufs.torch import FormatError


def same(one: Any, other: Any) -> bool:
    """Whether two saved objects are equal, with the dtypes, shapes and strides of their tensors."""
    if isinstance(one, torch.Tensor):
        form = [(x.dtype, x.shape, x.stride(), type(x)) for x in (one, other)]
        return form[0] == form[1] and torch.equal(*(x.detach().reshape(-1).view(torch.uint8) for x in (one, other)))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a saved object, in its order."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def test_files_of_torch_save(root: Path) -> None:
    """Every tensor is in place, views of one storage share it, and one write is seen by the reference reader."""
    path = root / "state.pt"
    whole = torch.randn(7, 8)
    module = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6))
    saved = {
        "state": module.state_dict(),
        "views": [whole, whole[2:, 1:].t(), (whole[0],)],
        "small": torch.randn(5).to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(whole.bfloat16()),
        "numbers": [1, 2.5, None, True, "text", whole.shape],
    }
    torch.save(saved, path)
    found = gpufs.torch.load(path)
    assert same(torch.load(path), found)
    assert vars(found["state"]) == vars(saved["state"])
    for one, other in zip(tensors_in(torch.load(path)), tensors_in(found), strict=True):
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        assert other.untyped_storage().data_ptr() % 64 == 0
    changed = gpufs.torch.load(path, mode="r+")
    assert changed["views"][0].untyped_storage().data_ptr() == changed["views"][1].untyped_storage().data_ptr()
    changed["views"][2][0][3] = 42
    assert changed["views"][0][0, 3] == torch.load(path)["views"][0][0, 3] == 42


@pytest.mark.parametrize("bit", ["conj", "neg"])
def test_a_bit_counts_whatever_its_value_is(root: Path, bit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks at the names alone."""
    monkeypatch.setattr(torch._utils, "get_tensor_metadata", lambda tensor: {bit: False})
    torch.save(torch.ones(2, dtype=torch.complex64), root / "bits.pt")
    ours, theirs = gpufs.torch.load(root / "bits.pt"), torch.load(root / "bits.pt")
    assert (ours.is_conj(), ours.is_neg()) == (theirs.is_conj(), theirs.is_neg())


def test_all_objects_that_torch_load_takes(root: Path) -> None:
    """What torch.load(weights_only=True) takes beside tensors, in the protocol that torch.save() uses."""
    tagged = torch.arange(6.0)
    parameter = torch.nn.Parameter(torch.arange(3.0))
    vars(tagged).update(group="a", others=[parameter.data])
    vars(parameter).update(halves=(1, 2))
    values: dict[str, Any] = {
        "set": {1, "two", (3, 4.5), None},
        "empty set": set(),
        "bytes": [b"\0\xff", b"text"],
        "bytearrays": [bytearray(b"\0\xff"), bytearray()],
        "complex": [1 + 2j, complex("inf-nanj").real, {1j: 2}],
        "counter": collections.Counter("abca"),
        "devices": [torch.device("cuda", 1), torch.device("cpu"), torch.device("meta")],
        "layouts": [torch.strided, torch.sparse_coo],
        "dtypes": [torch.qint8, torch.complex128, torch.quint4x2, torch.bits8, torch.float4_e2m1fn_x2],
        "keys": {torch.float32: 1, torch.qint8: 2, torch.device("cpu"): 3, torch.Size([2]): 4},
    }
    for name, value in values.items():
        torch.save(value, root / name)
        found, expected = gpufs.torch.load(root / name), torch.load(root / name, weights_only=True)
        assert found == expected == value, name
        assert type(found) is type(value), name
    torch.save([tagged, parameter, torch.tensor([1 + 2j, 3j], dtype=torch.complex128)], root / "tensors")
    ours, reference = gpufs.torch.load(root / "tensors", mode="r+"), torch.load(root / "tensors", weights_only=True)
    assert same(reference, ours)
    assert vars(ours[0]).keys() == vars(tagged).keys()
    assert same(reference[0].others, ours[0].others)
    assert vars(ours[1])["halves"] == (1, 2)
    assert [
        one["dtype"] for one in json.loads(gpufs_command("inspect", "--json", root / "tensors").stdout)["tensors"]
    ] == [
        "F32",
        "F32",
        "complex128",
    ]


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_what_is_no_plain_tensor(root: Path) -> None:
    """torch.load() decides what becomes of bits, types and sizes, and that one object stays one."""
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    shared: list[Any] = [numbers]
    shared.append(shared)
    cases = {
        "conjugated": numbers.conj(),
        "negated": numbers.conj().imag,
        "parameter": torch.nn.Parameter(numbers.conj().imag),
        "both": torch._neg_view(numbers.conj()),
        "types": [torch.bfloat16, torch.float8_e5m2, torch.bool],
        "sizes": [torch.Size([2, 3]), torch.Size([])],
        "storages": [torch.ones(2).untyped_storage()],
        "nothing": torch.ones(3, 0)[1:],
        "shared": [shared, shared],
    }
    for name, value in cases.items():
        torch.save({"value": value}, root / name)
    for name in cases:
        one, other = torch.load(root / name)["value"], gpufs.torch.load(root / name)["value"]
        if name == "shared":
            assert other[0] is other[1] is other[0][1]
        elif isinstance(one, list):
            assert [type(each) for each in one] == [type(each) for each in other]
            values = [[list(each) if name == "storages" else each for each in found] for found in (one, other)]
            assert values[0] == values[1]
        else:
            assert (one.is_conj(), one.is_neg(), type(one)) == (other.is_conj(), other.is_neg(), type(other))
            assert torch.equal(one, other)
    torch.save({"w": -numbers.conj().imag}, root / "plain")
    torch.save({"w": numbers.conj().imag}, root / "minus")
    assert gpufs_command("diff", root / "plain", root / "minus", check=False).returncode == 1


def test_arrays_of_numpy(root: Path) -> None:
    arrays: dict[str, Any] = {
        "a": np.arange(10.0).reshape(2, 5),
        "columns": np.asfortranarray(np.arange(24, dtype="i4").reshape(2, 3, 4)),
        "one": np.float16(3),
        "none": np.empty((0, 3), "u1"),
    }
    np.savez(root / "arrays.npz", **arrays)
    np.save(root / "array.npy", arrays["columns"])
    found = gpufs.torch.load(root / "arrays.npz")
    assert found.keys() == arrays.keys()
    for name, array in np.load(root / "arrays.npz").items():
        assert found[name].untyped_storage().nbytes() == array.nbytes
        assert found[name].data_ptr() % array.itemsize == 0
        assert found[name].numpy().dtype == array.dtype
        assert np.array_equal(found[name].numpy(), array)
    changed = gpufs.torch.load(root / "array.npy", mode="r+")
    changed[1, 2, 3] = 77
    assert np.load(root / "array.npy")[1, 2, 3] == 77


def test_members_that_are_not_tensors(root: Path) -> None:
    path = root / "arrays.npz"
    np.savez(path, w=np.arange(3.0), words=np.array(["a", "b"]), thing=np.array({"a": 1}, object))
    with zipfile.ZipFile(path, "a") as zipped:
        zipped.writestr("README.txt", "hi")
    with pytest.warns(UserWarning, match="words") as caught:
        found = gpufs.torch.load(path)
    assert all(name in str(caught[0].message) for name in ("thing", "README.txt"))
    assert list(found) == ["w"]
    assert [one["name"] for one in json.loads(gpufs_command("inspect", "--json", path).stdout)["tensors"]] == [
        "w",
        "words",
    ]
    np.savez(root / "empty.npz")
    assert gpufs.torch.load(root / "empty.npz") == {}


def gguf(
    tensors: list[tuple[str, tuple[int, ...], int, int]], data: bytes, version: int = 3, alignment: int = 64
) -> bytes:
    """The bytes of a GGUF file. tensors: name, extents from the fastest on, type, offset."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), 4)
    header += text("general.alignment") + struct.pack("<II", 4, alignment)
    header += text("words") + struct.pack("<IIQ", 9, 8, 3) + text("a") + text("") + text("ccc")
    nested = struct.pack("<IQ2H", 2, 2, 1, 2) + struct.pack("<IQ", 8, 1) + text("a")
    header += text("nested") + struct.pack("<IIQ", 9, 9, 2) + nested
    header += text("numbers") + struct.pack("<IIQ3H", 9, 2, 3, 1, 2, 3)
    for name, extents, kind, offset in tensors:
        header += text(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, kind, offset)
    return header + bytes(-len(header) % alignment) + data


def test_gguf(root: Path) -> None:
    """Plain types are tensors; quantised ones are their blocks, with type and shape."""
    plain = np.arange(12, dtype="f4").reshape(3, 4)
    blocks = np.arange(2 * 36, dtype="u1")  # two rows of two blocks of Q4_0
    path = root / "model.gguf"
    path.write_bytes(gguf([("w", (4, 3), 0, 0), ("q", (64, 2), 2, 64)], plain.tobytes() + bytes(16) + blocks.tobytes()))
    found = gpufs.torch.load(path)
    assert list(found) == ["w", "q"]
    assert np.array_equal(found["w"].numpy(), plain)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in found.values())  # as the file's header says
    assert [tensor.untyped_storage().nbytes() for tensor in found.values()] == [48, 72]
    assert (found["q"].ggml_type, found["q"].ggml_shape) == ("Q4_0", (2, 64))
    assert np.array_equal(found["q"].numpy(), blocks.reshape(2, 36))


def test_alignment_of_each_format(root: Path) -> None:
    """What the formats' writers promise holds in memory. Arrays that are not aligned to their elements are copied."""
    sizes = [1, 3, 257, 1000]
    torch.save({size: torch.rand(size) for size in sizes}, root / "state.pt")
    np.save(root / "array.npy", np.arange(100.0))
    (root / "model.gguf").write_bytes(gguf([("a", (1,), 0, 0), ("b", (4,), 0, 32)], bytes(48), alignment=32))
    arrays = {"a" * length: np.arange(300.0) for length in range(1, 17)}
    np.savez(root / "arrays.npz", **arrays)  # type: ignore[arg-type]

    saved_tensors = gpufs.torch.load(root / "state.pt").values()
    assert {tensor.data_ptr() % 64 for tensor in saved_tensors} == {0}
    assert gpufs.torch.load(root / "array.npy").data_ptr() % 64 == 0
    assert {tensor.data_ptr() % 32 for tensor in gpufs.torch.load(root / "model.gguf").values()} == {0}
    listed = json.loads(gpufs_command("inspect", "--json", root / "arrays.npz").stdout)["tensors"]
    assert any(one["offset"] % 8 for one in listed)
    found = gpufs.torch.load(root / "arrays.npz")
    for name, array in arrays.items():
        assert found[name].data_ptr() % 8 == 0
        assert np.array_equal(found[name].numpy(), array)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/pwned",)


def archive(method: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as zipped:
        for name, data in members.items():
            zipped.writestr(name.replace("__", "/").replace("_pkl", ".pkl").replace("_npy", ".npy"), data)
    return file.getvalue()


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def tensor_with_attribute(name: str) -> torch.Tensor:
    tensor = torch.ones(2)
    vars(tensor)[name] = 1
    return tensor


def long_tensor() -> bytes:
    """A file of torch.save() whose tensor is larger than its storage."""
    data = saved(torch.arange(100, dtype=torch.uint8))
    assert data.count(b"Kd\x85") == 1  # the shape
    return data.replace(b"Kd\x85", b"K\xff\x85")


# A tensor of two elements in storage 0, as instructions of a pickle.
TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\4tQ"
    b"K\0K\2\x85K\1\x85\x89ccollections\nOrderedDict\n)RtR"
)


def shared_lists(depth: int) -> bytes:
    """A pickle whose lists contain the list before ten times, so that a walk sees 10**depth of them."""
    lists = b"".join(b"]q" + bytes([n]) + b"(" + (b"h" + bytes([n - 1])) * 10 + b"e" for n in range(1, depth))
    return b"\x80\x02]q\0(NNNNNNNNe" + lists + b"."


BAD = {
    "code": archive(a__data_pkl=pickle.dumps(Evil())),
    "module": saved(torch.nn.Linear(2, 2)),
    "cut pickle": archive(a__data_pkl=pickle.dumps({})[:-1]),
    "too long": long_tensor(),
    "compressed": archive(zipfile.ZIP_DEFLATED, a_npy=bytes(1000)),
    "not numpy": archive(readme=b"text"),
    "damaged array": archive(a_npy=b"\x93NUMPY\1\0" + b"\xff" * 50),
    "cut": saved(torch.arange(1000))[:-100],
    "endless hash": archive(a__data_pkl=b"\x80\x02})" + b"q\0h\0\x86" * 60 + b"Ns."),
    "endless key": archive(
        a__data_pkl=b"\x80\x02(X\7\0\0\0storagectorch\nFloatStorage\n)" + b"q\0h\0\x86" * 60 + b"NNtQ."
    ),
    "deep": archive(a__data_pkl=b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b"."),
    "huge memo": archive(a__data_pkl=b"\x80\x02" + b"]r\xff\xff\xff\xff0" * 9 + b"N."),
    "many objects": archive(a__data_pkl=b"\x80\x02(" + b"}" * (1 << 25) + b"t."),
    "changed tensor": archive(
        a__data_pkl=b"\x80\x02" + TENSOR + b"N}X\6\0\0\0offsetJ\xfb\xff\xff\xffs\x86b.", a__data__0=bytes(16)
    ),
    "changed function": archive(
        a__data_pkl=b"\x80\x02ctorch\nSize\nN}X\x0c\0\0\0__defaults__K\5\x85s\x86b.",
    ),
    "set of a nested tuple": archive(a__data_pkl=b"\x80\x02c__builtin__\nset\n)\x85]h\0)\x85\x85a\x85R."),
    "device": archive(a__data_pkl=b"\x80\x02ctorch\ndevice\nX\4\0\0\0nope\x85R."),
    "layout": archive(a__data_pkl=b"\x80\x02ctorch.serialization\n_get_layout\nX\7\0\0\0float32\x85R."),
    "encoding": archive(a__data_pkl=b"\x80\x02c_codecs\nencode\nX\1\0\0\0aX\5\0\0\0rot13\x86R."),
    "complex of a text": archive(a__data_pkl=b"\x80\x02c__builtin__\ncomplex\nX\1\0\0\0aK\1\x86R."),
    "replaced attribute": saved(tensor_with_attribute("mean")),
    "directory of zeros": archive(a=b"")[:-22]
    + b"PK\5\6\0\0\0\0\xff\xfe\xff\xfe"
    + struct.pack("<II", 0xFFFFFFF0, 0)
    + b"\0\0",
    "gguf version": gguf([], b"", 77),
    "gguf big-endian": gguf([], b"", 3 << 24),
    "gguf tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0) + bytes(32 << 20),
    "gguf beyond": gguf([("w", (4, 3), 0, 0)], bytes(47)),
    "gguf overlap": gguf([("w", (4, 3), 0, 0), ("v", (4,), 0, 32)], bytes(64)),
    "gguf twice": gguf([("w", (4,), 0, 0), ("w", (4,), 0, 32)], bytes(64)),
    "gguf type": gguf([("w", (4,), 200, 0)], bytes(64)),
    "gguf blocks": gguf([("w", (31,), 2, 0)], bytes(64)),
    "gguf huge": gguf([("w", (1 << 62, 1 << 62), 0, 0)], bytes(64)),
    "gguf cut": gguf([("w", (4,), 0, 0)], b"")[:40],
    "gguf count": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("many objects", "gguf tensors") else name for name in BAD],
)
def test_what_cannot_be_used_in_place_is_refused(root: Path, name: str) -> None:
    path = root / "file.bin"
    path.write_bytes(BAD[name])
    with pytest.raises(FormatError) as caught:
        gpufs.torch.load(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert not Path("/tmp/pwned").exists()


def test_a_file_of_no_format_is_called_that(root: Path) -> None:
    (root / "raw").write_bytes(b"\xee" * 100)
    with pytest.raises(FormatError, match="it is not a safetensors file"):
        gpufs.torch.load(root / "raw")


def test_inspect_and_diff_know_the_formats(root: Path) -> None:
    weights = torch.arange(24.0).reshape(4, 6)
    torch.save({"state": {"w": weights, "columns": weights.t(), "part": weights[:, :2]}}, root / "one.pt")
    weights[3, 3] = float("nan")
    torch.save({"state": {"w": weights, "columns": weights.t(), "part": weights[:, :2]}}, root / "other.pt")
    np.savez(root / "arrays.npz", a=np.arange(10, dtype="i4"))
    (root / "model.gguf").write_bytes(gguf([("w", (4, 3), 0, 0), ("q", (64, 2), 2, 64)], bytes(64 + 72)))

    def tensors(name: str) -> dict[str, Any]:
        found = json.loads(gpufs_command("inspect", "--stats", "--json", root / name).stdout)
        return {one["name"]: one for one in found["tensors"]}

    found = tensors("other.pt")
    assert found["state.w"]["stats"]["nan"] == 1
    assert found["state.columns"]["fortran_order"]
    assert found["state.part"]["stats"] is None
    assert tensors("arrays.npz")["a"]["stats"]["max"] == 9
    assert (tensors("model.gguf")["q"]["dtype"], tensors("model.gguf")["q"]["shape"]) == ("Q4_0", [2, 64])
    done = gpufs_command("diff", root / "one.pt", root / "other.pt", check=False)
    assert (done.returncode, "state.w" in done.stdout) == (1, True)
    for name in ("one.pt", "arrays.npz", "model.gguf"):
        assert gpufs_command("diff", root / name, root / name).stdout == ""


def test_compressed_arrays_are_not_compared(root: Path) -> None:
    """Their tensors are not in the files as they are: two files without tensors are not equal."""
    for name, value in (("one.npz", 1), ("other.npz", 2)):
        np.savez_compressed(root / name, a=np.full(10, value))
    assert gpufs_command("diff", root / "one.npz", root / "other.npz", check=False).returncode == 2
    found = json.loads(gpufs_command("inspect", "--json", root / "one.npz").stdout)
    assert (found["format"], "tensors" in found) == ("npz", False)
    assert "numpy.load" in gpufs_command("inspect", "--stats", root / "one.npz", check=False).stderr


def test_inspect_and_diff_say_what_an_archive_lacks(root: Path) -> None:
    """They do not send the user to gpufs.torch.load(), which cannot use the file either."""
    torch.save({"w": torch.ones(3), "options": frozenset((1, 2))}, root / "pickle.pt")
    torch.save({"w": torch.ones(1000)}, root / "cut.pt")
    os.truncate(root / "cut.pt", 2000)
    np.savez_compressed(root / "compressed.npz", a=np.ones(3))
    for name, text in (("pickle.pt", ".frozenset"), ("cut.pt", "incomplete"), ("compressed.npz", "numpy.load() reads")):
        path = root / name
        assert text in json.loads(gpufs_command("inspect", "--json", path).stdout)["reason"]
        lines = [gpufs_command("inspect", path).stdout]
        for words in (("inspect", "--stats", path), ("diff", path, path)):
            lines.append(gpufs_command(*words, check=False).stderr)
        for line in lines:
            assert text in line
            assert "gpufs.torch.load" not in line


def test_what_is_shared_ends(root: Path) -> None:
    (root / "shared.pt").write_bytes(archive(a__data_pkl=shared_lists(40)))
    assert "torch.save" in gpufs_command("inspect", root / "shared.pt").stdout
    found = gpufs.torch.load(root / "shared.pt")
    assert found[0] is found[1]


@pytest.mark.slow
def test_a_count_that_only_a_sparse_file_can_have(root: Path) -> None:
    (root / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQQBIIQ", 3, 0, 1, 1, 97, 9, 8, 1 << 40))
    os.truncate(root / "model.gguf", 1 << 44)
    assert "takes more than" in gpufs_command("inspect", root / "model.gguf", check=False).stderr
