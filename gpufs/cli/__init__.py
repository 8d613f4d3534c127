"""The gpufs command: one module a command, loaded when the command runs."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Sequence
from errno import EBADF, EDQUOT, EFBIG, EIO, ENOSPC
from typing import NoReturn

__all__ = ["main", "run_command_line"]

# Errors of writing to standard output. Other failures with these codes name a file.
_OUTPUT = (EBADF, EDQUOT, EFBIG, EIO, ENOSPC)
# Commands that read or write where a file system may not answer, with such an option: how long they may run after the
# first signal. A mount is ended then, too.
_APART = {"save": ("", 5.0), "restore": ("", 5.0), "umount": ("--save", 5.0), "mount": ("--restore", 20.0)}
# Objects between two garbage collections: loading a command's modules makes fewer, and none of them is garbage.
_GARBAGE_THRESHOLD = 200_000


def _one_line(text: str) -> str:
    return " ".join(text.split())


def run_command_line(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (the process's own by default) and return its exit code.

    0 success; 1 failure, with one line on standard error; 2 a command line or configuration that is wrong in itself;
    130 interrupted. No exception comes out, and no traceback unless GPUFS_LOG_LEVEL is debug.
    """
    if sys.stdin is None or sys.stdout is None or sys.stderr is None:
        _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="surrogateescape")  # file names are bytes
    words = list(sys.argv[1:] if arguments is None else arguments)
    from gpufs.cli._output import Failure, complain

    try:
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # the kernel would not keep our children's ends for us
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # from here on Ctrl-C is reported
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = _run(words)
        sys.stdout.flush()
        return code
    except Failure as error:
        _discard_output()
        complain(str(error), error.command)
        return error.code
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except BrokenPipeError:
        _discard_output()
        return 1  # the reader has closed the pipe
    except OSError as error:
        _discard_output()
        if error.filename is None and error.errno in _OUTPUT:
            complain(f"standard output: {error.strerror}")
            return 1
        where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        complain(f"{where}{_one_line(error.strerror or str(error))}")
        _log_exception()
        return 1
    except Exception as error:  # noqa: BLE001 - users see one line, not a traceback
        from gpufs.config import ConfigError  # imported late: `gpufs cp` does not need it

        if isinstance(error, ConfigError):
            complain(str(error))
            return 2
        text = _one_line(f"{type(error).__name__}: {error}")
        complain(f"internal error: {text} (GPUFS_LOG_LEVEL=debug shows more)")
        _log_exception()
        return 1


def _run(words: list[str]) -> int:
    import click

    if "_GPUFS_COMPLETE" in os.environ:  # set by a shell that asks for completions
        _keep_commas_in_completions()
    from gpufs.cli._main import COMMANDS, program, rewrite_for_mount
    from gpufs.cli._output import complain

    try:
        code = program.main(rewrite_for_mount(words), prog_name="gpufs", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        with contextlib.suppress(OSError):
            print(error.format_message(), file=sys.stderr)
        return 2
    except click.UsageError as error:
        # click does not name the command if an option lacks its value.
        named = f"gpufs {words[0]}" if words and words[0] in COMMANDS else "gpufs"
        command = error.ctx.command_path if error.ctx else named
        complain(f"{_one_line(error.format_message())} (see {command} --help)")
        return 2
    except click.Abort:
        raise KeyboardInterrupt from None


def _keep_commas_in_completions() -> None:
    """Mend click's script for fish, which cuts values and descriptions at their first comma."""
    from click.shell_completion import FishComplete

    script = FishComplete.source_template.replace('string split ","', 'string split --max 1 ","')
    FishComplete.source_template = script


def _open_closed_streams() -> None:
    """Open /dev/null for each closed standard stream.

    Otherwise the next file that is opened gets its number and receives the output. Reading standard input and writing
    to standard output fail, as they should; messages are lost.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # This is the lowest free number. Children inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY if fd == 1 else os.O_WRONLY), True)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", errors="surrogateescape", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", errors="surrogateescape", closefd=False)


def _discard_output(number: int = 1) -> None:
    """Redirect standard output, or error (2), to /dev/null if it cannot be written.

    Otherwise the interpreter's final flush fails, which makes the exit code 120.
    """
    try:
        (sys.stdout if number == 1 else sys.stderr).flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, number)
        os.close(null)


def _log_exception() -> None:
    if os.environ.get("GPUFS_LOG_LEVEL") == "debug":
        import traceback

        traceback.print_exc()


def main() -> NoReturn:
    """Run the command line and end. Ctrl-C while modules are loaded, or after the command, ends without a message."""
    gc.set_threshold(_GARBAGE_THRESHOLD)
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as nohup has it
    if not ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    option, seconds = _APART.get(next(iter(sys.argv[1:]), ""), (None, 0.0))
    if option is not None and any(word.startswith(option) for word in sys.argv):
        from gpufs.cli._apart import run_apart

        code = run_apart(run_command_line, seconds)
    else:
        code = run_command_line()
    _discard_output(2)
    if not ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.freeze()  # the interpreter's last collection would find nothing either
    sys.exit(code)
