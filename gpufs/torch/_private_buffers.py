"""Buffers of modules are private copies in programs that use files in place: modules write to them, as BatchNorm does.

attach_module() copies them itself. Other programs put tensors that they have loaded into modules: all of them by
``register_buffer`` or an assignment, which torch reports, and accelerate and diffusers into the module's dict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gpufs.modes import COPY_ON_WRITE
from gpufs.torch._memory import file_of

Tensor = TypeVar("Tensor", torch.Tensor, None)


@functools.cache
def copy_registered_buffers() -> None:
    """Let torch copy each tensor of a file that becomes a buffer of a module."""
    torch.nn.modules.module.register_module_buffer_registration_hook(lambda _module, _name, value: _private(value))


def _private(value: Tensor) -> Tensor:
    """Return the tensor, or a copy if it is a file's memory and a write to it would not stay in this program."""
    file = None if value is None else file_of(value)
    if value is None or file is None or file.mode == COPY_ON_WRITE:
        return value
    copy = value.detach().clone()
    vars(copy).update(vars(value))  # marks that libraries set
    file.counts.copied("buffer", copy.nbytes)
    return copy


def copying_buffers(set_tensor: Callable[..., None]) -> Callable[..., None]:
    """Return accelerate's set_module_tensor_to_device so that it copies what becomes a buffer."""

    @functools.wraps(set_tensor)
    def set_module_tensor_to_device(
        module: torch.nn.Module, tensor_name: str, device: Any, value: Any = None, *rest: Any, **named: Any
    ) -> None:
        prefix, _, name = tensor_name.rpartition(".")
        owner = module.get_submodule(prefix)
        file = file_of(value) if isinstance(value, torch.Tensor) else None
        if name in owner._buffers:
            value = _private(value)
        set_tensor(module, tensor_name, device, value, *rest, **named)
        made = getattr(owner, name)
        if file is not None and name in owner._parameters and not made.is_meta:
            file.counts.became(value.dtype, value.device, made)

    return set_module_tensor_to_device
