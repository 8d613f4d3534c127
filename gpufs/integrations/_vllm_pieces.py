"""The parts of vLLM that share processed weights. They are private to vLLM: all uses of them are in this module.

Importing this module fails with a vLLM that does not have them.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from inspect import signature
from typing import Any

import torch
from vllm import _custom_ops as vllm_ops
from vllm import envs
from vllm.config.utils import hash_factors
from vllm.distributed import (
    get_dp_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    get_world_group,
)
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.model_loader.weight_cache.ipc_loader import _materialize_remaining_meta_tensors
from vllm.model_executor.model_loader.weight_cache.protocol import (
    UnsupportedQuantForIPCError,
    WeightCacheKey,
    check_ipc_quant_support,
)
from vllm.model_executor.model_loader.weight_cache.utils import export_model_attrs
from vllm.model_executor.utils import weights_already_processed
from vllm.utils.torch_utils import set_default_torch_dtype

from gpufs.integrations._module_state import HelperState, missing, set_attributes
from gpufs.integrations._shared_weights import OpenWeights, Phases, fill
from gpufs.integrations._sharing import device_name


def obstacle(vllm_config: Any) -> str | None:
    """Return why weights of an engine with these settings cannot be shared, None if they can."""
    if vllm_config.parallel_config.enable_eplb:
        return "expert load balancing moves weights while the engine runs"
    offload = getattr(vllm_config, "offload_config", None)
    if offload is not None and (offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size):
        return "weights are offloaded to host memory"
    return None


def reason_against(model: torch.nn.Module) -> str | None:
    """Return why the weights of this model, once processed, cannot be used by other engines. None if they can."""
    try:
        check_ipc_quant_support(model)
    except UnsupportedQuantForIPCError as error:
        return str(error)
    return None


def reason_to_keep_checkpoint(vllm_config: Any) -> str | None:
    """Return who else may load a model's files after this group of ranks has published its weights. None if nobody."""
    if get_world_group().world_size != get_tp_group().world_size or get_dp_group().world_size > 1:
        return "ranks of other groups load from the same files"
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is not None and draft.model == vllm_config.model_config.model:
        return "the draft model is in the same files"
    return None


def weights_key(vllm_config: Any, model_config: Any, files: Sequence[list[Any]]) -> dict[str, Any]:
    """Return all that decides about processed weights. files: their identities.

    vLLM's own key knows only the headers of the files, which two fine-tuned models have in common, and not the settings
    that select kernels, whose weights have different layouts. Here the identities of the files stand for their headers.
    """
    without_files = copy.copy(model_config)
    without_files.model = ""
    facts = {
        "tp_size": get_tensor_model_parallel_world_size(),
        "tp_rank": get_tensor_model_parallel_rank(),
        "pp_size": get_pp_group().world_size,
        "pp_rank": get_pp_group().rank_in_group,
        "is_draft": _is_draft(vllm_config, model_config),
        "dp_size": get_dp_group().world_size,
        "dp_rank": get_dp_group().rank_in_group,
        "cache_config": vllm_config.cache_config,
        "kernel_config": vllm_config.kernel_config,
        "enable_expert_parallel": vllm_config.parallel_config.enable_expert_parallel,
        "expert_placement_strategy": vllm_config.parallel_config.expert_placement_strategy,
    }
    # Versions differ in what they ask for. Whatever one of them leaves out is in the settings below.
    asked_for = signature(WeightCacheKey.from_model_config).parameters
    key = WeightCacheKey.from_model_config(without_files, **{name: facts[name] for name in facts if name in asked_for})
    settings = {
        "kernels": vllm_config.kernel_config.compute_hash(),
        "attention": vllm_config.attention_config.compute_hash(),
        "parallel": vllm_config.parallel_config.compute_hash(),
        "environment": hash_factors(envs.compile_factors()),
        "model": {name: value for name, value in model_config.hf_config.to_dict().items() if name != "_name_or_path"},
        "kv_cache": str(vllm_config.cache_config.cache_dtype),
        "lora": vllm_config.lora_config is not None,
        "onednn": getattr(vllm_ops, "_supports_onednn", None),
        "torch": torch.__version__,
        "device": device_name(),
        "files": files,
        "notes": 2,  # the form of what notes() returns
    }
    text = json.dumps(settings, sort_keys=True, default=str)
    return {**asdict(key), "settings": hashlib.sha256(text.encode()).hexdigest()}


def build(phases: Phases, vllm_config: Any, model_config: Any, prefix: str, weights: OpenWeights) -> Any:
    """Build a model in the file's memory, as vLLM's loader for `ipc_cache` does. Raises what vLLM raises."""
    device = torch.device(vllm_config.load_config.device or vllm_config.device_config.device)
    with set_default_torch_dtype(model_config.dtype):
        with torch.device("meta"):
            model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        phases.end("build the model")
        check_ipc_quant_support(model)
        fill(model, weights)
        phases.end("fill it")
        for name, value in weights.attributes["model"].items():
            setattr(model, name, value)
        with weights_already_processed():
            process_weights_after_loading(model, model_config, device)
        # What vLLM leaves out there, as the sizes that its FP8 kernels for Hopper note.
        set_attributes(model, weights.attributes["helpers"])
        if (name := missing(model, weights.attributes["objects"])) is not None:
            raise RuntimeError(f"{name} is made when weights are processed, and only then")
        _materialize_remaining_meta_tensors(model, device)
        for name, module in model.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.is_meta and value.numel():
                    raise RuntimeError(f"{name}.{attribute} is computed when the model is built, and is not a buffer")
        phases.end("finish it")
        return model.eval()


def helpers(model: torch.nn.Module) -> HelperState:
    """Return the state of the objects with which the model's layers compute."""
    return HelperState(model, "vllm.model_executor")


def notes(model: torch.nn.Module, before: HelperState) -> dict[str, Any]:
    """Return what to note about a model beside its weights. before: when it had no weights yet."""
    plain, objects = before.changes()
    return {"model": export_model_attrs(model), "helpers": plain, "objects": objects}


@contextmanager
def restored_on_failure(config: Any) -> Iterator[None]:
    """Restore the lists into which layers enter their names when they are built: no name may be there twice."""
    layers, moe_layers = dict(config.static_forward_context), list(config.static_all_moe_layers)
    try:
        yield
    except BaseException:
        config.static_forward_context.clear()
        config.static_forward_context.update(layers)
        config.static_all_moe_layers[:] = moe_layers
        raise


def _is_draft(vllm_config: Any, model_config: Any) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and model_config is speculative.draft_model_config
