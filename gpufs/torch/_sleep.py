"""Sleep and wake for the tensors and modules that lie in files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch

from gpufs.client import _sleep
from gpufs.client._attach import Attachment
from gpufs.torch._memory import file_of

Tensors: TypeAlias = "torch.nn.Module | torch.Tensor | Iterable[torch.Tensor]"


def sleep(tensors: Tensors) -> int:
    """Give up the device memory of the files that tensors lie in, and keep the tensors.

    As `gpufs.sleep`: nothing may use the tensors, other tensors of the same files, and CUDA graphs over them until
    `wake`. All of their files sleep, or none. Tensors that are not in a file stay as they are, as private buffers of a
    module do.

    Parameters
    ----------
    tensors
        A module with its parameters and buffers, a tensor, or several.

    Returns
    -------
    int
        The bytes of the files that sleep now and did not before.

    Raises
    ------
    ValueError
        None of the tensors lies in a file.
    OSError
        As `gpufs.sleep`.

    Examples
    --------
    >>> gpufs.torch.sleep(model)  # doctest: +SKIP
    16388784128
    >>> gpufs.torch.wake(model)  # doctest: +SKIP
    16388784128
    """
    return _sleep.change(_attachments(tensors), "sleep")


def wake(tensors: Tensors) -> int:
    """Bring the files of tensors back to their devices, at the same addresses.

    Parameters
    ----------
    tensors
        As for `sleep`.

    Returns
    -------
    int
        The bytes of the files that are awake now and were not before.

    Raises
    ------
    ValueError
        None of the tensors lies in a file.
    OSError
        As `gpufs.wake`.
    """
    return _sleep.change(_attachments(tensors), "wake")


def _attachments(tensors: Tensors) -> list[Attachment]:
    if isinstance(tensors, torch.nn.Module):
        listed = [*tensors.parameters(), *tensors.buffers()]
    else:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    files = {id(file): file for tensor in listed if (file := file_of(tensor)) is not None}
    found = [file.attached for file in files.values() if isinstance(file.attached, Attachment)]
    if not found:
        raise ValueError("none of these tensors lies in a file of a gpufs mount")
    return found
