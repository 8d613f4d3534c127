"""A plug-in of vLLM, by which tests have it keep its weights in parameters."""

from __future__ import annotations


def without_onednn() -> None:
    import vllm._custom_ops as operations

    operations._supports_onednn = False
