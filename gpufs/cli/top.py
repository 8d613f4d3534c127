"""gpufs top: what happens on the mounts of this machine, drawn again and again."""

import contextlib
import curses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from errno import EACCES, EPERM
from types import FrameType
from typing import Any, Final

import click

from gpufs.cli import _activity, _mounts, _picture
from gpufs.cli._activity import Reading
from gpufs.cli._errors import Failure
from gpufs.cli._knobs import complete_mounts, knob_options, settings
from gpufs.cli._main import check_seconds

# getch() does not end when a signal comes: Python's handlers run after it.
_KEY_MILLISECONDS: Final = 200
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


@click.command(name="top")
@click.argument("mountpoints", metavar="[MOUNTPOINT...]", nargs=-1, shell_complete=complete_mounts)
@click.option("--once", is_flag=True, help="Print one picture and end, as it also does without a terminal.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    callback=check_seconds,
    default=1.0,
    metavar="S",
    help="Seconds between two pictures, from 0.1 to 3600.  [default: 1]",
)
@knob_options("top")
def command(mountpoints: tuple[str, ...], once: bool, interval: float, **arguments: Any) -> None:
    """Show what happens on the mounts: devices, copies in progress, busy files and leases, with rates.

    Of all mounts that you may see, or of the given MOUNTPOINTs. The key q ends it. Rates are averages over the last
    interval. Users other than root and the one who mounted see their own copies, files and leases.
    """
    timeout: float = settings("top", arguments)["status_timeout"]

    def read() -> list[Reading]:
        return _read(mountpoints, timeout)

    if not once and sys.stdin.isatty() and sys.stdout.isatty() and _is_drawable():
        _watch(read, interval)
        return
    before = read()
    time.sleep(interval)
    now = read()
    for line in _picture.draw(now, before):
        print(line.text)
    silent = sum(one.error is not None for one in now)
    if mountpoints and silent:
        raise Failure(f"{silent} of {len(now)} mounts did not answer")


def _read(mountpoints: Sequence[str], timeout: float) -> list[Reading]:
    found = _activity.collect(_mounts.chosen(mountpoints), timeout)
    return [one for one in found if mountpoints or one.error is None or one.error.errno not in (EACCES, EPERM)]


def _is_drawable() -> bool:
    """Whether the terminal's kind is known, and it can move its cursor."""
    try:
        curses.setupterm()
    except curses.error:
        return False
    return bool(curses.tigetstr("cup"))


class _Ended(BaseException):
    """A signal that ends the process, after the terminal has been restored."""


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended(number)


@contextlib.contextmanager
def _restoring() -> Iterator[None]:
    """Lets signals end the process only after what is inside has cleaned up. Ctrl-C ends what is inside, no more."""
    previous = {number: signal.signal(number, _end) for number in _ENDING}
    try:
        yield
    except KeyboardInterrupt:
        pass
    except _Ended as ended:
        number: int = ended.args[0]
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    finally:
        for one, handler in previous.items():
            signal.signal(one, handler)


def _watch(read: Callable[[], list[Reading]], interval: float) -> None:
    with _restoring():
        curses.wrapper(_loop, read, interval)


def _loop(window: curses.window, read: Callable[[], list[Reading]], interval: float) -> None:
    with contextlib.suppress(curses.error):  # a terminal without colours, or one that cannot hide its cursor
        curses.use_default_colors()
        curses.curs_set(0)
    before: list[Reading] = []
    while True:
        now = read()
        due = time.monotonic() + interval
        lines = _picture.draw(now, before)
        before = now
        _show(window, lines)
        while (left := due - time.monotonic()) > 0:
            window.timeout(min(int(left * 1000) + 1, _KEY_MILLISECONDS))
            key = window.getch()
            if key in (ord("q"), ord("Q")):
                return
            if key == curses.KEY_RESIZE:
                _show(window, lines)


def _show(window: curses.window, lines: Sequence[_picture.Line]) -> None:
    window.erase()
    height, width = window.getmaxyx()
    for row, line in enumerate(lines[:height]):
        # The last cell of a window cannot be written: the cursor would have no place after it.
        with contextlib.suppress(curses.error):
            text = line.text[: width - 1].encode(window.encoding, "replace").decode(window.encoding)
            window.addstr(row, 0, text, curses.A_REVERSE if line.heading else curses.A_NORMAL)
    window.refresh()
