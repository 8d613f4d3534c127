"""What ends a command without success."""

import os


class Failure(Exception):
    """One line for the user and the exit code: 1, or 2 for a command or a configuration that is wrong in itself."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def failed(error: int, what: str) -> Failure:
    """The failure for an errno: "what: its text"."""
    return Failure(f"{what}: {os.strerror(error)}")
