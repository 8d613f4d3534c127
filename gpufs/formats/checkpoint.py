"""The files of a checkpoint: one file, or those that an index names."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from gpufs.formats import FormatError
from gpufs.formats.budget import BoundedFile
from gpufs.formats.safetensors import parse_json
from gpufs.syscalls import closed_after

INDEX_NAME: Final = "model.safetensors.index.json"
FILE_NAME: Final = "model.safetensors"
_TENSOR_BYTES: Final = 256  # what the place of a tensor takes, besides the path


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files that the path of a checkpoint stands for."""

    files: tuple[str, ...]  # the paths of the files, in the order of their names
    # The path of the file of each tensor, in the order of the files; None without an index.
    places: dict[str, str] | None = None


def find_files(path: str | os.PathLike[str]) -> CheckpointFiles:
    """Find the files of a checkpoint, whether or not they exist.

    ``path``: a file of tensors, an index (its name ends with .json), or a directory with one of them under its usual
    name; in a directory with both it is the file. FormatError if the index is damaged. OSError if the directory has
    neither file, or the index cannot be read.
    """
    name = os.fspath(path)
    if os.path.isdir(name):
        # transformers also takes the single file, whatever index an earlier version of the model has left.
        candidates = (os.path.join(name, file) for file in (FILE_NAME, INDEX_NAME))
        found = next((candidate for candidate in candidates if os.path.lexists(candidate)), None)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, _without_checkpoint(name), name)
        name = found
    if not name.endswith(".json"):
        return CheckpointFiles((name,))
    places = _read_index(name)
    return CheckpointFiles(tuple(dict.fromkeys(places.values())), places)


def _without_checkpoint(folder: str) -> str:
    text = f"the directory has neither {INDEX_NAME} nor {FILE_NAME}"
    names = sorted(name for name in os.listdir(folder) if name.endswith((".safetensors", ".safetensors.index.json")))
    if not names:
        return text
    return f"{text}, but {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}: give the name of one"


def link_error(error: OSError, path: str) -> OSError:
    """Return the error of opening a file; it names the target of a link to nowhere or off the mount."""
    if error.errno in (errno.ENOENT, errno.EXDEV) and os.path.islink(path):
        target = os.readlink(path)
        place = "does not exist" if error.errno == errno.ENOENT else "is not on a gpufs mount"
        text = f"is a symbolic link to {target}, which {place}: `gpufs cp -rL` copies files instead of links"
        return OSError(error.errno, text, path)
    return error


def _read_index(path: str) -> dict[str, str]:
    """Return the path of the file of each tensor, in the order of the files' names."""
    folder = os.path.dirname(path)
    paths: dict[str, str] = {}
    with bounded(path) as file:
        if file is None:
            raise OSError(errno.EINVAL, "is not a regular file", path)
        try:
            places = parse_json(file.read(0, file.size), file)["weight_map"]
            for tensor, name in places.items():
                file.take(_TENSOR_BYTES + len(folder) + len(name))
                if name not in paths:
                    parts = PurePosixPath(name).parts
                    if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
                        raise ValueError(f"{name[:100]!r} is not a file below the index")
                    paths[name] = os.path.join(folder, name)
                places[tensor] = paths[name]
            if not places:
                raise ValueError("it names no tensors")
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
            raise FormatError(f"{path}: it is not an index of safetensors files: {error}") from None
    return dict(sorted(places.items(), key=lambda item: item[1]))


def read_beginning(path: str, count: int) -> bytes | None:
    """Return the first bytes of a file; None unless it is a regular one."""
    with bounded(path) as file:
        return None if file is None else file.beginning(count)


@contextmanager
def bounded(path: str) -> Iterator[BoundedFile | None]:
    """Open a file to read its header. None if it is not a regular one: others may have put a FIFO there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise link_error(error, path) from None
    with closed_after(fd):
        yield BoundedFile.of(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else None
