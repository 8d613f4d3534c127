"""What programs get in the place of safetensors' open files; see gpufs/in_place.py."""

from __future__ import annotations

import torch
from safetensors import SafetensorError

from gpufs.torch._file import TensorSlice, safe_open


class InPlaceFile(safe_open):
    """An open file whose tensors are in place, and whose errors are those of safetensors."""

    def get_tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor in place."""
        try:
            return super().get_tensor(name)
        except (KeyError, ValueError) as error:
            raise SafetensorError(error.args[0]) from None

    def get_slice(self, name: str) -> TensorSlice:
        """Returns an object that gives parts of a tensor when it is indexed."""
        try:
            return super().get_slice(name)
        except (KeyError, ValueError) as error:
            raise SafetensorError(error.args[0]) from None
