"""A program that an error of a GPU ends learns that a write to read-only weights may be the cause.

A GPU reports such a write as an illegal access, later, and without the address. torch raises that in whatever it does
next. So the line is printed after the traceback, if the program has read-only files on a GPU.
"""

from __future__ import annotations

import functools
import sys
import threading
from types import TracebackType

from gpufs.torch._memory import read_only_on_gpus

_ILLEGAL_ACCESS = "illegal memory access"  # in the text of CUDA's and HIP's error


@functools.cache
def explain_gpu_errors() -> None:
    """Have the line printed for exceptions that end the program or a thread."""
    of_program, of_thread = sys.excepthook, threading.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        of_program(kind, error, traceback)
        _explain(error)

    def show_in_thread(arguments: threading.ExceptHookArgs) -> None:
        of_thread(arguments)
        _explain(arguments.exc_value)

    sys.excepthook, threading.excepthook = show, show_in_thread


def _explain(error: BaseException | None) -> None:
    paths = read_only_on_gpus()
    if error is None or _ILLEGAL_ACCESS not in str(error) or not paths or sys.stderr is None:
        return
    files = f"{paths[0]} and {len(paths) - 1} more files are" if paths[1:] else f"{paths[0]} is"
    print(
        f"gpufs: a write to the weights may be the cause: {files} read-only in this program; "
        "gpufs run --mode c keeps changes private",
        file=sys.stderr,
    )
