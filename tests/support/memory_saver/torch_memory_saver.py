"""Stands in for the package of this name, which needs CUDA: it frees no memory, and spoils what a pause would drop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _MemorySaver:
    enabled = True
    hook_mode = "preload"

    @contextmanager
    def region(self, **_: Any) -> Iterator[None]:
        yield

    cuda_graph = region
    disable = region

    def pause(self, tag: str) -> None:
        """Frees the memory of a kind: here the small parameters of a model become zeros."""
        import gc

        import torch

        if tag != "weights":
            return
        for module in (one for one in gc.get_objects() if isinstance(one, torch.nn.Module)):
            for parameter in module.parameters(recurse=False):
                if parameter.nbytes < 64 << 10:
                    parameter.data.zero_()

    resume = pause  # the memory has other contents than before


torch_memory_saver = _MemorySaver()


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Prepares a process for the package."""
    yield
