"""The gpufs command: one module a command, loaded when the command runs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from errno import EBADF, EDQUOT, EFBIG, EIO, ENOSPC
from typing import Any, NoReturn

__all__ = ["main", "run"]

# How writing fails. Of what a command does otherwise, failures without a name are not of these.
_OUTPUT = (EBADF, EDQUOT, EFBIG, EIO, ENOSPC)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def run(arguments: Sequence[str] | None = None, *, begin: Callable[[], object] = lambda: None) -> int:
    """Runs the command line (the process's own by default) and returns its exit code.

    ``begin`` is called when KeyboardInterrupt can be seen to.

    0 success; 1 failure, with one line on standard error; 2 a command line or configuration that is wrong in itself;
    130 interrupted. No exception comes out, and no traceback unless GPUFS_LOG_LEVEL is debug.
    """
    if sys.stdin is None or sys.stdout is None or sys.stderr is None:
        from gpufs.cli import _streams

        _streams.open_closed()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="surrogateescape")  # names of files are bytes; show them as they are
    words = list(sys.argv[1:] if arguments is None else arguments)
    return _guarded(lambda: _run_program(words), begin)


def _run_program(words: list[str]) -> Any:
    """The command by way of click."""
    import click

    from gpufs.cli._errors import complain
    from gpufs.cli._main import program, rewrite_for_mount

    try:
        return program.main(rewrite_for_mount(words), prog_name="gpufs", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return 2
    except click.UsageError as error:
        # Of an option that lacks its value click does not say whose it is.
        named = f"gpufs {words[0]}" if words and words[0] in program.list_commands(click.Context(program)) else "gpufs"
        command = error.ctx.command_path if error.ctx else named
        complain(f"{_one_line(error.format_message())} (see {command} --help)")
        return 2
    except click.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        from gpufs.config import ConfigError  # which a command without configuration does not load

        if not isinstance(error, ConfigError):
            raise
        complain(str(error))
        return 2


def _guarded(work: Callable[[], Any], begin: Callable[[], object]) -> int:
    """The exit code of a command; whatever comes out of it becomes a line and a code."""
    from gpufs.cli._errors import Failure, complain

    try:
        begin()
        code = work()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except Failure as error:
        complain(str(error))
        return error.code
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except BrokenPipeError:
        _let_output_go()
        return 1  # whoever reads our output has enough of it
    except OSError as error:
        _let_output_go()
        if error.filename is None and error.errno in _OUTPUT:
            complain(f"standard output: {error.strerror}")
            return 1
        where = f": {os.fsdecode(error.filename)}" if error.filename is not None else ""
        complain(f"{_one_line(error.strerror or str(error))}{where}")
        _log_exception()
        return 1
    except Exception as error:  # noqa: BLE001 - the last guard: a user sees a line, not a traceback
        text = _one_line(f"{type(error).__name__}: {error}")
        complain(f"internal error: {text} (GPUFS_LOG_LEVEL=debug shows more)")
        _log_exception()
        return 1


def _let_output_go() -> None:
    """Where standard output cannot be written, nothing is written to it when the interpreter ends, either."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, 1)
        os.close(null)


def _log_exception() -> None:
    """The traceback of what was caught, for those who asked for it."""
    if os.environ.get("GPUFS_LOG_LEVEL") == "debug":
        import traceback

        traceback.print_exc()


def main() -> NoReturn:
    """The entry point. Ctrl-C while modules are still loaded, or when all is done, ends the process without a word."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # and not ignored, as by nohup

    def heed(handler: Any) -> None:
        if heeded:
            signal.signal(signal.SIGINT, handler)

    heed(signal.SIG_DFL)
    code = run(begin=lambda: heed(signal.default_int_handler))
    heed(signal.SIG_DFL)
    sys.exit(code)
