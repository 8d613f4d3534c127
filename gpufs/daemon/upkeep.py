"""Runs what the files of a mount do not depend on, so that its failure cannot end them."""

import logging
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

import trio

log = logging.getLogger("gpufs.daemon")

_AFTER_FAILURE: Final = 1.0  # seconds at least


async def keep_up(what: str, work: Callable[[], Awaitable[None]], pause: float) -> NoReturn:
    """Calls ``work`` again and again, ``pause`` seconds after it returned, until cancelled.

    The mount goes on if a call fails. Of several failures in a row with the same text, the first is logged.
    """
    last = ""
    while True:
        try:
            await work()
            last = ""
        except Exception as failure:
            text = f"{type(failure).__name__}: {failure}"
            if text != last:
                last = text
                known = isinstance(failure, OSError)  # no thread, descriptor or permission
                log.error("%s has failed, the mount goes on: %s", what, text, exc_info=not known)
        await trio.sleep(max(pause, _AFTER_FAILURE) if last else pause)
