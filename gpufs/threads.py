"""Threads of trio's loop for calls that may block, also when the system has no thread left to start."""

import logging
from collections.abc import Callable
from contextlib import suppress
from errno import ENOMEM
from typing import Final, TypeVar

import trio

log = logging.getLogger(__name__)

T = TypeVar("T")
_RETRY_SECONDS: Final = 0.5
_NO_THREAD: Final = "can't start new thread"  # the text of CPython's RuntimeError


class NoThreadError(OSError):
    """No thread can be started now."""


async def run(
    work: Callable[[], T], *, abandon_on_cancel: bool = False, limiter: trio.CapacityLimiter | None = None
) -> T:
    """Run work as trio.to_thread.run_sync does, but raise NoThreadError if no thread can be started."""
    try:
        return await trio.to_thread.run_sync(work, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
    except RuntimeError as failure:
        if str(failure) != _NO_THREAD:
            raise
        raise NoThreadError(ENOMEM, "no thread can be started") from None


async def run_to_the_end(work: Callable[[], T], limiter: trio.CapacityLimiter | None = None) -> T:
    """Run work that must not be abandoned. It can be cancelled only between two attempts to start a thread."""
    while True:
        with trio.CancelScope(shield=True):
            with suppress(NoThreadError):
                return await run(work, limiter=limiter)
        await trio.sleep(_RETRY_SECONDS)


def in_background(work: Callable[[], None], limiter: trio.CapacityLimiter | None = None) -> None:
    """Run work that may block forever. Nobody waits for it; the daemon's end abandons it. Its failure is logged.

    Without a ``limiter`` it gets a thread of its own.
    """

    def run_logged() -> None:
        try:
            work()
        except Exception:
            log.exception("work in the background has failed")

    trio.lowlevel.spawn_system_task(_run_until_started, run_logged, limiter or trio.CapacityLimiter(1))


async def _run_until_started(work: Callable[[], None], limiter: trio.CapacityLimiter) -> None:
    while True:
        try:
            return await run(work, abandon_on_cancel=True, limiter=limiter)
        except NoThreadError:
            await trio.sleep(_RETRY_SECONDS)
