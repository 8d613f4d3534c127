"""Errors that become a system call's errno."""

import os


def error(code: int) -> OSError:
    """The exception for an errno."""
    return OSError(code, os.strerror(code))
