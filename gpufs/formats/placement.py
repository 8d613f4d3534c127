"""Chooses where in its memory a file begins, so that its tensors are aligned for the kernels that use them.

And the tensors that are copied because they are not.
"""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from gpufs.formats import FormatError, safetensors

END: Final = 256  # a GPU's allocations are aligned to that, and so are the tensors of a file whose data begins there
_WORD: Final = 8  # the strictest alignment of an element
LOAD_BYTES: Final = 16  # of a kernel at a time: tensors at other addresses take slower kernels, or none
_SMALLEST_COPIED: Final = 256  # bytes; smaller tensors take no time
_MOST_COPIED_BYTES: Final = 16 << 20  # of one file


def best_placement(tensors: Iterable[tuple[int, int]]) -> int:
    """Choose the placement that aligns most, by the offset and bytes of each tensor in the file.

    It is below 256. With it most bytes of tensors begin at a multiple of 16, and as many as possible of 256. Of equal
    ones a multiple of 8, since views of the whole file then stay aligned, too, and the smallest.
    """
    offsets, sizes = np.array([*tensors], np.uint64).reshape(-1, 2).T
    remainders = np.arange(END)
    by_remainder = np.bincount((offsets % END).astype(np.intp), weights=sizes, minlength=END)

    def aligned(placement: int, alignment: int) -> float:
        return float(by_remainder[(remainders + placement) % alignment == 0].sum())

    return max(
        range(END),
        key=lambda placement: (aligned(placement, LOAD_BYTES), aligned(placement, END), placement % _WORD == 0),
    )


def file_placement(path: str) -> int | None:
    """Choose the placement of a file by what is in it.

    None for a file that cannot be read, has no tensors, or is damaged: whatever uses it reports why.
    """
    if not os.path.isfile(path):  # opening a FIFO would wait
        return None
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size

            def read(offset: int, count: int) -> bytes:
                return os.pread(file.fileno(), count, offset)

            prefix = read(0, safetensors.LENGTH_BYTES + 1)
            if prefix.endswith(b"{"):
                return best_placement(_in_safetensors(read(0, _data_start(prefix, size))))
            from gpufs.formats.table import read_layout  # which programs of safetensors alone need not load

            found = read_layout(path, size, read)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, FormatError):
        return None
    if found is None or not found.tensors:
        return None
    return best_placement((tensor.offset, tensor.bytes) for tensor in found.tensors)


def _data_start(prefix: bytes, size: int) -> int:
    """Return the offset at which the tensors of a safetensors file begin."""
    return safetensors.LENGTH_BYTES + safetensors.header_bytes(prefix, size)


def _in_safetensors(header: bytes) -> Iterable[tuple[int, int]]:
    """Offsets and bytes by a header that has not been checked: a wrong one only places the file in another way."""
    fields = json.loads(header[safetensors.LENGTH_BYTES :])
    for name, entry in fields.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield len(header) + start, end - start


def misplaced(entries: Mapping[str, safetensors.HeaderEntry], address: int) -> frozenset[str]:
    """Return the tensors that are worth a copy at an aligned address. ``address``: where their bytes begin in memory.

    A file lies in memory where most bytes of its tensors are aligned. Some follow tensors of odd sizes and cannot be
    aligned together with the others. The smallest of those are copied, up to 16 MiB in sum, so that few are left.
    """
    odd = (
        (entry.end - entry.start, name)
        for name, entry in entries.items()
        if entry.end - entry.start >= _SMALLEST_COPIED and (address + entry.start) % LOAD_BYTES
    )
    chosen, left = set(), _MOST_COPIED_BYTES
    for size, name in sorted(odd):
        left -= size
        if left < 0:
            break
        chosen.add(name)
    return frozenset(chosen)
