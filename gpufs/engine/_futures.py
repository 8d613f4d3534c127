"""What futures of transfers and of operations have in common: that tasks of trio and asyncio can await them."""

import sys
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

from gpufs.engine._completions import completions


class EngineFuture(Future[int]):
    """The bytes moved, or the TransferError that it raises.

    ``await`` it in trio or asyncio, or wait with :mod:`concurrent.futures`. When a task that awaits it in trio is
    cancelled so is the work, and the task goes on once the memory is not used any more; asyncio does not wait for that.
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
        task = trio.lowlevel.current_task()
        raise_cancel: Any = None

        def wake(_: object) -> None:
            try:
                token.run_sync_soon(trio.lowlevel.reschedule, task)
            except trio.RunFinishedError:
                pass

        def abort(raiser: Any) -> Any:
            nonlocal raise_cancel
            raise_cancel = raiser
            self.cancel()
            return trio.lowlevel.Abort.FAILED  # not before the memory is free

        self.add_done_callback(wake)
        await trio.lowlevel.wait_task_rescheduled(abort)
        if raise_cancel is not None and self.cancelled():
            raise_cancel()
        return self.result()
