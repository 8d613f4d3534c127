"""The parts of vLLM that share processed weights or load new ones. All uses of what is private to vLLM are here.

Importing this module fails with a vLLM that does not have them.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from inspect import signature
from typing import Any, NamedTuple

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
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
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

from gpufs.integrations._module_state import HelperState, missing, numbers, set_attributes, tensor_beside, unchanged
from gpufs.integrations._shared_weights import OpenWeights, fill
from gpufs.integrations._sharing import device_name, has_no_effect_on_weights, model_settings
from gpufs.integrations._sharing import in_all_ranks as in_ranks
from gpufs.torch._module import named_tensors

_PACKAGE = "vllm.model_executor"


def obstacle(vllm_config: Any, group: str | None) -> str | None:
    """Return why weights of an engine with these settings cannot be shared, None if they can."""
    if vllm_config.weight_transfer_config is not None and group is None:
        return "--weight-transfer-config loads new weights while the engine runs"
    if vllm_config.parallel_config.enable_eplb:
        return "expert load balancing moves weights while the engine runs"
    offload = getattr(vllm_config, "offload_config", None)
    if offload is not None and (offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size):
        return "weights are offloaded to host memory"
    return None


def check_group(vllm_config: Any) -> None:
    """Refuse settings with which an engine cannot take new versions in place. ValueError."""
    transfer = vllm_config.weight_transfer_config
    remedy = "leave it out"
    if transfer is None or transfer.backend != "gpufs":
        text, remedy = "needs", """add --weight-transfer-config '{"backend": "gpufs"}'"""
    elif get_pp_group().world_size > 1:
        text = "is not possible with pipeline parallelism yet"
    elif vllm_config.speculative_config is not None:
        text = "is not possible with speculative decoding yet"
    else:
        return
    raise ValueError(f'--model-loader-extra-config: "group" {text}: {remedy}')


def reason_against(model: torch.nn.Module, group: str | None) -> str | None:
    """Return why the weights of this model, once processed, cannot be used by other engines. None if they can."""
    try:
        check_ipc_quant_support(model)
    except UnsupportedQuantForIPCError as error:
        return str(error)
    if group is not None and (name := tensor_beside(model, _PACKAGE)) is not None:
        return f"vLLM keeps {name} beside parameters and buffers, where it would stay that of the first version"
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
        "environment": _environment(),
        "model": model_settings(model_config.hf_config),
        "kv_cache": str(vllm_config.cache_config.cache_dtype),
        # Of the layers only experts choose their kernels by it.
        "lora": vllm_config.lora_config is not None and model_config.is_moe,
        "onednn": getattr(vllm_ops, "_supports_onednn", None),
        "torch": torch.__version__,
        "device": device_name(),
        "files": files,
        "notes": 3,  # the form of the file
    }
    text = json.dumps(settings, sort_keys=True, default=str)
    return {**asdict(key), "settings": hashlib.sha256(text.encode()).hexdigest()}


def _environment() -> str:
    """Return a hash of the variables that may decide about weights."""
    prepack = "VLLM_ZENTORCH_WEIGHT_PREPACK"  # which changes no graph that vLLM compiles
    factors = {**envs.compile_factors(), prepack: os.environ.get(prepack)}
    return str(hash_factors({name: value for name, value in factors.items() if not has_no_effect_on_weights(name)}))


def build(vllm_config: Any, model_config: Any, prefix: str, weights: OpenWeights) -> Any:
    """Build a model in the file's memory, as vLLM's loader for `ipc_cache` does. Raises what vLLM raises."""
    device = torch.device(vllm_config.load_config.device or vllm_config.device_config.device)
    with set_default_torch_dtype(model_config.dtype):
        with torch.device("meta"):
            model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        for part in model.modules():
            get_layerwise_info(part).restore_device = device  # for a reload; vLLM notes the meta device
        check_ipc_quant_support(model)
        fill(model, weights)
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
        return model.eval()


def helpers(model: torch.nn.Module) -> HelperState:
    """Return the state of the objects with which the model's layers compute."""
    return HelperState(model, _PACKAGE)


def notes(model: torch.nn.Module, before: HelperState) -> dict[str, Any]:
    """Return what to note about a model beside its weights. before: when it had no weights yet."""
    plain, objects = before.changes()
    return {"model": export_model_attrs(model), "helpers": plain, "objects": objects, "numbers": numbers(model)}


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


# ---- new weights while the engine runs ----


class _Taken(NamedTuple):
    """How many elements a part of a model has, how many it has taken, and how many it was offered."""

    size: int
    taken: int
    offered: int


@contextmanager
def in_all_ranks() -> Iterator[None]:
    """Have all ranks of the engine fail if one does."""
    with in_ranks(get_pp_group()), in_ranks(get_tp_group()):
        yield


def check_weights(
    load_config: Any,
    model_config: Any,
    model: torch.nn.Module,
    weights: Mapping[str, torch.Tensor],
    *,
    whole: bool = False,
) -> None:
    """Raise ValueError, with a name, unless these tensors of a checkpoint fit a model that runs.

    A part of the model, such as a layer's joined projections, takes all of its elements; or none, unless ``whole``.
    Nothing is changed.
    """
    if getattr(model_config, "word_embeddings_untied_by_checkpoint", False):
        _check_ties(model, weights)
    found = _take(model, weights.items(), whole=whole)
    if not any(each.taken for each in found.values()) and get_pp_group().world_size == 1:
        raise ValueError("none of its tensors is a weight of this engine")
    ranks = get_tensor_model_parallel_world_size()
    # Elements are missing, or left over.
    odd = {name: each for name, each in found.items() if each.taken < each.size or each.taken * ranks < each.offered}
    if odd:
        usual: dict[str, _Taken] = {}  # of the engine's own checkpoint, as of parts that are padded
        with suppress(Exception):  # it may be gone
            usual = _take(model, get_model_loader(load_config).get_all_weights(model_config, model), whole=whole)
        for name, taken in odd.items():
            if taken != usual.get(name):
                raise ValueError(
                    f"{name} has {taken.size} elements in this engine. It would take {taken.taken} of the "
                    f"{taken.offered} in the file, which must have all of its tensors, with their shapes"
                    f"{'' if whole else ', or none'}"
                )


def _check_ties(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless tensors are equal that vLLM has found to be equal at the start, and has tied."""
    first: dict[int, str] = {}
    for name, tensor in named_tensors(model).items():
        other = first.setdefault(id(tensor), name)
        if other != name and {name, other} <= weights.keys() and not torch.equal(weights[name], weights[other]):
            raise ValueError(f"{name} and {other} are one tensor in this engine, and two in the file: restart with it")


def _take(model: Any, weights: Iterable[tuple[str, torch.Tensor]], *, whole: bool) -> dict[str, _Taken]:
    """Have a model's loaders take tensors, as when they are loaded, but into the meta device.

    Return what the parts have taken that have taken anything, and with ``whole`` the others that have parameters, too.
    ValueError with the name of a tensor that does not fit.
    """
    tensor = "?"

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal tensor
        for name, value in weights:
            tensor = f"{name} ({value.dtype}, {list(value.shape)})"
            yield name, value

    process = layerwise._layerwise_process
    layerwise._layerwise_process = lambda *_: None  # which loads a part as soon as it is complete
    try:
        initialize_layerwise_reload(model)
        for part in model.modules():  # biases are left where they are
            for own in (part._parameters, part._buffers):
                own.update({name: to_meta_tensor(value) for name, value in own.items() if value is not None})
        with disable_mtp_completeness_check():
            model.load_weights(named())
        found = {}
        parameters = {part: {*map(id, get_layerwise_info(part).kernel_tensors[0].values())} for part in model.modules()}
        loaded = [parameters[part] for part in model.modules() if get_layerwise_info(part).load_numel]
        taken = {each for one in loaded for each in one}
        for name, part in model.named_modules():
            info = get_layerwise_info(part)
            is_missing = whole and bool(parameters[part] - taken)  # else it has none, or tied ones
            offered = 0
            for attribute, arguments in info.loaded_weights:
                tensor, value = f"{name}.{attribute}", arguments.arguments.get("loaded_weight")
                if isinstance(value, torch.Tensor):
                    _check_dtype(getattr(part, attribute).dtype, value.dtype)
                    offered += value.numel()
            if (info.load_numel or is_missing) and not is_deferred_attention_layer(part):
                found[name] = _Taken(info.load_numel_total, info.load_numel, offered)
        return found
    except Exception as error:
        text = textwrap.shorten(str(error) or type(error).__name__, 200)
        raise ValueError(f"{tensor} does not fit this engine: {text}") from error
    finally:
        layerwise._layerwise_process = process
        undo_reload(model)


def _check_dtype(wanted: torch.dtype, given: torch.dtype) -> None:
    """Raise TypeError where conversion of the values would be none of the weights."""
    if given != wanted and not all(one.is_floating_point and one.itemsize > 1 for one in (wanted, given)):
        raise TypeError(f"it is {wanted}, and the file has {given}")


def load_weights(model: Any, model_config: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Load tensors, which check_weights() has found to fit, into a model that runs."""
    kernels = _kernels_that_change_weights(model)
    try:
        for method in kernels:
            method.moe_kernel = None  # with one, vLLM leaves out what the kernel does to weights
        initialize_layerwise_reload(model)
        with disable_mtp_completeness_check():
            model.load_weights(weights.items())
        finalize_layerwise_reload(model, model_config)
    except BaseException:
        for method, kernel in kernels.items():
            method.moe_kernel = method.moe_kernel or kernel
        undo_reload(model)
        raise


def _kernels_that_change_weights(model: torch.nn.Module) -> dict[Any, Any]:
    """Return the kernels of experts that bring weights into a form of their own, by what has them."""
    methods = {method for part in model.modules() if (method := getattr(part, "quant_method", None)) is not None}
    kernels = {method: getattr(method, "moe_kernel", None) for method in methods}
    plain = FusedMoEExperts.process_weights_after_loading
    return {
        method: kernel
        for method, kernel in kernels.items()
        if kernel is not None and type(kernel.fused_experts).process_weights_after_loading is not plain
    }


def process(
    load_config: Any,
    model_config: Any,
    model: Any,
    own: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
) -> None:
    """Make of a checkpoint's tensors what a model would use. The model itself stays as it is, whatever happens.

    ``own``: the parameters and buffers of the model. ``target``: what gets the result, with the names of those.
    """
    with unchanged(model, _PACKAGE):
        vars(model).pop("load_weights", None)  # it refuses to write to shared memory
        check_weights(load_config, model_config, model, weights, whole=True)
        before = named_tensors(model)
        for name, tensor in own.items():
            if name in target:
                tensor.data = target[name]
        load_weights(model, model_config, weights)
        for name, tensor in named_tensors(model).items():
            if tensor is before.get(name, tensor):
                continue
            # vLLM has made a new parameter.
            for place in (target[own_name] for own_name, each in own.items() if each is before[name]):
                if (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
                    raise ValueError(f"{name} would have another form: {tensor.dtype}, {list(tensor.shape)}")
                place.copy_(tensor)


def undo_reload(model: torch.nn.Module) -> None:
    """Give the parts of a model that have not been loaded yet their weights back."""
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    for part in model.modules():
        info = get_layerwise_info(part)
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(part, info)
        info.reset()


def _is_draft(vllm_config: Any, model_config: Any) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and model_config is speculative.draft_model_config
