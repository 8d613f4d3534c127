"""The files of a checkpoint: one file, or those that an index names."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from gpufs.formats import FormatError
from gpufs.formats.safetensors import MAX_HEADER_BYTES, parse_json

INDEX_NAME: Final = "model.safetensors.index.json"
FILE_NAME: Final = "model.safetensors"


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
    folder = os.path.dirname(name)
    places = {tensor: os.path.join(folder, file) for tensor, file in _read_index(name).items()}
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
    """Return the file of each tensor, in the order of the file names."""
    try:
        places = parse_json(_read_text(path))["weight_map"]
        for name in places.values():
            parts = PurePosixPath(name).parts
            if not parts or parts[0] == "/" or ".." in parts:
                raise ValueError(f"{name!r} is not a file below the index")
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"{path} is not an index of safetensors files: {error}") from None
    return dict(sorted(places.items(), key=lambda item: item[1]))


def read_beginning(path: str, count: int) -> bytes | None:
    """Return the first bytes of a file; None unless it is a regular one: others may have put anything there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise link_error(error, path) from None
    with open(fd, "rb") as file:
        return file.read(count) if stat.S_ISREG(os.fstat(fd).st_mode) else None


def _read_text(path: str) -> str:
    data = read_beginning(path, MAX_HEADER_BYTES + 1)
    if data is None:
        raise OSError(errno.EINVAL, "is not a regular file", path)
    if len(data) > MAX_HEADER_BYTES:
        raise ValueError(f"it has more than {MAX_HEADER_BYTES} bytes")
    return data.decode("utf-8")
