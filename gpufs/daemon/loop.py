"""The control plane's loops where memory runs out: they wait for it, for their end would be that of the mount.

For trio's loop alone.
"""

import errno
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pyfuse3
import trio

log = logging.getLogger("gpufs.daemon")

# Seconds until what found no memory, or nothing else that the system may run out of, is tried again.
_PAUSE: Final = 0.5
# Requests that are served at a time. More than may wait for directories of the host (gpufs/fs/backing.py), so that
# names in memory are answered whatever those do. A task that waits takes some 20 KiB.
_TASKS: Final = 10_000
# What pyfuse3 runs once for each request that it serves at a time.
_WORKER: Final = "_session_loop"


async def serve() -> None:
    """pyfuse3.main(), until the mount ends, or pyfuse3.terminate() is called."""
    worker = getattr(pyfuse3, _WORKER, None)
    if worker is not None and not hasattr(worker, "patient"):
        setattr(pyfuse3, _WORKER, _patient(worker))
    await pyfuse3.main(max_tasks=_TASKS)


def _patient(worker: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """A worker that finds no memory for the request that it would read leaves it to others, and to later."""

    @functools.wraps(worker)
    async def patient(*arguments: Any) -> None:
        while True:
            try:
                return await worker(*arguments)
            except OSError as failure:
                # Of handlers none comes here: it is libfuse's own memory, a buffer for each worker, made with its
                # first request. Nothing has been read then.
                if failure.errno != errno.ENOMEM:
                    raise
            await trio.sleep(_PAUSE)

    patient.patient = True  # type: ignore[attr-defined]
    return patient


async def keep(task: Callable[..., Awaitable[None]], *arguments: object) -> None:
    """Runs a task that the mount can do without for a while; again, where it failed for want of something."""
    while True:
        try:
            return await task(*arguments)
        except (OSError, MemoryError) as failure:
            log.warning("%s is tried again: %s", task.__name__.strip("_"), failure or "no memory")
        await trio.sleep(_PAUSE)
