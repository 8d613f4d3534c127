"""gpufs top: what happens on the mounts of this machine, drawn again and again."""

import curses
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from errno import EACCES, EPERM
from types import FrameType
from typing import Final

import click

from gpufs import config
from gpufs.cli import _activity, _mounts, _picture
from gpufs.cli._activity import Reading
from gpufs.cli._errors import Failure
from gpufs.cli._knobs import complete_mounts, timeout_option
from gpufs.cli._main import check_seconds

_KEY_MILLISECONDS: Final = 200  # getch() does not end when a signal comes: Python's handlers run after it


@click.command(name="top", short_help="Show what happens now.")
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
@timeout_option(config.STATUS_TIMEOUT)
def command(mountpoints: tuple[str, ...], once: bool, interval: float, timeout: float) -> None:
    """Show what happens on the mounts: devices, copies in progress, busy files and leases, with rates.

    Of all mounts that you may see, or of the given MOUNTPOINTs. The key q ends it. Rates are averages over the last
    interval. Users other than root and the one who mounted see their own copies, files and leases.
    """
    if not once and sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _end)
        with suppress(KeyboardInterrupt):
            curses.wrapper(_watch, mountpoints, timeout, interval)
        return
    before = _read(mountpoints, timeout)
    time.sleep(interval)
    now = _read(mountpoints, timeout)
    print("\n".join(_picture.draw(now, before)))
    silent = sum(one.error is not None for one in now)
    if mountpoints and silent:
        raise Failure(f"{silent} of {len(now)} mounts did not answer")


def _read(mountpoints: Sequence[str], timeout: float) -> list[Reading]:
    found = _activity.collect(_mounts.chosen(mountpoints), lambda one: _picture.draw([one], [one]), timeout)
    return [one for one in found if mountpoints or one.error is None or one.error.errno not in (EACCES, EPERM)]


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # passes through curses, which restores the terminal


def _watch(window: curses.window, mountpoints: Sequence[str], timeout: float, interval: float) -> None:
    with suppress(curses.error):  # a terminal without colours, or one that cannot hide its cursor
        curses.use_default_colors()
        curses.curs_set(0)
    before: list[Reading] = []
    while True:
        now = _read(mountpoints, timeout)
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


def _show(window: curses.window, lines: Sequence[str]) -> None:
    window.erase()
    height, width = window.getmaxyx()
    for row, line in enumerate(lines[:height]):
        with suppress(curses.error):  # the last cell of a window cannot be written
            window.addstr(row, 0, line[: width - 1].encode(window.encoding, "replace").decode(window.encoding))
    window.refresh()
