"""Standard streams that were closed when the command began."""

import os
import sys


def open_closed() -> None:
    """Opens /dev/null for each closed standard stream.

    Otherwise the next file that is opened gets its number and receives the output. Reading standard input and writing
    to standard output fail, as they should; messages are lost.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # This is the lowest free number. Children inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY if fd == 1 else os.O_WRONLY), True)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", errors="surrogateescape", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", errors="surrogateescape", closefd=False)
