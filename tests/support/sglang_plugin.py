"""A plug-in of SGLang that changes a model as some of SGLang's models do when they are loaded."""

from __future__ import annotations

from typing import Any

OBJECT = object()


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.models.qwen3.Qwen3ForCausalLM.load_weights", _change, HookType.AFTER)


def _change(_result: Any, model: Any, *_: Any, **__: Any) -> None:
    model.model.layers[0].object = OBJECT
