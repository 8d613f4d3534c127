"""What ends a command without success, and how it is put into words."""

import os
import sys

# What would break a line in two, or tell a terminal to do something.
_CONTROL = {number: f"\\x{number:02x}" for number in (*range(0x20), *range(0x7F, 0xA0))}
_CONTROL |= {9: "\\t", 10: "\\n", 13: "\\r", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class Failure(Exception):
    """One line for the user and the exit code: 1, or 2 for a command or a configuration that is wrong in itself."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def failed(error: int, what: str) -> Failure:
    """The failure for an errno: "what: its text"."""
    return Failure(f"{what}: {os.strerror(error)}")


def printable(text: str) -> str:
    """The text in one line, for people: names of files may have newlines and escape sequences in them."""
    return text if text.isprintable() else text.translate(_CONTROL)


def complain(text: str) -> None:
    """A line on standard error. Where that cannot be written nobody reads it, and the exit code must do."""
    try:
        print(f"gpufs: {printable(text)}", file=sys.stderr)
    except OSError:
        pass
