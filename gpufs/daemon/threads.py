"""Threads of the control plane, for calls that may block: also when the system gives no more of them.

For trio's loop alone.
"""

import errno
from collections.abc import Callable
from typing import Final, TypeVar

import trio

T = TypeVar("T")
# Seconds between two attempts to start a thread for work that cannot be refused.
_PAUSE: Final = 0.5


async def run(
    work: Callable[[], T], *, abandon_on_cancel: bool = False, limiter: trio.CapacityLimiter | None = None
) -> T:
    """As trio.to_thread.run_sync; OSError ENOMEM, and ``work`` is not run, without a thread or memory for one."""
    began = False

    def noted() -> T:
        nonlocal began
        began = True
        return work()

    try:
        return await trio.to_thread.run_sync(noted, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
    except RuntimeError:
        if began:
            raise
        raise OSError(errno.ENOMEM, "no thread can be started") from None


def in_background(work: Callable[[], None]) -> None:
    """Runs work that may block for ever on a thread that nobody waits for; later where none can be started now."""
    try:
        _start(work)
    except RuntimeError:
        trio.lowlevel.spawn_system_task(_start_later, work)


def _start(work: Callable[[], None]) -> None:
    trio.lowlevel.start_thread_soon(work, lambda outcome: None)


async def _start_later(work: Callable[[], None]) -> None:
    while True:
        await trio.sleep(_PAUSE)
        try:
            return _start(work)
        except RuntimeError:
            continue
