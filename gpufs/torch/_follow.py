"""Following a file with the tensors and modules that lie in it."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

import torch

from gpufs._naming import named_in
from gpufs.client._attach import Attachment
from gpufs.client._follow import Follower
from gpufs.formats.budget import BoundedFile
from gpufs.formats.versions import FileLayout
from gpufs.torch._file import SafetensorsFile
from gpufs.torch._memory import FileMemory, file_of
from gpufs.torch._module import named_tensors

Followed: TypeAlias = "torch.nn.Module | torch.Tensor | Mapping[str, torch.Tensor] | Iterable[torch.Tensor]"

_log: Final = logging.getLogger("gpufs")
_by_module: Final[weakref.WeakKeyDictionary[torch.nn.Module, Follower]] = weakref.WeakKeyDictionary()
_warned: Final[weakref.WeakKeyDictionary[Follower, str]] = weakref.WeakKeyDictionary()  # of what, the last time
_resume_at: Final[weakref.WeakKeyDictionary[Follower, float]] = weakref.WeakKeyDictionary()  # after a failure
_PAUSE_FACTOR: Final = 20  # attempts that fail take at most 5 % of the time


@named_in("gpufs.torch")
def follow(tensors: Followed, *, on_forward: bool = True) -> Follower:
    """Let tensors that lie in a file become those of newer versions of it, at the same addresses.

    All tensors change together. Views and captured CUDA graphs over them stay valid and show the new version.

    Parameters
    ----------
    tensors
        A module with its parameters and buffers, a tensor, several, or what `load_file` returned. Those in files all
        lie in one. Of a module or a dict, tensors that are private copies and that the file has under their names, such
        as buffers of `attach_module`, get the new values by a copy. Other tensors stay as they are.
    on_forward
        Of a module: whether it takes over the newest version at the beginning of its ``forward``. A version that cannot
        be used is logged as a warning there, once, and the module goes on with the old one; attempts that fail take at
        most a twentieth of the time. Nothing is done while a CUDA graph is captured. Call ``update()`` of the result
        yourself, with False, if several threads call the module at a time, if it is compiled by torch, or if more than
        one call needs the same version.

    Returns
    -------
    gpufs.Follower
        Its ``update()`` takes over the newest version, ``close()`` ends that. A module that is followed again forgets
        the former one.

    Raises
    ------
    ValueError
        None of the tensors lies in a file, or they lie in several: those cannot be replaced in one step, and `publish`
        writes all tensors of a module into one. A tensor without a name that is a private copy.
        Other reasons as for `gpufs.follow`.

    Examples
    --------
    >>> follower = gpufs.torch.follow(model)  # doctest: +SKIP
    >>> model(tokens)  # with the newest weights  # doctest: +SKIP
    >>> follower.metadata["step"]  # doctest: +SKIP
    '1200'
    """
    named = _named(tensors)
    listed = list(named.values()) if named is not None else _listed(tensors)
    files = {id(file.attached): file for tensor in listed if (file := file_of(tensor)) is not None}
    if len(files) != 1:
        paths = ", ".join(sorted({file.counts.path for file in files.values()})[:3])
        raise ValueError(
            f"the tensors lie in {len(files)} attached files ({paths}), which cannot be replaced in one step: "
            "write them into one with gpufs.torch.publish(), and load that"
            if files
            else "none of these tensors lies in a file of a gpufs mount"
        )
    (file,) = files.values()
    if not isinstance(file.attached, Attachment):
        raise ValueError(f"{file.counts.path}: a copy of a small file cannot follow it")
    if named is None and not all(file_of(tensor) is file for tensor in listed if tensor.numel()):
        raise ValueError("some of these tensors are copies: pass the module, or all that load_file() returned")
    copies = _Copies(file, named or {}, only_some=isinstance(tensors, torch.nn.Module))
    if not isinstance(tensors, torch.nn.Module) or not on_forward:
        return Follower(file.attached, changed=copies.update)
    if (former := _by_module.pop(tensors, None)) is not None:
        former.close()
    follower = Follower(file.attached, changed=copies.update, closed=lambda: hook.remove())
    hook = tensors.register_forward_pre_hook(_before_forward)
    _by_module[tensors] = follower
    return follower


def _named(tensors: Followed) -> dict[str, torch.Tensor] | None:
    if isinstance(tensors, Mapping):
        return dict(tensors)
    return named_tensors(tensors) if isinstance(tensors, torch.nn.Module) else None


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


class _Copies:
    """The tensors of a file that a program has as private copies."""

    def __init__(self, memory: FileMemory, named: Mapping[str, torch.Tensor], *, only_some: bool) -> None:
        """``only_some``: whether there may be tensors that the file does not have."""
        path = memory.counts.path
        outside = {name: value for name, value in named.items() if value.numel() and file_of(value) is not memory}
        self._copies: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []
        if not outside:
            return
        layout = FileLayout.read(path, BoundedFile(memory.size, memory.read)).layout
        if layout is None or layout.format != "safetensors":
            known = {place.name for place in layout.tensors} if layout is not None and only_some else outside.keys()
            if lost := sorted(outside.keys() & known):
                raise ValueError(f"{path}: {lost[0]} is a copy, and copies follow safetensors files only")
            return
        file = SafetensorsFile(memory)
        known = set(file.names())
        for name, tensor in outside.items():
            if name not in known:
                continue
            if tuple(tensor.shape) != file.shape(name):
                text = f"shape {list(tensor.shape)} here and {list(file.shape(name))} in the file"
                raise ValueError(f"{path}: {name} cannot follow it: {text}")
            self._copies.append((tensor, partial(file.uncounted, name)))

    def update(self) -> None:
        """Copy the values of the version in use."""
        with torch.inference_mode():
            for tensor, current in self._copies:
                tensor.copy_(current())
        for device in {tensor.device for tensor, _ in self._copies if tensor.is_cuda}:
            torch.cuda.synchronize(device)


def _is_capturing() -> bool:
    """Return whether a CUDA graph is captured. torch without CUDA cannot be asked."""
    uses_gpus: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return uses_gpus and torch.cuda.is_current_stream_capturing()


def _before_forward(module: torch.nn.Module, _: object) -> None:
    """The hook: a function of a module, so that copies and pickles of the followed one are possible."""
    follower = _by_module.get(module)
    start = time.monotonic()
    if follower is None or start < _resume_at.get(follower, start) or _is_capturing():
        return
    try:
        follower.update()
    except (OSError, ValueError) as error:
        end = time.monotonic()
        _resume_at[follower] = end + _PAUSE_FACTOR * (end - start)
        if _warned.get(follower) != str(error):
            _warned[follower] = str(error)
            _log.warning("the old version stays in use: %s", error)
