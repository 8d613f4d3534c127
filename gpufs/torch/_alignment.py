"""Which tensors of a file are copied for their addresses: kernels load 16 bytes at a time, from multiples of 16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from gpufs.formats.safetensors import HeaderEntry

ALIGNMENT: Final = 16
_PLACES: Final = 8
_SMALLEST: Final = 256  # bytes; smaller tensors take no time
_MOST_BYTES: Final = 16 << 20  # of one file


def misplaced(entries: Mapping[str, HeaderEntry], start: int, address: int) -> frozenset[str]:
    """Return the tensors that are worth a copy at an aligned address.

    As a rule most bytes of tensors begin at one remainder of 16, and the place of the file in memory decides about all
    of them. Others, which follow tensors of odd sizes, cannot be aligned together with them. The smallest of those are
    copied, up to 16 MiB in sum, so that few tensors are left.

    Parameters
    ----------
    entries
        The tensors of the file.
    start
        The offset in the file where their bytes begin.
    address
        The same in memory.
    """
    bytes_at: Counter[int] = Counter()
    for entry in entries.values():
        bytes_at[(start + entry.start) % ALIGNMENT] += entry.end - entry.start
    # A file lies at multiples of 8.
    usual = max(range(0, ALIGNMENT, _PLACES), key=bytes_at.__getitem__)
    if len(bytes_at) == 1 and bytes_at[usual]:
        return frozenset()
    odd = (
        (entry.end - entry.start, name)
        for name, entry in entries.items()
        if entry.end - entry.start >= _SMALLEST
        and (start + entry.start) % ALIGNMENT != usual
        and (address + entry.start) % ALIGNMENT
    )
    chosen, left = set(), _MOST_BYTES
    for size, name in sorted(odd):
        left -= size
        if left < 0:
            break
        chosen.add(name)
    return frozenset(chosen)
