"""Formats of tensor files: their headers, and their elements as numbers. Nothing here needs torch or a mount.

For gpufs itself: the names may change at any time.
"""

_MAX_TEXT = 1000


class FormatError(ValueError):
    """The file is not valid in its format, or the index of a checkpoint does not describe its files.

    Parameters
    ----------
    text : str
        What is wrong. Of one that quotes much of the file the beginning is kept.
    """

    __module__ = "gpufs.torch"  # where programs import it from

    def __init__(self, text: str) -> None:
        super().__init__(text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}...")
