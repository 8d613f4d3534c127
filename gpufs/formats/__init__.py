"""Formats of tensor files: their headers, and their elements as numbers. Nothing here needs torch or a mount.

For gpufs itself: the names may change at any time.
"""


class FormatError(ValueError):
    """The file is not valid in its format, or the index of a checkpoint does not describe its files."""

    __module__ = "gpufs.torch"  # where programs import it from
