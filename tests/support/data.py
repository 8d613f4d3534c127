"""Reproducible data, models of files, and comparisons that report the first difference."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GRANULE = 2 * MIB


@functools.lru_cache(maxsize=4)  # a test asks for the same again, to compare
def noise(count: int, seed: int = 0) -> bytes:
    """count pseudo-random bytes, the same for the same seed."""
    if count > 64 * MIB:  # the generator's largest request is 256 MiB
        parts = (noise(min(64 * MIB, count - at), seed + at) for at in range(0, count, 64 * MIB))
        return b"".join(parts)
    return random.Random(seed).randbytes(count)


def assert_same(actual: bytes | memoryview, expected: bytes | memoryview, what: str = "contents") -> None:
    """Fails with the offset of the first difference, not with megabytes of bytes."""
    if actual == expected:
        return
    if len(actual) != len(expected):
        raise AssertionError(f"{what}: {len(actual)} bytes, expected {len(expected)}")
    first = next(i for i in range(len(actual)) if actual[i] != expected[i])
    there, wanted = bytes(actual[first : first + 16]).hex(), bytes(expected[first : first + 16]).hex()
    raise AssertionError(f"{what}: first difference at {first}: {there}, expected {wanted}")


@dataclass(eq=False)
class Model:
    """What one file should be."""

    data: bytearray = field(default_factory=bytearray)
    links: int = 1  # 0: without a name

    def write(self, at: int, data: bytes) -> None:
        if at > len(self.data):
            self.data.extend(bytes(at - len(self.data)))
        self.data[at : at + len(data)] = data

    def resize(self, size: int) -> None:
        if size < len(self.data):
            del self.data[size:]
        else:
            self.data.extend(bytes(size - len(self.data)))

    def clear(self, at: int, count: int) -> None:
        end = min(at + count, len(self.data))
        if at < end:
            self.data[at:end] = bytes(end - at)


def consists_of(content: bytes, allowed: bytes) -> bool:
    """True if no other byte values occur."""
    return not content.translate(None, allowed)


def read_all(path: str | os.PathLike[str]) -> bytes:
    return Path(path).read_bytes()


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """pwrite until everything is written."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def remove_tree(path: Path) -> None:
    """rm -r; a file may vanish meanwhile, as a registration's does after the program that made it has ended."""

    def failed(_function: object, _path: str, error: tuple[Any, BaseException, Any]) -> None:
        if not isinstance(error[1], FileNotFoundError):
            raise error[1]

    shutil.rmtree(path, onerror=failed)


@contextlib.contextmanager
def directory(parent: str) -> Iterator[Path]:
    """An empty directory of mode 777 below another one."""
    path = Path(tempfile.mkdtemp(prefix="gpufs-client-", dir=parent))
    path.chmod(0o777)
    try:
        yield path
    finally:
        remove_tree(path)


def sha256(path: str | os.PathLike[str]) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# What SELECTION chooses of make_model(), as `gpufs cp -r` takes it.
SELECTION = ("--include", "*.safetensors", "--include", "sub/*.bin", "--exclude", "original", "--exclude", "sub/d*")
SELECTED = ["a.safetensors", "sub/b.safetensors", "sub/c.bin"]


def make_model(path: Path) -> None:
    """A directory of which SELECTION chooses a part."""
    others = ["c.bin", "notes.txt", "original/a.safetensors", "sub/d.bin", "sub/deep/notes.txt"]
    for name in (*SELECTED, *others):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)


def files_below(path: Path) -> list[str]:
    """The files below a directory, which contain their names."""
    found = sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())
    assert [(path / name).read_text() for name in found] == found
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a directory, with what they contain."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def left(directory: Path) -> list[str]:
    """The names in a directory."""
    return sorted(os.listdir(directory))
