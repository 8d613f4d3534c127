"""What futures of transfers and of operations have in common: that tasks of trio and asyncio can await them."""

import sys
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Final

from gpufs.engine._completions import completions

# How long a task that was cancelled waits for its work to let go of the memory: seconds.
_PATIENCE: Final = 10.0


class EngineFuture(Future[int]):
    """The bytes moved, or the TransferError that it raises.

    ``await`` it in trio or asyncio, or wait with :mod:`concurrent.futures`. When a task that awaits it in trio is
    cancelled so is the work, and the task goes on once the memory is not used any more, or 10 s later if a device
    is stalled; asyncio does not wait for that. What the work needs lives until it is over.
    """

    def add_done_callback(self, fn: Callable[[Future[int]], object]) -> None:
        """Has ``fn`` called with the future once it is done; not while the interpreter exits, which closes engines."""

        def call(future: Future[int]) -> None:
            if not completions.ending:
                fn(future)

        super().add_done_callback(call)

    def __await__(self) -> Generator[Any, Any, int]:
        # Who awaits in trio has imported it.
        trio = sys.modules.get("trio")
        if trio is not None and trio.lowlevel.in_trio_task():
            return self._in_trio().__await__()
        import asyncio

        return asyncio.wrap_future(self).__await__()

    async def _in_trio(self) -> int:
        import trio

        token = trio.lowlevel.current_trio_token()
        over = trio.Event()

        def tell(_: object) -> None:
            try:
                token.run_sync_soon(over.set)
            except trio.RunFinishedError:
                pass

        self.add_done_callback(tell)
        try:
            await over.wait()
        except (trio.Cancelled, KeyboardInterrupt) as stopped:
            self.cancel()
            with trio.CancelScope(deadline=trio.current_time() + _PATIENCE, shield=True):
                await over.wait()  # until the memory is free
            if isinstance(stopped, KeyboardInterrupt) or not self.done() or self.cancelled():
                raise
        return self.result()
