"""Buffers that are in no file because the model computes them, such as the frequencies of rotary embeddings.

A model that is built on the meta device has no values for them. Models of transformers compute them again for one of
their modules in ``_init_weights``, as ``from_pretrained`` has them do.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def compute_buffers(
    model: torch.nn.Module, wanted: Iterable[tuple[torch.nn.Module, str]]
) -> dict[tuple[torch.nn.Module, str], torch.Tensor]:
    """Compute buffers as the model's own class does.

    Parameters
    ----------
    model : torch.nn.Module
        The whole model. It is not changed.
    wanted : iterable of (torch.nn.Module, str)
        Buffers on the meta device: their modules and their names there.

    Returns
    -------
    dict
        The values in host memory, by module and name. Without those that the class does not compute.
    """
    initialize = getattr(model, "_init_weights", None)
    names: dict[torch.nn.Module, list[str]] = {}
    for owner, name in wanted:
        names.setdefault(owner, []).append(name)
    found = {}
    for owner, listed in names.items():
        # It would also initialize the module's own parameters.
        if initialize is None or next(owner.parameters(recurse=False), None) is not None:
            continue
        before = {name: owner.get_buffer(name) for name in listed}
        values = {name: _unset(value) for name, value in before.items()}
        try:
            for name, value in values.items():
                setattr(owner, name, value)
            with torch.no_grad():
                initialize(owner)
            found.update({(owner, name): owner.get_buffer(name) for name in listed if _is_set(owner.get_buffer(name))})
        finally:
            for name, value in before.items():
                setattr(owner, name, value)
    return found


def _unset(buffer: torch.Tensor) -> torch.Tensor:
    """A buffer in host memory with a value that no computed buffer has."""
    return torch.full_like(buffer, _mark(buffer.dtype), device="cpu")


def _mark(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _is_set(buffer: torch.Tensor) -> bool:
    mark = _mark(buffer.dtype)
    return not bool((buffer.isnan() if mark != mark else buffer == mark).any())
