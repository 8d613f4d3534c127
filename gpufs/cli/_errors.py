"""Failures of a command, and their messages."""

import sys

from gpufs._printable import printable as printable


class Failure(Exception):
    """One line for the user and the exit code: 1, or 2 for a wrong command line or configuration."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def complain(text: str) -> None:
    """Prints a line on standard error. It is lost if that cannot be written; the exit code remains."""
    try:
        print(f"gpufs: {printable(text)}", file=sys.stderr)
    except OSError:
        pass
