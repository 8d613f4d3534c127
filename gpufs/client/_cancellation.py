"""Ends copies, and waits for a daemon, from another thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from gpufs._naming import named_in


@named_in("gpufs")
class Cancellation:
    """Ends copies from another thread or from a signal handler: pass it to them, then call :meth:`cancel`.

    Attributes
    ----------
    cancelled : bool
        Whether :meth:`cancel` was called.

    Examples
    --------
    >>> stop = gpufs.Cancellation()
    >>> threading.Timer(60, stop.cancel).start()
    >>> gpufs.copy_tree("hf://Qwen/Qwen3-8B", "/mnt/gpufs/gpu0/qwen", cancel=stop)  # doctest: +SKIP
    """

    __slots__ = ("_fd", "_followers", "cancelled")

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._followers: list[Cancellation] = []
        self.cancelled = False

    def cancel(self) -> None:
        """All copies that have this object end with CopyError ECANCELED, soon. A second call does nothing."""
        if not self.cancelled:
            self.cancelled = True
            os.eventfd_write(self._fd, 1)
            for follower in tuple(self._followers):
                follower.cancel()

    @contextmanager
    def follower(self) -> Iterator[Cancellation]:
        """Another one, which is cancelled with this one and can be cancelled alone."""
        follower = Cancellation()
        self._followers.append(follower)
        try:
            if self.cancelled:
                follower.cancel()
            yield follower
        finally:
            self._followers.remove(follower)

    def fileno(self) -> int:
        """A descriptor that is readable once cancelled."""
        return self._fd

    def __del__(self) -> None:
        os.close(self._fd)
