"""SGLang: `--load-format gpufs` takes weights from the memory of a mount.

The first engine loads a model, lets SGLang process the weights, and publishes them on the mount of its GPU. It uses the
published memory itself, and so does every later engine: nothing is read or copied. Where SGLang does more to the
weights than can be shared, the engine gets weights of its own, by a copy within the device if the model's files are on
a mount. That works with every quantization and any number of GPUs. Engines of a group take new versions in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gpufs._harmless import harmless


@harmless("--load-format gpufs")
def register() -> None:
    """Add the load format; SGLang calls this in each of its processes, also for engines that do not use it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_load_format_choices

    add_load_format_choices(["gpufs"])
    target = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
    HookRegistry.register(target, _choose_loader, HookType.AROUND)
    # Adapters are loaded by it, with the configuration of the model.
    HookRegistry.register("sglang.srt.model_loader.loader.DefaultModelLoader.__init__", _name_format, HookType.BEFORE)
    target = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk"
    HookRegistry.register(target, _take_version, HookType.AROUND)


def _choose_loader(original: Callable[[Any], None], load_config: Any) -> None:
    """Put the class in the place of its name: SGLang takes a class as the load format."""
    if load_config.load_format == "gpufs":
        load_config.load_format = loader_class()
    else:
        original(load_config)


def _name_format(loader: Any, load_config: Any) -> tuple[tuple[Any, Any], dict[str, Any]] | None:
    """Give SGLang's own loader, which knows names alone, the format that it finds by itself."""
    if not isinstance(load_config.load_format, type) or load_config.load_format is not loader_class():
        return None
    from gpufs.integrations._sharing import LoaderSettings

    others = LoaderSettings(load_config.model_loader_extra_config).others
    return (loader, replace(load_config, load_format="auto", model_loader_extra_config=others)), {}


def _take_version(
    original: Callable[..., tuple[bool, str]], updater: Any, *arguments: Any, **named: Any
) -> tuple[bool, str]:
    """Let an engine of a group take a version as the others do: SGLang would write to memory that is theirs, too."""
    runner = getattr(updater, "get_model_runner", lambda: None)()
    take = getattr(getattr(runner, "loader", None), "take_version", None)  # of our loader alone
    taken: tuple[bool, str] | None = take and take(updater, *arguments, **named)
    return taken or original(updater, *arguments, **named)


def loader_class() -> type:
    """Return the loader, which SGLang also takes as `LoadConfig(load_format=...)`."""
    from gpufs.integrations._sglang_loader import GpufsModelLoader

    return GpufsModelLoader
