"""Where in its memory a file should begin, so that its tensors are aligned for the kernels that use them."""

from collections.abc import Iterable
from typing import Final

import numpy as np

UNIT: Final = 8  # what a file may be moved by
END: Final = 256  # a GPU's allocations are aligned to that, and so are the tensors of a file whose data begins there
_LOADS: Final = 16  # the bytes that a kernel loads at a time: tensors at other addresses take slower kernels, or none


def best_placement(tensors: Iterable[tuple[int, int]]) -> int:
    """Choose the placement that aligns most.

    Parameters
    ----------
    tensors
        Offset and bytes of each tensor in the file.

    Returns
    -------
    int
        A multiple of 8 below 256. With it most bytes of tensors begin at a multiple of 16, and as many as possible of
        256; the smallest of equal ones.
    """
    offsets, sizes = np.array([*tensors], np.uint64).reshape(-1, 2).T
    remainders = np.arange(END)
    by_remainder = np.bincount((offsets % END).astype(np.intp), weights=sizes, minlength=END)

    def aligned(placement: int, alignment: int) -> float:
        return float(by_remainder[(remainders + placement) % alignment == 0].sum())

    return max(range(0, END, UNIT), key=lambda placement: (aligned(placement, _LOADS), aligned(placement, END)))
