"""Chooses where in its memory a file begins, so that its tensors are aligned for the kernels that use them.

And the tensors that are copied because they are not.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from gpufs.formats import FormatError, safetensors
from gpufs.formats.budget import BudgetExceeded
from gpufs.formats.checkpoint import bounded
from gpufs.formats.table import read_layout

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

    None for a file that cannot be read, has no tensors, or is damaged: whatever uses it reports why. FormatError if
    that took too long: it is not tried again.
    """
    try:
        with bounded(path) as file:
            found = None if file is None else read_layout(path, file)
    except BudgetExceeded as error:
        raise FormatError(f"{path}: {error}") from None
    except (OSError, FormatError):
        return None
    if found is None or not found.tensors:
        return None
    return best_placement((tensor.offset, tensor.bytes) for tensor in found.tensors)


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
