"""SGLang's memory saver for weights that lie on a mount: they sleep in the host's memory, once for all engines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.utils.torch_memory_saver_adapter import _TorchMemorySaverAdapterReal

from gpufs.client._sleep import sleep, wake
from gpufs.integrations._shared_weights import SMALLEST_SHARED

logger = logging.getLogger(__name__)

# The parameters of this process's models that are its own: the memory saver drops what they hold.
_own: Final[list[torch.nn.Parameter]] = []
_saved: Final[list[torch.Tensor]] = []


def sleep_with_memory_saver(model: torch.nn.Module) -> None:
    """Let the shared weights of a model sleep when SGLang frees its weights, and wake when it takes them back."""
    if not hasattr(_TorchMemorySaverAdapterReal.pause, "__wrapped__"):
        _TorchMemorySaverAdapterReal.pause = _with(_TorchMemorySaverAdapterReal.pause, before=_save, after=_sleep)
        _TorchMemorySaverAdapterReal.resume = _with(_TorchMemorySaverAdapterReal.resume, after=_wake)
    _own.extend(parameter for parameter in model.parameters() if parameter.nbytes < SMALLEST_SHARED)


def is_asleep() -> bool:
    """Return whether SGLang has freed its weights, and not yet taken them back."""
    return bool(_saved)


def _with(
    call: Callable[[Any, str], None], *, before: Callable[[], None] = lambda: None, after: Callable[[], None]
) -> Callable[[Any, str], None]:
    """Do more where the weights are meant."""

    @wraps(call)
    def both(adapter: Any, tag: str) -> None:
        if tag != GPU_MEMORY_TYPE_WEIGHTS:
            return call(adapter, tag)
        before()
        call(adapter, tag)
        return after()

    return both


def _save() -> None:
    if not _saved:  # at a second pause without a resume between, the memory has been dropped already
        _saved[:] = [parameter.detach().cpu().clone() for parameter in _own]


def _sleep() -> None:
    try:
        sleep()
    except OSError as error:  # which would end SGLang's scheduler
        logger.warning("Weights stay on the device: %s", error)


def _wake() -> None:
    wake()
    if not _saved:  # a resume without a pause
        return
    with torch.inference_mode():
        for parameter, saved in zip(_own, _saved, strict=True):
            parameter.copy_(saved)
    _saved.clear()
