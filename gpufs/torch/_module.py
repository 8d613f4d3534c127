"""Modules whose parameters lie in a safetensors file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

import torch

from gpufs._naming import named_in
from gpufs.modes import Mode
from gpufs.torch._file import Checkpoint, Device

_SHOWN_LINES: Final = 5
_BUFFERS_MISSING: Final = (
    "buffers that are not persistent are missing in most files: build the module with them, or load it once as usual "
    "and write it with gpufs.torch.publish(), which writes all buffers"
)
Module = TypeVar("Module", bound=torch.nn.Module)


@dataclass(frozen=True)
class _ModuleTensor:
    """A place in a module where a parameter or a buffer is."""

    name: str
    owner: torch.nn.Module
    attribute: str
    value: torch.Tensor
    persistent: bool

    @property
    def needed(self) -> bool:
        """Whether the file must have it. A buffer that is not persistent may be missing if the module has a value."""
        return self.persistent or self.value.is_meta

    def put(self, value: torch.Tensor) -> None:
        setattr(self.owner, self.attribute, value)


@named_in("gpufs.torch")
def attach_module(
    module: Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    device: Device = None,
    mode: Mode = "r",
) -> Module:
    """Give a module the parameters of a file, in place.

    Each parameter becomes a view of the file's memory, which all processes share that attach it. Buffers become private
    copies, since modules write to them. Parameters that were tied when the file was published, or that are tied in the
    module, become one parameter.

    Parameters
    ----------
    module : torch.nn.Module
        Usually built on the meta device, so that it has no memory yet.
    path : path
        As for :func:`load_file`: a file, an index, or a directory.
    strict : bool
        Whether a name that only the module or only the file has is an error. Otherwise such tensors stay as they are.
        A buffer that is not persistent may be missing in the file if the module has a value for it, or if its class
        computes it: models of transformers do. Files that :func:`publish` wrote from a module have all buffers.
    device : torch.device, str or int, optional
        As for :func:`load_file`: tensors that are not there already are copied.
    mode : {"r", "r+", "c"}
        With "r" parameters are read-only and do not require gradients. With "r+" they do if they did when they were
        published, or do in the module, and training changes the file. "c" is as "r+", and the changes stay private to
        this program.

    Returns
    -------
    torch.nn.Module
        The module.

    Raises
    ------
    RuntimeError
        Names or shapes do not match. The module is unchanged.

    Examples
    --------
    >>> with torch.device("meta"):
    ...     model = Model(config)
    >>> gpufs.torch.attach_module(model, "/mnt/gpufs/gpu0/model.safetensors")

    A model of transformers, from the directory that ``save_pretrained`` or the Hub has made:

    >>> with torch.device("meta"):
    ...     model = AutoModelForCausalLM.from_config(config)
    >>> gpufs.torch.attach_module(model, "/mnt/gpufs/gpu0/Qwen3-8B")
    """
    checkpoint = Checkpoint(path, mode)
    _fill(module, checkpoint, strict, device, writable=mode != "r", copy=False)
    return module


@named_in("gpufs.torch")
def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: Device = None,
    *,
    backend: str | None = None,
) -> tuple[list[str], list[str]]:
    """Load a file into a module, as the function of this name in safetensors does.

    Parameters that have memory get the values by a copy. Those on the meta device become read-only views of the file,
    as with :func:`attach_module`; buffers there become private copies.

    Parameters
    ----------
    model : torch.nn.Module
        The module.
    filename : path
        As for :func:`load_file`.
    strict : bool
        Whether a name that only the module or only the file has is an error.
    device : torch.device, str or int, optional
        Where views of the file are to be; copied if the file is on another device.
    backend : str, optional
        As for :func:`load_file`.

    Returns
    -------
    missing, unexpected : list of str
        Names that only the module has, and names that only the file has.

    Raises
    ------
    RuntimeError
        Names or shapes do not match. The module is unchanged.
    """
    return _fill(model, Checkpoint(filename, "r"), strict, device, writable=False, copy=True)


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers, tied ones under each of their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def _tensors_of(module: torch.nn.Module) -> Iterator[_ModuleTensor]:
    persistent = module.state_dict(keep_vars=True).keys()
    for named in (module.named_parameters, module.named_buffers):
        for name, value in named(remove_duplicate=False):
            owner, _, attribute = name.rpartition(".")
            yield _ModuleTensor(name, module.get_submodule(owner), attribute, value, name in persistent)


def shortened(lines: list[str]) -> list[str]:
    """Return the first lines, and how many more there are."""
    more = len(lines) - _SHOWN_LINES
    return lines if more <= 1 else [*lines[:_SHOWN_LINES], f"and {more} more"]


def _fill(
    module: torch.nn.Module, checkpoint: Checkpoint, strict: bool, device: Device, *, writable: bool, copy: bool
) -> tuple[list[str], list[str]]:
    """Set parameters and buffers from the checkpoint. copy: those that have memory keep it and get the values."""
    slots = list(_tensors_of(module))
    # Tied in the module: one of their names in the file is enough.
    tied: dict[int, list[_ModuleTensor]] = {}
    for slot in slots:
        tied.setdefault(id(slot.value), []).append(slot)
    chosen: list[tuple[str, list[_ModuleTensor]]] = []
    missing: list[str] = []
    for group in tied.values():
        known = [slot.name for slot in group if slot.name in checkpoint.places]
        if known:
            chosen.append((known[0], group))
        else:
            missing += [slot.name for slot in group if slot.needed]
    lost = {(slot.owner, slot.attribute): slot for slot in slots if slot.name in missing and not slot.persistent}
    computed = _compute_buffers(module, lost)
    missing = [name for name in missing if name not in {lost[place].name for place in computed}]
    unexpected = sorted(checkpoint.places.keys() - {slot.name for slot in slots})
    wrong = [
        f"{name}: shape {list(shape)} in the file, {list(group[0].value.shape)} in the module"
        for name, group in chosen
        if (shape := checkpoint.places[name].shape(name)) != tuple(group[0].value.shape)
    ]
    if wrong or (strict and (missing or unexpected)):
        lines = [f"{type(module).__name__} does not fit {checkpoint.path}:", *shortened(wrong)]
        if strict:
            lines += shortened([f"not in the file: {name}" for name in sorted(missing)])
            lines += shortened([f"not in the module: {name}" for name in unexpected])
            if any(slot.name in missing and not slot.persistent for slot in slots):
                lines.append(_BUFFERS_MISSING)
        raise RuntimeError("\n    ".join(lines))
    shared: dict[tuple[object, ...], torch.Tensor] = {}
    with torch.no_grad():
        for name, group in chosen:
            value = group[0].value
            if copy and not value.is_meta:
                value.copy_(checkpoint.tensor(name))
                continue
            is_parameter = isinstance(value, torch.nn.Parameter)
            memory = (is_parameter, *checkpoint.memory(name))
            if memory not in shared:
                shared[memory] = _new_value(name, value, checkpoint, device, writable)
            for slot in group:
                slot.put(shared[memory])
        place = checkpoint.tensor(chosen[0][0], device).device if chosen else device
        for key, values in computed.items():
            lost[key].put(values.to(place))
    return missing, unexpected


def _new_value(name: str, old: torch.Tensor, checkpoint: Checkpoint, device: Device, writable: bool) -> torch.Tensor:
    tensor = checkpoint.tensor(name, device)
    record = checkpoint.record(name)
    if isinstance(old, torch.nn.Parameter):
        published = record.requires_grad if record.kind == "parameter" else old.requires_grad
        new: torch.Tensor = torch.Tensor._make_subclass(type(old), tensor, writable and published)
    else:
        new = tensor.clone()
    vars(new).update({**vars(old), **record.attributes})
    return new


# ---- buffers that are in no file, because the model computes them, such as the frequencies of rotary embeddings ----
#
# A model that is built on the meta device has no values for them. Models of transformers compute them again for one of
# their modules in ``_init_weights``, as ``from_pretrained`` has them do.


def _compute_buffers(
    model: torch.nn.Module, wanted: Iterable[tuple[torch.nn.Module, str]]
) -> dict[tuple[torch.nn.Module, str], torch.Tensor]:
    """Compute buffers on the meta device, by their modules and names there, as the model's own class does.

    The values are in host memory, without those that the class does not compute. The model is not changed.
    """
    initialize = getattr(model, "_init_weights", None)
    names: dict[torch.nn.Module, list[str]] = {}
    for owner, name in wanted:
        names.setdefault(owner, []).append(name)
    computed = {}
    for owner, listed in names.items():
        # The module's initialization would also set its own parameters.
        if initialize is None or next(owner.parameters(recurse=False), None) is not None:
            continue
        before = {name: owner.get_buffer(name) for name in listed}
        # In host memory, with a value that no computed buffer has.
        values = {name: torch.full_like(value, _mark(value.dtype), device="cpu") for name, value in before.items()}
        try:
            for name, value in values.items():
                setattr(owner, name, value)
            with torch.no_grad():
                initialize(owner)
            computed.update(
                {(owner, name): owner.get_buffer(name) for name in listed if _is_set(owner.get_buffer(name))}
            )
        finally:
            for name, value in before.items():
                setattr(owner, name, value)
    return computed


def _mark(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _is_set(buffer: torch.Tensor) -> bool:
    mark = _mark(buffer.dtype)
    return not bool((buffer.isnan() if mark != mark else buffer == mark).any())
