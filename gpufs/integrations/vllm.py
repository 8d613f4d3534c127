"""vLLM: `--load-format gpufs` takes weights from a mount, where they are in device memory already.

vLLM copies them into its own parameters within the device, so every quantization and any number of GPUs work. The
model's directory is a directory of the mount, or one whose safetensors files are links into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def register() -> None:
    """Adds the load format; vLLM calls this in each of its processes."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from gpufs.torch import load_file

    @register_model_loader("gpufs")
    class GpufsModelLoader(DefaultModelLoader):  # type: ignore[misc]
        """The default loader, with tensors in place instead of a reader of files."""

        def __init__(self, load_config: Any) -> None:
            # The default loader finds the files, and knows only its own formats.
            super().__init__(replace(load_config, load_format="safetensors"))

        def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
            _, files, *_ = self._prepare_weights(
                source.model_or_path,
                source.subfolder,
                source.revision,
                False,  # no .pt files
                source.allow_patterns_overrides,
            )
            for file in files:
                for name, tensor in load_file(file).items():
                    yield source.prefix + name, tensor
