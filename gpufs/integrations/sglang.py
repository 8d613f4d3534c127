"""SGLang: `--load-format gpufs` takes weights from a mount, where they are in device memory already.

SGLang copies them into its own parameters within the device, so every quantization and any number of GPUs work. The
model's directory is a directory of the mount, or one whose safetensors files are links into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def register() -> None:
    """Adds the load format; SGLang calls this in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_load_format_choices

    add_load_format_choices(["gpufs"])
    target = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
    HookRegistry.register(target, _choose_loader, HookType.AROUND)


def _choose_loader(original: Callable[[Any], None], load_config: Any) -> None:
    """Puts the class in the place of its name: SGLang takes a class as the load format."""
    if load_config.load_format == "gpufs":
        load_config.load_format = loader_class()
    else:
        original(load_config)


@cache
def loader_class() -> type:
    """Returns the loader, which SGLang also takes as `LoadConfig(load_format=...)`."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    from gpufs.torch import load_file

    class GpufsModelLoader(DefaultModelLoader):  # type: ignore[misc]
        """The default loader, with tensors in place instead of a reader of files."""

        def __init__(self, load_config: Any) -> None:
            # The default loader finds the files, and knows only its own formats.
            super().__init__(replace(load_config, load_format="safetensors"))

        def _get_weights_iterator(self, source: Any, **_: Any) -> Iterator[tuple[str, torch.Tensor]]:
            _, files, _ = self._prepare_weights(
                source.model_or_path,
                source.revision,
                False,  # no .pt files
                source.allow_patterns_overrides,
            )
            weights = (item for file in files for item in load_file(file).items())
            index = self.load_config.draft_model_idx
            if index is not None:
                return self._filter_mtp_weights(weights, source.prefix, index)  # type: ignore[no-any-return]
            return ((source.prefix + name, tensor) for name, tensor in weights)

    return GpufsModelLoader
