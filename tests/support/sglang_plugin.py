"""Plug-ins of SGLang, by which tests make it do what it does elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OBJECT = object()


def change_model() -> None:
    """Changes a model as some of SGLang's models do when they are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def change(_result: Any, model: Any, *_: Any, **__: Any) -> None:
        model.model.layers[0].object = OBJECT

    HookRegistry.register("sglang.srt.models.qwen3.Qwen3ForCausalLM.load_weights", change, HookType.AFTER)


def enable_memory_saver() -> None:
    """Loads the model with `--enable-memory-saver`, which without CUDA the server refuses earlier."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def load(original: Callable[..., None], *arguments: Any) -> None:
        from sglang.srt.runtime_context import get_exec

        with get_exec().features.override(enable_memory_saver=True):
            original(*arguments)

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", load, HookType.AROUND)
