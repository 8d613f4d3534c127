"""Writes or checks a part of a file whose every 4 KiB page holds its own offset.

stamped.py write|read FILE START BYTES

Ends with 1 at the first page that holds something else.
"""

from __future__ import annotations

import os
import sys

import numpy as np

BLOCK = 64 << 20
PAGE = 4096


def main(mode: str, path: str, start: int, size: int) -> int:
    rng = np.random.default_rng(1)
    block = rng.integers(0, 1 << 63, BLOCK // 8, dtype=np.uint64).reshape(-1, PAGE // 8)
    found = np.empty_like(block)
    descriptor = os.open(path, os.O_RDWR)
    for offset in range(start, start + size, BLOCK):
        block[:, 0] = np.arange(offset, offset + BLOCK, PAGE, dtype=np.uint64)
        if mode == "write":
            done = 0
            while done < BLOCK:
                done += os.pwrite(descriptor, block.data.cast("B")[done:], offset + done)
            continue
        done = 0
        while done < BLOCK:
            count = os.preadv(descriptor, [found.data.cast("B")[done:]], offset + done)
            if count == 0:
                print(f"the file ends at {offset + done}", file=sys.stderr)
                return 1
            done += count
        if not np.array_equal(block, found):
            page = int(np.flatnonzero((block != found).any(axis=1))[0])
            print(f"the page at {offset + page * PAGE} differs", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
