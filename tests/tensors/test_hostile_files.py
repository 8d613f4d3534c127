"""Files that anybody may have written: each is read right or refused, within the time and memory that headers may take.

The reference readers judge what is read: where they take a file, too, its tensors are the same.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import time
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from support.cli import gpufs_here
from support.data import MIB

import gpufs.torch
from gpufs.torch import FormatError

SECONDS = 10.0
BYTES = 256 * MIB
PAST = 1.5  # seconds beyond the limit: the steps between two looks at the clock
NUMBERS = [0, 1, 2, 0x7F, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


def zipped(**members: bytes) -> bytes:
    """An archive; in the names __ stands for / and _dot_ for a dot."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            entry = zipfile.ZipInfo()
            entry.filename = name.replace("__", "/").replace("_dot_", ".")  # also none at all
            archive.writestr(entry, data)
    return file.getvalue()


def pickled(instructions: bytes) -> bytes:
    return zipped(a__data_dot_pkl=b"\x80\x02" + instructions + b".", a__byteorder=b"little", a__data__0=bytes(64))


def header(fields: str) -> bytes:
    data = fields.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data + bytes(4)


def npy(shape: str, descr: str = "<f4") -> bytes:
    line = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(line)) + line + bytes(16)


def long_member(extra: bytes) -> bytes:
    """An archive with numbers that do not fit, and this extra field in its directory."""
    data = bytearray(zipped(w_dot_npy=npy("(4,)")))
    place = data.index(b"PK\1\2")
    data[place + 20 : place + 28] = b"\xff" * 8
    data[place + 30 : place + 32] = struct.pack("<H", len(extra))
    name = place + 46 + len("w.npy")
    data[name:name] = extra
    end = data.index(b"PK\5\6")
    data[end + 12 : end + 16] = struct.pack("<I", end - place)
    return bytes(data)


# ---- files that take much ----

ENCODE = b"c_codecs\nencode\nq\0" + text(b"a" * (8 << 20)) + b"q\1" + text(b"latin1") + b"q\2"
COPIED = b"cbuiltins\nbytearray\nq\0B" + struct.pack("<I", 8 << 20) + b"b" * (8 << 20) + b"q\1\x85R"
MANY_KEYS = b"".join(text(b"k%06d" % number) + b"N" for number in range(100_000))
COLLIDING = b"".join(
    b"\x8a\x0f" + ((2**61 - 1) * number).to_bytes(15, "little") + b"Ns" for number in range(1, 400_000)
)
TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"0") + text(b"cpu")
    + b"K\4tQK\0K\2\x85K\1\x85\x89ccollections\nOrderedDict\n)RtR"
)  # fmt: skip
SHARED = b"".join(b"]q%c(" % number + b"h%c" % (number - 1) * 10 + b"e" for number in range(1, 20))
WEIGHTS = ",".join(f'"t{number}":"f{number}.safetensors"' for number in range(700_000))
HUGE: dict[str, Callable[[], bytes]] = {
    "texts that are encoded again": lambda: pickled(b"](" + ENCODE + b"h\0h\1h\2\x86R" * 100 + b"e"),
    "bytes that are copied again": lambda: pickled(b"](" + COPIED + b"h\0h\1\x85R" * 100 + b"e"),
    "attributes that are copied again": lambda: pickled(
        b"](ccollections\nOrderedDict\nq\0)R}q\1(" + MANY_KEYS + b"ub" + b"h\0)Rh\1b" * 500 + b"e"
    ),
    "a text that takes four bytes a character": lambda: pickled(text(b"a" * (60 << 20) + "\U0001f600".encode())),
    "marks": lambda: pickled(b"(" * (8 << 20)),
    "sets": lambda: pickled(b"](cbuiltins\nset\nq\0" + b"h\0)R" * (2 << 20) + b"e"),
    "objects that are numbered": lambda: pickled(b"N" + b"\x94" * (32 << 20)),
    "a tensor with many names": lambda: pickled(b"]q\0(" + TENSOR + b"e" + SHARED),
    "keys that collide": lambda: pickled(b"}" + COLLIDING),
    "keys that are long tuples": lambda: pickled(b"}q\0(" + b"N" * 100_000 + b"tq\1" + b"h\0h\1Ns" * 100_000),
    "members": lambda: b"PK\3\4" + bytes(26) + (b"PK\1\2" + bytes(42)) * 700_000 + b"PK\5\6" + struct.pack(
        "<8xIIH", 46 * 700_000, 30, 0
    ),
    "JSON of empty lists": lambda: header("[" + "[]," * (20 << 20) + "[]]"),
    "JSON of names": lambda: header("{" + ",".join(f'"{number}":0' for number in range(2_000_000)) + "}"),
    "JSON of one wide text": lambda: header('{"__metadata__":{"a":"' + "x" * (90 << 20) + '\U0001f600"}}'),
    "JSON of escapes": lambda: header('{"__metadata__":{"a":"' + "x" * (80 << 20) + '\\ud83d\\ude00"}}'),
    "an index of many files": lambda: f'{{"weight_map":{{{WEIGHTS}}}}}'.encode(),
    "texts of GGUF": lambda: b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0) + bytes(96 << 20),
    "headers of arrays": lambda: zipped(
        **{f"a{number}_dot_npy": npy("(0,)", "f4," * 3000 + "f4") for number in range(2000)}
    ),
}  # fmt: skip

# ---- files that are damaged ----

DAMAGED: dict[str, bytes] = {
    "member without a name.npz": zipped(**{"": b"x", "a_dot_npy": npy("(4,)")}),
    "number in no extra field.npz": long_member(b""),
    "number in a cut extra field.npz": long_member(b"\1\0\x10\0" + bytes(9)),
    "disks.npz": zipped(a_dot_npy=npy("(4,)"))[:-22] + b"PK\6\7" + b"\xff" * 16 + b"PK\5\6" + b"\xff" * 16 + bytes(2),
    "digits.npy": npy(f"(0, {'9' * 3000}, {'9' * 3000})"),
    "product.npy": npy(f"({'9' * 3000}, {'9' * 3000})"),
    "truths.npy": npy("(True, 4)"),
    "dimensions.npy": npy(f"({'1,' * 100})"),
    "NUL.index.json": b'{"weight_map":{"a":"x\\u0000y.safetensors"}}',
    "empty.index.json": b'{"weight_map":{}}',
    "number.index.json": b'{"weight_map":{"a":5}}',
    "half a character.index.json": b'{"weight_map":{"a":"\\ud800.safetensors"}}',
    "list.index.json": b'{"weight_map":["a"]}',
    "deep.index.json": b"[" * 1_000_000,
    "outside.index.json": b'{"weight_map":{"a":"../a.safetensors"}}',
    "name.safetensors": header('{"%s":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}' % ("x" * 100_000)),
    "extent.safetensors": header('{"a":{"dtype":"U8","shape":[0,18446744073709551615],"data_offsets":[0,0]}}')[:-4],
    "dtype.safetensors": header('{"a":{"dtype":%s,"shape":[4],"data_offsets":[0,4]}}' % ("[" * 900 + "]" * 900)),
    "extent.gguf": b"GGUF"
    + struct.pack("<IQQQ", 3, 1, 0, 1)
    + b"w"
    + struct.pack("<I2QIQ", 2, 0, (1 << 64) - 1, 0, 0)
    + bytes(64),
    "long number.pt": pickled(b"\x8b" + struct.pack("<I", 1 << 20) + b"\x7f" * (1 << 20)),
    "long key.pt": pickled(b"}" + text(b"k" * 100_000) + b"Ns"),
}  # fmt: skip


def peak_of(work: Callable[[], Any]) -> tuple[int, float]:
    """How much memory the call added at its peak, and how much processor time it took."""

    def kilobytes(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")
    before, start = kilobytes("VmRSS"), time.thread_time()
    work()
    return (kilobytes("VmHWM") - before) << 10, time.thread_time() - start


def check_limits(path: Path, work: Callable[[], Any]) -> None:
    used, seconds = peak_of(work)
    assert used <= BYTES, f"{path.name} took {used >> 20} MiB"
    assert seconds <= SECONDS + PAST, f"{path.name} took {seconds:.1f} s"


@pytest.fixture(scope="module", autouse=True)
def readers_are_loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the readers load once does not count."""
    path = tmp_path_factory.mktemp("one") / "array.npy"
    np.save(path, np.ones(3))
    gpufs_here("inspect", path)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in HUGE])
def test_files_that_take_much(root: Path, host: Path, name: str) -> None:
    """They are refused before they have taken it."""
    for folder in (root, host):
        path = folder / ("a.safetensors.index.json" if "index" in name else "file")
        path.write_bytes(HUGE[name]())
    check_limits(path, lambda: gpufs_here("inspect", host / path.name, check=False))

    def load() -> None:
        with pytest.raises(FormatError):
            gpufs.torch.load(root / path.name)

    check_limits(path, load)


def test_a_file_that_copies_its_text_again(root: Path) -> None:
    """The one of them that takes no time."""
    (root / "file.pt").write_bytes(HUGE["texts that are encoded again"]())

    def load() -> None:
        with pytest.raises(FormatError):
            gpufs.torch.load(root / "file.pt")

    check_limits(root / "file.pt", load)


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(root: Path, name: str) -> None:
    path = root / name.replace(" ", "-").replace(".index", ".safetensors.index")
    path.write_bytes(DAMAGED[name])
    done = gpufs_here("inspect", path, check=False)
    assert "internal error" not in done.stderr
    assert len(done.stderr) < 2000
    with suppress(FormatError), warnings.catch_warnings(action="ignore"):
        found = gpufs.torch.load(path)
        assert name == "member without a name.npz" and list(found) == ["a"]  # noqa: PT018


# ---- mutations ----


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a saved object, in its order."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def by_reference(path: Path, kind: str) -> list[torch.Tensor]:
    """What the format's own reader finds. ValueError or whatever it likes if it refuses the file."""
    if kind == "safetensors":
        with safetensors.safe_open(path, "pt") as file:
            return [file.get_tensor(name) for name in file.offset_keys()]
    if kind == "torch":
        # Without mmap it returns whatever is in its memory for a member that another part of the archive contradicts.
        return tensors_in(torch.load(path, weights_only=True, mmap=True))
    if kind in ("npy", "npz"):
        loaded = np.load(path)
        arrays = [loaded[name] for name in loaded.files] if kind == "npz" else [loaded]
        return [torch.from_numpy(each.copy()) for each in arrays if each.dtype.kind in "biufc"]
    raise ValueError("there is no other reader")


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(
        (one.dtype, one.shape) == (other.dtype, other.shape)
        and torch.equal(
            *(each.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) for each in (one, other))
        )
        for one, other in zip(ours, theirs, strict=True)
    )


def seeds() -> dict[str, list[bytes]]:
    """Small files of each format."""
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    objects = OrderedDict(x=tensors["a"].t(), y=[torch.nn.Parameter(tensors["b"]), {1, 2}, b"ab", 2.5, (3, None)])
    files: dict[str, list[bytes]] = {"safetensors": [], "torch": [], "npy": [], "npz": [], "gguf": [], "index": []}
    files["safetensors"].append(safetensors.torch.save(tensors, {"format": "pt"}))
    for value in (tensors, objects, [torch.ones(2, dtype=torch.complex64).conj(), torch.float8_e5m2, torch.Size([2])]):
        for protocol in (2, 4):
            file = io.BytesIO()
            torch.save(value, file, pickle_protocol=protocol)
            files["torch"].append(file.getvalue())
    for array in (np.arange(6.0).reshape(2, 3), np.asfortranarray(np.ones((2, 2), ">i2")), np.array(["a", "bc"])):
        file = io.BytesIO()
        np.save(file, array)
        files["npy"].append(file.getvalue())
    file = io.BytesIO()
    np.savez(file, a=np.arange(4), words=np.array(["a"]), b=np.ones((2, 2), "f2"))
    files["npz"].append(file.getvalue())
    named = struct.pack("<Q", 1) + b"w" + struct.pack("<I2QIQ", 2, 4, 3, 0, 0)
    words = struct.pack("<Q", 5) + b"words" + struct.pack("<IIQQ", 9, 8, 1, 2) + b"ab"
    gguf = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + words + named
    files["gguf"].append(gguf + bytes(-len(gguf) % 32 + 48))
    weights = {"a": "one.safetensors", "b": "one.safetensors"}
    files["index"].append(json.dumps({"metadata": {"total_size": 30}, "weight_map": weights}).encode())
    return files


def mutated(chance: random.Random, seed: bytes, others: list[bytes]) -> bytes:
    data = bytearray(seed)
    for _ in range(chance.choice((1, 1, 2, 4))):
        place = chance.randrange(len(data) + 1)
        length = chance.choice((1, 2, 4, 8, chance.randrange(1, 64)))
        number = chance.choice(NUMBERS)
        kind = chance.randrange(9)
        if kind == 0 and data:
            data[place % len(data)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[place : place + length] = chance.randbytes(length)
        elif kind == 2:
            width = chance.choice((1, 2, 4, 8))
            data[place : place + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        elif kind == 3:
            del data[place : place + length]
        elif kind == 4:
            data[place:place] = data[place : place + length] * chance.choice((1, 2, 100))
        elif kind == 5:
            other = chance.choice(others)
            begin = chance.randrange(len(other))
            data[place : place + length] = other[begin : begin + length]
        elif kind == 6:
            del data[place:]
        elif kind == 7:
            digits = [index for index, byte in enumerate(data) if chr(byte).isdigit()] or [place]
            begin = chance.choice(digits)
            words = (str(number), "-1", "9" * 3000, "1e400", "NaN", "[]", '"\\ud800"', "True", "None")
            data[begin : begin + 1] = chance.choice(words).encode()
        else:
            pickles = [data.find(each) for each in (b"\x80\x02", b"\x80\x04") if each in data]
            begin = pickles[0] + 2 if pickles else place
            codes = b"".join(
                getattr(pickle, name)
                for name in chance.choices(
                    [name for name in pickle.__all__ if type(getattr(pickle, name)) is bytes], k=4
                )
            )
            data[begin : begin + len(codes)] = codes
    return bytes(data)


def read_or_refused(path: Path, copy: Path, kind: str) -> bool:
    """Whether both readers took a file. It is on the mount, and as a copy on the host."""
    found: list[Any] = []

    def load() -> None:
        with suppress(FormatError, *([OSError] if kind == "index" else [])):
            found.append(gpufs.torch.load(path))

    check_limits(copy, load)
    done = gpufs_here("inspect", "--stats", "--json", copy, check=False)
    assert "internal error" not in done.stderr, done.stderr
    if not found:
        return False
    try:
        theirs = by_reference(copy, kind)
    except Exception:  # noqa: BLE001 - whatever it likes
        return False
    assert same(tensors_in(found[0]), theirs)
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [250, pytest.param(30_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_mutated_files(root: Path, host: Path, count: int) -> None:
    """Each is read as the reference reads it, or refused."""
    start = 7 if count < 1000 else time.time_ns()
    chance = random.Random(start)
    files = seeds()
    everything = [data for group in files.values() for data in group]
    (root / "one.safetensors").write_bytes(files["safetensors"][0])
    taken = 0
    for number in range(count):
        kind = chance.choice(list(files))
        data = mutated(chance, chance.choice(files[kind]), everything)
        suffix = {"safetensors": ".safetensors", "npy": ".npy", "index": ".safetensors.index.json"}.get(kind, "")
        path, copy = root / f"file{suffix}", host / f"file{suffix}"
        path.write_bytes(data)
        copy.write_bytes(data)
        try:
            taken += read_or_refused(path, copy, kind)
        except BaseException:
            print(f"file {number} of the seed {start}: {data!r}")
            raise
        path.unlink()
    assert taken > count // 50, f"{taken} of {count} files were taken by both"
