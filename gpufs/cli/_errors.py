"""Failures of a command, and their messages."""

import os
import sys

# Characters that break a line or control a terminal, and how they are shown.
_CONTROL = {number: f"\\x{number:02x}" for number in (*range(0x20), *range(0x7F, 0xA0))}
_CONTROL |= {9: "\\t", 10: "\\n", 13: "\\r", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class Failure(Exception):
    """One line for the user and the exit code: 1, or 2 for a wrong command line or configuration."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def failed(error: int, what: str) -> Failure:
    """The failure for an errno: "what: its text"."""
    return Failure(f"{what}: {os.strerror(error)}")


def printable(text: str) -> str:
    """The text without control characters: file names may contain newlines and escape sequences."""
    return text if text.isprintable() else text.translate(_CONTROL)


def complain(text: str) -> None:
    """Prints a line on standard error. It is lost if that cannot be written; the exit code remains."""
    try:
        print(f"gpufs: {printable(text)}", file=sys.stderr)
    except OSError:
        pass
