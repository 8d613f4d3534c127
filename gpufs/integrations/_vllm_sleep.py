"""vLLM's sleep mode for weights that lie on a mount: `--sleep-mode-backend gpufs`."""

from __future__ import annotations

from typing import Final

from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from gpufs.client._sleep import sleep, wake

_WEIGHTS: Final = "weights"  # vLLM's tag


class GpufsSleepBackend(CuMemBackend):  # type: ignore[misc]
    """Parks the weights that engines share, once for all of them; the rest is vLLM's own memory, as by default.

    Level 2, which drops weights, parks them as well: other engines may use them, and nothing has to be loaded again.
    """

    def suspend(self, level: int = 1) -> None:
        """Free the memory of this engine. The weights leave the GPU with the last engine that uses them awake.

        They go first: an error, as of host memory that is full, leaves the engine awake.
        """
        sleep()
        super().suspend(1)

    def resume(self, tags: list[str] | None = None) -> None:
        """Bring the weights back, at the addresses that they had, and then the rest."""
        if tags is None or _WEIGHTS in tags:
            wake()
        super().resume(tags)
