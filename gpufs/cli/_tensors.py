"""The tensors of files as `gpufs inspect` and `gpufs diff` read them, in blocks, and the options that both have."""

from __future__ import annotations

import math
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from errno import EBADF, EINVAL, EIO, EISDIR, ENOSPC
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar

import click

from gpufs import mounting
from gpufs.cli._files import held_bytes, raise_descriptor_limit
from gpufs.cli._output import Failure
from gpufs.copying.checksums import sha256_of
from gpufs.copying.entries import Entry, next_data, open_path
from gpufs.exceptions import text_of
from gpufs.formats import FormatError
from gpufs.formats.budget import BoundedFile
from gpufs.formats.checkpoint import CheckpointFiles, find_files, link_error
from gpufs.formats.elements import block_bytes, element_bits, unit_bytes
from gpufs.formats.layout import TYPE_ATTRIBUTE, GivenType, TensorPlace, parse_shape
from gpufs.formats.table import PREFIX_BYTES, Format, NotInPlace, read_layout, recognize
from gpufs.syscalls import closed_after, path_of

REGISTERED: Final = "registered"  # the format of a directory of registered tensors
_THREADS: Final = 4
_MANY_FILES: Final = 512

Result = TypeVar("Result")


def type_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the options that give the type of files without a header."""
    shape = click.option("--shape", metavar="NxM", help="Shape of the elements, with --dtype, for example 256x128.")
    dtype = click.option("--dtype", metavar="TYPE", help="The file is elements of this type alone, such as float32.")
    return dtype(shape(command))


def shape_text(place: TensorPlace) -> str:
    """Return the shape as a user reads it."""
    return ("x".join(map(str, place.shape)) or "scalar") + (" fortran" if place.fortran_order else "")


class Contents:
    """An open file. Any thread may read."""

    def __init__(self, path: str) -> None:
        """Open the file. OSError if it cannot be read, or is not a regular file."""
        try:
            named = open_path(Entry.of(path))  # opening a FIFO or a device in another way has effects
        except OSError as failure:
            raise link_error(failure, path) from None
        with closed_after(named):
            kind = os.fstat(named).st_mode
            if not stat.S_ISREG(kind):
                error = EISDIR if stat.S_ISDIR(kind) else EINVAL
                raise OSError(error, "is a directory" if error == EISDIR else "is not a regular file", path)
            try:
                self._fd = os.open(path_of(named), os.O_RDONLY | os.O_CLOEXEC)
            except OSError as failure:
                raise OSError(failure.errno, failure.strerror, path) from None
        status = os.fstat(self._fd)
        self.path = path
        self.size = status.st_size
        self.held_bytes = held_bytes(status)  # memory or disk that it uses
        # What holds it: "gpu0", or the host's file system.
        self.place = mounting.place_of(self._fd, mounting.by_device().get(status.st_dev, []))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def registered_type(self) -> GivenType | None:
        """Return the type of its elements, if the program that registered it gave one that fits."""
        try:
            given = GivenType.parse(os.getxattr(self._fd, TYPE_ATTRIBUTE).decode("ascii"))
            given.layout(self.size)
        except (OSError, UnicodeDecodeError, FormatError):
            return None
        return given

    def next_data(self, offset: int) -> int:
        """Return the first offset at or after another one that is not in a hole."""
        return next_data(self._fd, offset)[0] if self.held_bytes < self.size else offset

    def read(self, offset: int, count: int) -> memoryview:
        """Read bytes of the file. OSError EIO if it has become shorter."""
        block = memoryview(bytearray(count))
        done = 0
        while done < count:
            step = os.preadv(self._fd, [block[done:]], offset + done)
            if not step:
                raise OSError(EIO, f"has become shorter: {offset + done} of {self.size} bytes", self.path)
            done += step
        return block

    def header(self) -> BoundedFile:
        """Return what reads the header."""
        return BoundedFile.of(self._fd)

    def sha256(self) -> str:
        """Return the SHA-256 of the file, in hexadecimal."""
        return sha256_of(self._fd, lambda: False)


class Tensor(NamedTuple):
    """A tensor, and the open file that it lies in."""

    file: Contents
    place: TensorPlace


def _registered_files(folder: str) -> list[str]:
    """Return the files of a directory that have a type, in the order that people expect: 2 before 10."""
    if not os.path.isdir(folder):
        return []
    with os.scandir(folder) as entries:
        paths = [entry.path for entry in entries if entry.is_file(follow_symlinks=False)]
    typed = [path for path in paths if TYPE_ATTRIBUTE in os.listxattr(path)]
    if len(typed) > _MANY_FILES:  # all are open at the same time
        raise_descriptor_limit()
    return sorted(
        typed, key=lambda path: [int(part) if part.isdigit() else part for part in re.split("([0-9]+)", path)]
    )


class TensorFiles:
    """The open files of one name on the command line: one, those of a checkpoint, or those of registered tensors."""

    def __init__(self, path: str, given: GivenType | None) -> None:
        """Open the files. FormatError if a header or an index is damaged, or ``given`` does not fit; OSError."""
        self.path = path
        self.kind: Format | None = None  # of a file whose tensors are not known
        self.reason: str | None = None  # why not, for a format that gpufs reads
        self.format: str | None = None  # its name, such as "safetensors" or "raw"; None: unknown
        self.metadata: dict[str, str] | None = None
        self.tensors: list[Tensor] = []  # in the order of the files and of their offsets
        self.registered = False  # the program that registered the file gave the type
        self.has_tensors = False  # whether gpufs reads the format, and the tensors are not compressed
        is_checkpoint = os.path.isdir(path) or path.endswith(".safetensors.index.json")
        try:
            checkpoint = find_files(path) if is_checkpoint else CheckpointFiles((path,))
        except FormatError as error:
            raise FormatError(str(error).removeprefix(f"{path}: ")) from None
        except FileNotFoundError:
            checkpoint = CheckpointFiles(tuple(_registered_files(path)))
            if not checkpoint.files:
                raise
            self.format = REGISTERED
        self._opened = ExitStack()
        with self._opened:
            self.files = [self._opened.enter_context(Contents(name)) for name in checkpoint.files]
            for file in self.files:
                if self.format == REGISTERED:
                    self._read_registered(file, given)
                else:
                    self._read(file, given, checkpoint.places)
            if checkpoint.places is not None and len(self.tensors) < len(checkpoint.places):
                missing = checkpoint.places.keys() - {tensor.place.name for tensor in self.tensors}
                raise FormatError(f"the index says where tensor {min(missing)!r} is, and it is not there")
            self._opened = self._opened.pop_all()

    def _read(self, file: Contents, given: GivenType | None, places: dict[str, str] | None) -> None:
        layout = reason = None
        try:
            try:
                layout = read_layout(file.path, file.header()) if given is None else given.layout(file.size)
            except NotInPlace as error:
                reason = str(error)
            if layout is None and (registered := file.registered_type()) is not None:
                layout, self.registered = registered.layout(file.size), True
            if layout is None:
                self.kind, self.reason = recognize(file.header().beginning(PREFIX_BYTES)), reason
                self.format = None if self.kind is None else self.kind.name
                if places is not None:
                    raise FormatError("is not a safetensors file")
        except FormatError as error:
            raise FormatError(str(error) if file.path == self.path else f"{file.path}: {error}") from None
        if layout is not None:
            self.format, self.has_tensors = layout.format, True
            self.metadata = self.metadata or layout.metadata
            self.tensors += [
                Tensor(file, place) for place in layout.tensors if places is None or places.get(place.name) == file.path
            ]

    def _read_registered(self, file: Contents, given: GivenType | None) -> None:
        known = given or file.registered_type()
        if known is not None:
            (place,) = known.layout(file.size).tensors
            self.tensors.append(Tensor(file, replace(place, name=os.path.basename(file.path))))
            self.registered = self.has_tensors = True

    def places(self) -> str:
        """Return what holds the files: "gpu0", or "gpu0 and gpu1"."""
        return " and ".join(dict.fromkeys(filter(None, (file.place for file in self.files))))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


class Part(NamedTuple):
    """A part of a tensor. ``hole``: it has no memory, and reads as zeros."""

    number: int
    start: int
    size: int
    hole: bool


def first_element(place: TensorPlace, start: int) -> int:
    """Return the number of the element that begins at a byte of the tensor."""
    return 8 * start // max(place.bits, 1)


def index_of(place: TensorPlace, number: int) -> list[int]:
    """Return the index of an element in its tensor."""
    extents = place.shape if place.fortran_order else place.shape[::-1]
    index = []
    for extent in extents:  # the dimension that changes fastest is first
        number, rest = divmod(number, extent)
        index.append(rest)
    return index if place.fortran_order else index[::-1]


def split(number: int, place: TensorPlace, next_data: Callable[[int], int]) -> Iterator[Part]:
    """Yield parts of a tensor in blocks of whole elements; a hole is one part.

    ``next_data``: the first offset in the file, at or after another one, that is not in a hole.
    """
    unit, step = unit_bytes(place.bits), block_bytes(place.bits)
    start = 0
    while start < place.bytes:
        hole = (min(next_data(place.offset + start) - place.offset, place.bytes) - start) // unit * unit
        size = hole or min(step, place.bytes - start)
        yield Part(number, start, size, bool(hole))
        start += size


def map_blocks(parts: Iterable[Part], work: Callable[[Part], Result]) -> Iterator[tuple[int, Result]]:
    """Call ``work`` with parts from several threads; the numbers of their tensors and the results, in order."""
    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    pool = ThreadPoolExecutor(threads)
    running: deque[tuple[int, Future[Result]]] = deque()
    try:
        for part in parts:
            running.append((part.number, pool.submit(work, part)))
            if len(running) > 2 * threads:
                number, future = running.popleft()
                yield number, future.result()
        while running:
            number, future = running.popleft()
            yield number, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def given_type(dtype: str | None, shape: str | None) -> GivenType | None:
    """Return the type that the options --dtype and --shape give. Failure if they are wrong."""
    if dtype is None:
        if shape is not None:
            raise Failure("--shape needs --dtype", 2)
        return None
    try:
        element_bits(dtype)
        return GivenType(dtype, None if shape is None else parse_shape(shape))
    except FormatError as error:
        raise Failure(str(error), 2) from None


@contextmanager
def reported(path: str, code: int) -> Iterator[None]:
    """End the command with one line and this exit code if reading a file fails."""
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
    """Return a number that JSON has; None for others."""
    return value if value is None or math.isfinite(value) else None
