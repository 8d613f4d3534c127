"""Following a file with the tensors and modules that lie in it."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias

import torch

from gpufs._naming import named_in
from gpufs.client._attach import Attachment
from gpufs.client._follow import Follower
from gpufs.formats.budget import BoundedFile
from gpufs.formats.versions import FileLayout
from gpufs.torch._file import SafetensorsFile
from gpufs.torch._memory import FileMemory, file_of
from gpufs.torch._module import named_tensors, shortened

Followed: TypeAlias = "torch.nn.Module | torch.Tensor | Mapping[str, torch.Tensor] | Iterable[torch.Tensor]"

_log: Final = logging.getLogger("gpufs")
_by_module: Final[weakref.WeakKeyDictionary[torch.nn.Module, Follower]] = weakref.WeakKeyDictionary()
_failed: Final[weakref.WeakKeyDictionary[Follower, tuple[float, str]]] = weakref.WeakKeyDictionary()  # until when, how
_PAUSE_FACTOR: Final = 20  # attempts that fail take at most 5 % of the time
# Of copies that have another dtype than the file. Others, such as float8, mostly come with scales.
_CAST: Final = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@named_in("gpufs.torch")
def follow(tensors: Followed, *, on_forward: bool = True, others: Literal["refuse", "keep"] = "refuse") -> Follower:
    """Let tensors that lie in a file become those of newer versions of it, at the same addresses.

    All tensors change together. Views and captured CUDA graphs over them stay valid and show the new version.

    Parameters
    ----------
    tensors
        A module with its parameters and buffers, a tensor, several, or what `load_file` returned. Those in files lie in
        one, or in those of a sharded model: a directory with ``model.safetensors.index.json``, which follows as a whole
        (`gpufs replace NEWDIR DIR`). Of a module or a dict, those that are private copies of what the files have under
        their names (cast, moved, cloned, in shared memory) get the new values by a copy; so do buffers, whatever their
        values are.
    on_forward
        Of a module: whether it takes over the newest version at the beginning of its ``forward``. A version that cannot
        be used is logged as a warning there, once, and the module goes on with the old one; attempts that fail take at
        most a twentieth of the time. Nothing is done while a CUDA graph is captured. Call ``update()`` of the result
        yourself, with False, if several threads call the module at a time, if it is compiled by torch, or if more than
        one call needs the same version.
    others : {"refuse", "keep"}
        What happens to parameters, persistent buffers and entries of a dict that neither lie in the file nor are such
        copies: quantised or merged weights, experts that were stacked under another name, adapters. "refuse" raises
        ValueError with their names, here and at each update, and the old version stays. With "keep" they stay as they
        are, and are yours to update. Other buffers always stay.

    Returns
    -------
    gpufs.Follower
        Its ``update()`` takes over the newest version, ``close()`` ends that. A module that is followed again forgets
        the former one.

    Raises
    ------
    ValueError
        None of the tensors lies in a file, or they lie in files that are not those of one index. Tensors that
        ``others`` is about. Other reasons as for `gpufs.follow`.

    Examples
    --------
    >>> follower = gpufs.torch.follow(model)  # doctest: +SKIP
    >>> model(tokens)  # with the newest weights  # doctest: +SKIP
    >>> follower.metadata["step"]  # doctest: +SKIP
    '1200'
    """
    if others not in ("refuse", "keep"):
        raise ValueError(f'others: {others!r} is neither "refuse" nor "keep"')
    if not isinstance(tensors, (torch.nn.Module, torch.Tensor, Mapping)):
        tensors = list(tensors)
    files = {id(file.attached): file for tensor in _named(tensors).values() if (file := file_of(tensor)) is not None}
    memories = list(files.values())
    if not memories:
        raise ValueError("none of these tensors lies in a file of a gpufs mount")
    attached = []
    for memory in memories:
        if not isinstance(memory.attached, Attachment):
            raise ValueError(f"{memory.counts.path}: a copy of a small file cannot follow it")
        attached.append(memory.attached)
    followed = _FollowedTensors(tensors, memories, attached, keep=others == "keep")
    followed.check()
    if not isinstance(tensors, torch.nn.Module) or not on_forward:
        return Follower(*attached, check=followed.check, changed=followed.copy)
    follower = Follower(*attached, check=followed.check, changed=followed.copy, closed=lambda: hook.remove())
    hook = tensors.register_forward_pre_hook(_before_forward)
    if (former := _by_module.pop(tensors, None)) is not None:
        former.close()
    _by_module[tensors] = follower
    return follower


def _named(tensors: Any) -> dict[str, torch.Tensor]:
    """Return tensors by their names; those without names get numbers."""
    if isinstance(tensors, torch.nn.Module):
        return named_tensors(tensors)
    if isinstance(tensors, Mapping):
        return dict(tensors)
    listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors or []  # None: a module that is gone
    return {f"number {number}": tensor for number, tensor in enumerate(listed)}


class _FollowedTensors:
    """What a program has of files that follow together: their memory, and copies of what they have by their names."""

    def __init__(self, tensors: Any, memories: list[FileMemory], attached: list[Attachment], *, keep: bool) -> None:
        self._tensors: Callable[[], Any] = lambda: tensors
        if isinstance(tensors, torch.nn.Module):
            self._tensors = weakref.ref(tensors)
        self._memories = memories
        self._attached = attached
        self._keep = keep
        self._kept: set[str] = set()  # the tensors that stay, at the last check
        self._files: dict[str, SafetensorsFile] = {}  # by the names of their tensors
        for memory in memories:
            layout = FileLayout.read(memory.counts.path, BoundedFile(memory.size, memory.read)).layout
            if layout is not None and layout.format == "safetensors":
                file = SafetensorsFile(memory)
                self._files |= dict.fromkeys(file.names(), file)
        # The tensors in the files, where the program's have names, too.
        self._names = set(self._files) if isinstance(tensors, (torch.nn.Module, Mapping)) else set()

    def _outside(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the program has now and that are not memory of the files."""
        named = _named(self._tensors())
        return {name: value for name, value in named.items() if value.numel() and file_of(value) not in self._memories}

    def check(self) -> None:
        """Look at what there is now. ValueError with the names of what can become no new version."""
        module = self._tensors()
        outside = self._outside()
        buffers, computed = set(), set()
        if isinstance(module, torch.nn.Module):
            buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)} & outside.keys()
            if computed := buffers - self._names:
                computed -= module.state_dict(keep_vars=True).keys()  # those that are not persistent remain
        reasons = {
            name: reason
            for name, value in outside.items()
            if name not in computed and (reason := self._reason_against(name, value, any_value=name in buffers))
        }
        if isinstance(module, torch.nn.Module):
            reasons |= dict.fromkeys(sorted(self._packed(module)), "is in the file, and its module has no such tensor")
        if reasons and not self._keep:
            text = "; ".join(shortened([f"{name} {reason}" for name, reason in reasons.items()]))
            raise ValueError(
                f"{self._memories[0].counts.path}: not all tensors can follow it: {text}. "
                'others="keep" of gpufs.torch.follow() lets those stay as they are'
            )
        self._kept = computed | reasons.keys()

    def _reason_against(self, name: str, value: torch.Tensor, *, any_value: bool) -> str | None:
        """Return why a tensor is no copy of what the file has under its name; None if it is one."""
        if (other := file_of(value)) is not None:
            return f"lies in {other.counts.path}"
        if not self._files:
            return "is a copy, and copies follow safetensors files only"
        if name not in self._names:
            return "is not in the file" if self._names else "is a copy without a name: pass the module or the dict"
        if value.layout != torch.strided or value.is_quantized or value.is_meta or hasattr(value, "__tensor_flatten__"):
            return f"has another form here than in the file ({type(value).__name__})"
        file = self._files[name]
        shape, dtype = file.shape(name), file.dtype(name)
        if tuple(value.shape) != shape:
            return f"has the shape {list(value.shape)} here and {list(shape)} in the file"
        if value.dtype != dtype and not {value.dtype, dtype} <= _CAST:
            return f"is {value.dtype} here and {dtype} in the file"
        if any_value:
            return None
        if any(each.is_asleep or each.is_lost for each in self._attached):
            return "is a copy, which cannot be compared now: update when the file is awake"
        stored = file.uncounted(name).to(value.device, value.dtype)
        return None if torch.equal(_bytes_of(stored), _bytes_of(value)) else "has other values here than in the file"

    def _packed(self, module: torch.nn.Module) -> set[str]:
        """Return the tensors of the file that the module they belong to keeps in another form, such as packed ones."""
        missing = self._names - named_tensors(module).keys()
        owners = dict(module.named_modules(remove_duplicate=False)) if missing else {}
        return {
            name
            for name in missing
            if (owner := owners.get(name.rpartition(".")[0])) is not None
            and not (isinstance(owner, torch.nn.Identity) or (any(owner.children()) and named_tensors(owner)))
        }

    def copy(self) -> None:
        """Copy the values of the version in use."""
        copies = {name: value for name, value in self._outside().items() if name in self._names - self._kept}
        with torch.inference_mode():
            for name, value in copies.items():
                value.copy_(self._files[name].uncounted(name))
        for device in {value.device for value in copies.values() if value.is_cuda}:
            torch.cuda.synchronize(device)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _is_capturing() -> bool:
    """Return whether a CUDA graph is captured. torch without CUDA cannot be asked."""
    uses_gpus: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return uses_gpus and torch.cuda.is_current_stream_capturing()


def _before_forward(module: torch.nn.Module, _: object) -> None:
    """The hook: a function of a module, so that copies and pickles of the followed one are possible."""
    follower = _by_module.get(module)
    start = time.monotonic()
    if follower is None or _is_capturing():
        return
    resume_at, reported = _failed.get(follower, (start, ""))
    if start < resume_at and follower.is_whole:
        return
    try:
        follower.update()
    except (OSError, ValueError) as error:
        if not follower.is_whole:  # the module is of no version
            raise
        end = time.monotonic()
        _failed[follower] = end + _PAUSE_FACTOR * (end - start), str(error)
        if str(error) != reported:
            _log.warning("the old version stays in use: %s", error)
