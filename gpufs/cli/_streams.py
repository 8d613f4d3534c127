"""Standard streams that were closed when the command began."""

import os
import sys


def open_closed() -> None:
    """Gives each closed standard stream something to be.

    Without that the next file that is opened gets its number, and what is meant for the terminal goes there. Output
    that is wanted fails as it should: standard output cannot be written. Messages have nowhere to go and are lost.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number is this one. Children get it as they would get any standard stream.
            os.set_inheritable(os.open(os.devnull, os.O_WRONLY if fd == 2 else os.O_RDONLY), True)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", errors="surrogateescape", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", errors="surrogateescape", closefd=False)
