"""The bytes of a file that is looked into, read in blocks."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from errno import EBADF, EINVAL, EIO, EISDIR, ENOSPC
from types import TracebackType
from typing import Final, Self, TypeVar

from gpufs.cli._errors import Failure
from gpufs.client._daemons import mounts_by_device
from gpufs.client._ends import Entry, open_path, path_of
from gpufs.client._outcome import text_of
from gpufs.client._room import place_of
from gpufs.formats import FormatError
from gpufs.formats.layout import Layout, TensorPlace, read_layout

_THREADS: Final = 4

Key = TypeVar("Key")
Result = TypeVar("Result")


class Contents:
    """An open file. Any thread may read.

    Attributes
    ----------
    size, held_bytes
        The file's size, and the memory or disk that it uses, in bytes.
    place
        What holds it: "gpu0", or the host's file system.
    """

    def __init__(self, path: str) -> None:
        """Raises OSError if the file cannot be read, or is not a regular file."""
        named = open_path(Entry.of(path))  # opening a FIFO or a device in another way has effects
        try:
            kind = os.fstat(named).st_mode
            if not stat.S_ISREG(kind):
                error = EISDIR if stat.S_ISDIR(kind) else EINVAL
                raise OSError(error, "is a directory" if error == EISDIR else "is not a regular file", path)
            self._fd = os.open(path_of(named), os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(named)
        status = os.fstat(self._fd)
        self.path = path
        self.size = status.st_size
        self.held_bytes = status.st_blocks * 512
        self.place = place_of(self._fd, mounts_by_device().get(status.st_dev, []))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def layout(self) -> Layout | None:
        """The tensors in the file, None if it is not a file of tensors. FormatError if its header is damaged."""
        return read_layout(self.path, self.size, lambda offset, count: bytes(self.read(offset, count)))

    def read(self, offset: int, count: int) -> memoryview:
        """Bytes of the file. OSError EIO if it has become shorter."""
        block = memoryview(bytearray(count))
        done = 0
        while done < count:
            step = os.preadv(self._fd, [block[done:]], offset + done)
            if not step:
                raise OSError(EIO, f"has become shorter: {offset + done} of {self.size} bytes", self.path)
            done += step
        return block

    def sha256(self) -> str:
        """The SHA-256 of the file, in hexadecimal."""
        import hashlib

        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()


def each_block(
    tensors: Sequence[tuple[Key, TensorPlace]], work: Callable[[TensorPlace, int, int], Result]
) -> Iterator[tuple[Key, Result]]:
    """Calls ``work`` with the blocks of tensors, by start and size, from several threads; its results in order."""
    from gpufs.formats.elements import block_bytes

    pieces = [
        (key, place, start, min(step, place.bytes - start))
        for key, place in tensors
        for step in [block_bytes(place.bits)]
        for start in range(0, place.bytes, step)
    ]
    pool = ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0))))
    try:
        for piece, result in zip(pieces, pool.map(lambda piece: work(*piece[1:]), pieces), strict=True):
            yield piece[0], result
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def reported(path: str, code: int) -> Iterator[None]:
    """Failures of looking into a file end the command with one line and this exit code."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None and error.errno in (ENOSPC, EBADF):
            raise Failure(f"standard output: {text_of(error)}", code) from None
        raise Failure(f"{error.filename or path}: {text_of(error)}", code) from None
    except FormatError as error:
        raise Failure(f"{path}: {error}", code) from None


def finite(value: float | int | None) -> float | int | None:
    """A number that JSON has; None for others."""
    return value if value is None or math.isfinite(value) else None
