"""The parts of SGLang that share processed weights. They are private to SGLang: all uses of them are in this module.

SGLang's weight cache decides which quantisation methods leave all they do in tensors, and its loader of presharded
checkpoints which tensors are views of others. Importing this module fails with an SGLang without these.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import sglang
import torch
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.layers.rotary_embedding.factory import _ROPE_DICT
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.model_loader.loader import PreshardedModelLoader, _get_quantization_config, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.runtime_context import get_context, get_exec, get_parallel
from sglang.srt.weight_cache.ipc_loader import IpcModelLoader
from sglang.srt.weight_cache.protocol import is_ipc_quant_supported

from gpufs.integrations._module_state import set_attributes
from gpufs.integrations._sglang_sleep import is_asleep as is_asleep
from gpufs.integrations._sglang_sleep import sleep_with_memory_saver as sleep_with_memory_saver
from gpufs.integrations._shared_weights import OpenWeights, fill
from gpufs.integrations._sharing import device_name, has_no_effect_on_weights, model_settings
from gpufs.torch._module import named_tensors

# An attribute of a module: why its weights cannot be changed. SGLang answers requests to change them with this text.
REASON_AGAINST_CHANGES = "_derived_weight_cache_error"
_rebind_aliases = PreshardedModelLoader._rebind_parameter_aliases
_collect_extra_tensors = PreshardedModelLoader._collect_extra_tensors
_RANKS = ("tp", "pp", "moe_ep", "moe_dp", "attn_tp", "attn_dp", "attn_cp")
# Settings in these groups may decide about weights, except those that say where they come from and how ranks meet.
_GROUPS = ("exec", "lora", "model", "parallel")
_WITHOUT_GROUPS = ("exec.graph",)
_WITHOUT = frozenset(
    """
    model_path load_format model_loader_extra_config revision download_dir delete_ckpt_after_loading model_checksum
    custom_weight_loader startup_weight_load_mode engine_info_bootstrap_port checkpoint_engine_wait_weights_before_ready
    nccl_port dist_timeout dist_init_addr gated_launch_port load_balance_method lora_paths
    enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup
    """.split()
)
_WITHOUT_PREFIXES = ("weight_loader_", "weight_cache_", "remote_instance_", "modelexpress_", "watermark_")


def ranks() -> Any:
    """Return the group of ranks that load a model together."""
    return get_parallel().tp_group


def uses_memory_saver() -> bool:
    """Return whether the engine may free its weights, as `--enable-memory-saver` lets it."""
    return bool(get_exec().features.enable_memory_saver)


def obstacle(load_config: Any, model_config: Any) -> str | None:
    """Return why weights of an engine with these settings cannot be shared, None if they can."""
    if REASON_AGAINST_CHANGES not in inspect.getsource(weight_updater):
        return "this SGLang cannot refuse to change them"
    execution = get_exec()
    if execution.moe.enable_eplb:
        return "expert load balancing moves weights while the engine runs"
    if execution.offload.cpu_offload_gb or execution.offload.offload_group_size > 0:
        return "weights are offloaded to host memory"
    if getattr(model_config, "modelopt_quant", None):
        return "ModelOpt quantises the weights when they are loaded"
    method, config = IpcModelLoader(load_config)._resolve_engine_quant(model_config)
    if not is_ipc_quant_supported(method, config):
        return f"SGLang's weight cache does not share weights of the quantisation {method!r} of this kind"
    return None


def reason_against(model: torch.nn.Module) -> str | None:
    """Return why the weights of this model, once processed, cannot be used by other engines. None if they can."""
    if getattr(model, "secondary_weights", ()):
        return "the model has weights from several places"
    for name in _collect_extra_tensors(model):
        return f"SGLang keeps {name} beside the parameters and buffers"
    return None


def reason_to_keep_checkpoint() -> str | None:
    """Return who else may load a model's files after this group of ranks has published its weights. None if nobody."""
    arguments = get_context().resolved_server_args_dict()
    if arguments["pp_size"] > 1 or arguments["dp_size"] > 1:
        return "ranks of other groups load from the same files"
    if arguments["speculative_algorithm"] is not None:
        return "a draft model may be in the same files"
    return None


def obstacle_to_group() -> str | None:
    """Return why the weights of an engine with these settings cannot change with those of others. None if they can."""
    arguments = get_context().resolved_server_args_dict()
    if arguments["pp_size"] > 1:
        return "not yet with pipeline parallelism"
    return None if arguments["speculative_algorithm"] is None else "not yet with speculative decoding"


def weights_key(model_config: Any, load_config: Any, files: Sequence[list[Any]]) -> dict[str, Any]:
    """Return all that decides about processed weights. files: their identities."""
    parallel = get_parallel()
    settings = {
        "settings": _settings(),
        "environment": {name: value for name, value in os.environ.items() if _is_setting(name)},
        "model": model_settings(model_config.hf_config),
        "quantization": model_config.quantization,
        "draft": [model_config.is_draft_model, load_config.draft_model_idx],
        "torch": torch.__version__,
        "device": device_name(),
        "files": files,
        "form": 1,  # of the file
    }
    text = json.dumps(settings, sort_keys=True, default=str)
    return {
        "sglang_version": sglang.__version__,
        "architectures": model_config.hf_config.architectures or [],
        "dtype": str(model_config.dtype),
        **{f"{name}_{part}": getattr(parallel, f"{name}_{part}") for name in _RANKS for part in ("rank", "size")},
        "settings": hashlib.sha256(text.encode()).hexdigest(),
    }


def _is_setting(variable: str) -> bool:
    return variable.startswith("SGLANG_") and not has_no_effect_on_weights(variable)


def _settings() -> dict[str, Any]:
    arguments = get_context().resolved_server_args_dict()
    groups = namespace_of(type(get_context().server_args))
    return {
        name: value
        for name, value in arguments.items()
        if groups.get(name, "").split(".")[0] in _GROUPS
        and groups[name] not in _WITHOUT_GROUPS
        and name not in _WITHOUT
        and not name.startswith(_WITHOUT_PREFIXES)
    }


def build(load_config: Any, model_config: Any, weights: OpenWeights) -> torch.nn.Module:
    """Build a model in the file's memory, as SGLang's loader for its weight cache does. Raises what SGLang raises."""
    quantisation = _get_quantization_config(model_config, load_config)
    with set_default_torch_dtype(model_config.dtype):
        with torch.device("meta"):
            model: torch.nn.Module = _initialize_model(model_config, load_config, quantisation)
        expected = {name: (tensor.shape, tensor.dtype) for name, tensor in model.named_parameters()}
        fill(model, weights)
    set_attributes(model, weights.attributes)
    rebind(model)
    _check_complete(model)
    for name, parameter in model.named_parameters():
        if name in expected and expected[name] != (parameter.shape, parameter.dtype):
            raise RuntimeError(f"{name} has another shape or dtype than this engine expects")
    return model.eval()


def _check_complete(model: torch.nn.Module) -> None:
    for prefix, module in model.named_modules():
        for name, value in [*vars(module).items(), *module._parameters.items(), *module._buffers.items()]:
            if isinstance(value, torch.Tensor) and value.is_meta and value.numel():
                raise RuntimeError(f"{prefix}.{name} is not among the shared weights")


def load_into(
    tensors: Mapping[str, torch.Tensor], path: str, loader: Any, model_config: Any, device: torch.device
) -> None:
    """Load a checkpoint into tensors, which have the names of a model's, by a second model that is made of them.

    ValueError if the model is quantised, or has other tensors. Raises what SGLang raises.
    """
    quantisation = _get_quantization_config(model_config, loader.load_config)
    if quantisation is not None:
        raise ValueError(
            f"the model is quantised ({quantisation.get_name()}), and only others can be updated in a group"
        )
    config = copy(model_config)
    config.model_path = path
    embeddings = dict(_ROPE_DICT)
    _ROPE_DICT.clear()  # else the second model gets those of the one that runs
    try:
        with set_default_torch_dtype(config.dtype):
            with torch.device("meta"):
                model: torch.nn.Module = _initialize_model(config, loader.load_config)
            _place(model, tensors)
            rebind(model)
            _check_complete(model)
            loader.load_weights_and_postprocess(model, loader._get_all_weights(config, model), device)
    finally:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(embeddings)
    loaded = named_tensors(model)
    for name in sorted(loaded.keys() ^ tensors.keys()):
        raise ValueError(f"{name} is a tensor of the loaded model or of the group's file, and not of both")
    for name, tensor in loaded.items():
        if tensor.data_ptr() != tensors[name].data_ptr():
            tensors[name].copy_(tensor)


def _place(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give a model on the meta device these tensors. Parameters keep what SGLang's loaders have to know of them."""
    placed: dict[int, torch.Tensor] = {}
    for name, old in named_tensors(model).items():
        new = tensors.get(name)
        if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
            found = "missing" if new is None else f"{new.dtype} {list(new.shape)}"
            raise ValueError(f"{name} is loaded as {old.dtype} {list(old.shape)}, and in the group's file {found}")
        if id(old) not in placed:
            placed[id(old)] = new
            if isinstance(old, torch.nn.Parameter):
                placed[id(old)] = torch.Tensor._make_subclass(type(old), new, False)
                vars(placed[id(old)]).update(vars(old))
        prefix, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(prefix), attribute, placed[id(old)])


def rebind(model: torch.nn.Module) -> None:
    """Renew the tensors that are views of parameters, after these have moved."""
    _rebind_aliases(model)


@contextmanager
def restored_on_failure() -> Iterator[None]:
    """Restore the list of rotary embeddings that are built, from which later models take them."""
    embeddings = dict(_ROPE_DICT)
    try:
        yield
    except BaseException:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(embeddings)
        raise
