"""Chooses the tensors of a file that are copied for their addresses: kernels load 16 bytes, from multiples of 16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpufs.formats.placement import LOAD_BYTES
from gpufs.formats.safetensors import HeaderEntry

_SMALLEST: Final = 256  # bytes; smaller tensors take no time
_MOST_BYTES: Final = 16 << 20  # of one file


def misplaced(entries: Mapping[str, HeaderEntry], address: int) -> frozenset[str]:
    """Return the tensors that are worth a copy at an aligned address.

    A file lies in memory where most bytes of its tensors are aligned. Some follow tensors of odd sizes and cannot be
    aligned together with the others. The smallest of those are copied, up to 16 MiB in sum, so that few are left.

    Parameters
    ----------
    entries
        The tensors of the file.
    address
        Where their bytes begin in memory.
    """
    odd = (
        (entry.end - entry.start, name)
        for name, entry in entries.items()
        if entry.end - entry.start >= _SMALLEST and (address + entry.start) % LOAD_BYTES
    )
    chosen, left = set(), _MOST_BYTES
    for size, name in sorted(odd):
        left -= size
        if left < 0:
            break
        chosen.add(name)
    return frozenset(chosen)
