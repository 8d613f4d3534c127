"""Plug-ins of vLLM, by which tests make it do what it does elsewhere."""

from __future__ import annotations

from typing import Any


def without_onednn() -> None:
    """Has vLLM keep its weights in parameters."""
    import vllm._custom_ops as operations

    operations._supports_onednn = False


def kernels_with_state() -> None:
    """Has a layer's method note a size when it processes weights, and need it later, as FP8's kernels for Hopper do."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.utils import is_weights_pre_processed

    without_onednn()
    process, apply = UnquantizedLinearMethod.process_weights_after_loading, UnquantizedLinearMethod.apply

    def processed(self: Any, layer: Any) -> None:
        process(self, layer)
        if not is_weights_pre_processed():
            self.logical_output_size = layer.weight.shape[0]

    def applied(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        assert self.logical_output_size == layer.weight.shape[0]
        return apply(self, layer, x, bias)

    UnquantizedLinearMethod.process_weights_after_loading = processed
    UnquantizedLinearMethod.apply = applied
