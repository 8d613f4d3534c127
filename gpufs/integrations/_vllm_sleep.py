"""vLLM's sleep mode for weights that lie on a mount: `--sleep-mode-backend gpufs`."""

from __future__ import annotations

from errno import ENOMEM
from typing import Final

import torch
from vllm import device_allocator
from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from gpufs.client._sleep import sleep, wake
from gpufs.config.memory import memory_of_machine
from gpufs.units import bytes_text

_WEIGHTS: Final = "weights"  # vLLM's tag
# vLLM's tags of all that it cannot compute again at once. The others are of scratch memory.
_CONTENTS: Final = (_WEIGHTS, "kv_cache", "runtime", "cudagraph")


class GpufsSleepBackend(CuMemBackend):  # type: ignore[misc]
    """Parks the weights that engines share, once for all of them; the rest is vLLM's own memory, as by default.

    Level 2, which drops weights, parks them as well: other engines may use them, and nothing has to be loaded again.
    Level 0, which vLLM's `/sleep` never asks a worker for, keeps the KV cache, too, in pinned memory of this process.
    """

    def suspend(self, level: int = 1) -> None:
        """Free the memory of this engine. The weights leave the GPU with the last engine that uses them awake.

        An error, as of host memory that is full, leaves the engine awake.
        """
        allocator = device_allocator.get_mem_allocator_instance()
        if level == 0:
            _check_host_memory(allocator.get_current_usage())
        sleep()
        try:
            if level == 0:
                allocator.sleep(offload_tags=_CONTENTS)
            else:
                super().suspend(1)
        except BaseException:
            self.resume()
            raise
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """Bring the weights back, at the addresses that they had, and then the rest."""
        if tags is None or _WEIGHTS in tags:
            wake()
        super().resume(tags)


def _check_host_memory(wanted: int) -> None:
    """Raise OSError unless so many bytes can be pinned: with less, Linux ends the engine or another program."""
    kept = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)  # since the engine slept before
    available = memory_of_machine().available_bytes + kept
    if wanted > available:
        raise OSError(
            ENOMEM,
            f"The engine would park {bytes_text(wanted)} with its KV cache, and this machine has "
            f"{bytes_text(available)} available. Sleep at level 1, which drops the cache, or start the engine with a "
            "smaller one by --kv-cache-memory-bytes",
        )
