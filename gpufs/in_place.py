"""Programs that are built on safetensors use files of a mount in place, without a change of their code.

`gpufs run` sets the variable ``GPUFS_IN_PLACE``. With it each Python process loads this module before the program
starts (``gpufs_in_place.pth``), so the module imports as little as possible, and torch only when the program has.

Everything in safetensors opens its files by ``safetensors.safe_open``, so this one name is replaced.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from abc import ABCMeta
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, Final

from gpufs._harmless import harmless
from gpufs._naming import named_in
from gpufs.modes import IN_PLACE_VARIABLE, MODES, REPORT_VARIABLE, Mode, check_mode

# Packages that ask for tensors in host memory and then move or copy each of them to where the model is to be. For them
# tensors of a GPU's file stay on the GPU: the move is then nothing, or a copy within the device.
_PLACES_TENSORS_ITSELF: Final = frozenset({"accelerate", "diffusers", "sglang", "transformers", "vllm"})
_TORCH: Final = frozenset({"pt", "torch", "pytorch"})


@named_in("gpufs.torch")
def use_in_place(mode: Mode = "r") -> None:
    """Let this program's safetensors use files of gpufs mounts in place.

    From now on ``safetensors.safe_open`` and ``safetensors.torch.load_file`` return tensors that are the memory of the
    file, if the file lies on a mount. The same holds for libraries that are built on them: transformers, diffusers,
    sentence-transformers, peft, accelerate. Other files are read as before. Modules that have imported ``safe_open``
    already are included, and so are Python processes that this one starts.

    A tensor is copied if the program asks for a device or a dtype that the file does not have.

    Parameters
    ----------
    mode : {"r", "r+", "c"}
        "r": the tensors are read-only, and a program that writes to one ends. "r+": changes of the tensors are changes
        of the file. "c": changes stay private to this program. As of :func:`gpufs.attach`.

    Raises
    ------
    ValueError
        ``mode`` is none of these.

    Examples
    --------
    >>> gpufs.torch.use_in_place()  # doctest: +SKIP
    >>> model = AutoModelForCausalLM.from_pretrained("/mnt/gpufs/gpu0/Qwen3-8B", device_map="cuda:0")  # doctest: +SKIP

    See Also
    --------
    gpufs.torch.load_file : the same for one file, by its own name.
    """
    check_mode(mode)
    os.environ[IN_PLACE_VARIABLE] = mode  # for processes that this one starts, and for files opened from now on
    install()


def install() -> None:
    """Replace what is imported already, and have the rest replaced when it is imported."""
    for name in _REPLACEMENTS:
        if name in sys.modules:
            _replace(name)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


@harmless("files in place")
def _replace(name: str) -> None:
    _REPLACEMENTS[name](sys.modules[name])


class _Finder:
    """Finds modules as Python does without it, and changes the modules of _REPLACEMENTS once they are loaded."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        """Find a module, as importlib.abc.MetaPathFinder.find_spec says."""
        if name not in _REPLACEMENTS or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:  # those before have been asked
            find = getattr(finder, "find_spec", None)  # Python passes over finders without one
            spec = find and find(name, path, target)
            if spec is None:
                continue
            loader: Any = spec.loader
            if hasattr(loader, "exec_module"):
                loader.exec_module = _then_replace(name, loader.exec_module)
            return spec
        return None


def _then_replace(name: str, load: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def load_and_replace(module: ModuleType) -> None:
        load(module)
        if module.__name__ == name:  # a loader may load others, too
            _replace(name)

    return load_and_replace


def _replace_safe_open(safetensors: ModuleType) -> None:
    original = safetensors.safe_open
    if getattr(original, "of_gpufs", False):
        return

    class safe_open(metaclass=ABCMeta):  # noqa: B024 - a class as the original, for isinstance() and annotations
        __doc__ = original.__doc__
        __module__ = "safetensors"
        __qualname__ = "safe_open"

        def __new__(cls, filename: str | os.PathLike[str], framework: str, device: Any = "cpu", **options: Any) -> Any:
            file = None
            if framework in _TORCH and _lies_on_mount(filename):
                _Opened.on_mount = True
                file = _open(filename, None if _may_stay(device, sys._getframe(1)) else device)
            elif framework in _TORCH:
                _Opened.elsewhere(filename)
            if file is None:
                return original(filename, framework, device, **options)
            safe_open.register(type(file))
            return file

        def __init_subclass__(cls) -> None:
            raise TypeError("type 'safetensors.safe_open' is not an acceptable base type")

    for name, method in vars(original).items():
        if name not in vars(safe_open):
            setattr(safe_open, name, _method(name, method))
    safe_open.register(original)
    _put("safe_open", original, safe_open)


class _Opened:
    """Whether this program has opened files of a mount, and whether others."""

    on_mount = False
    others = False

    @classmethod
    def elsewhere(cls, name: str | os.PathLike[str]) -> None:
        """Report a file that is on no mount: at the end if all were so, or at once if everything is to be reported."""
        if REPORT_VARIABLE in os.environ:
            print(f"gpufs: {os.fspath(name)} is on no mount, and is read as without gpufs", file=sys.stderr)
        elif not cls.others:
            atexit.register(cls.report, os.fspath(name))
        cls.others = True

    @classmethod
    @harmless("files in place")
    def report(cls, name: str) -> None:
        if not cls.on_mount:
            remedy = "For a model's name on the Hub: gpufs run --hub DIR"
            print(f"gpufs: no safetensors file was used in place: {name} is on no mount. {remedy}", file=sys.stderr)


def _method(name: str, of_original: Any) -> Any:
    return functools.wraps(of_original)(lambda file, *arguments, **named: getattr(file, name)(*arguments, **named))


def _put(name: str, original: Any, own: Any) -> None:
    """Put a function or class in the place of a library's, also in modules that have imported that."""
    own.of_gpufs = True
    for module in [*sys.modules.values()]:
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, own)


def _may_stay(device: Any, caller: FrameType | None) -> bool:
    if str(device) != "cpu":
        return False
    package = "safetensors"
    while caller is not None and package == "safetensors":  # load_file of safetensors calls safe_open, too
        package = caller.f_globals.get("__name__", "").partition(".")[0]
        caller = caller.f_back
    return package in _PLACES_TENSORS_ITSELF


def _lies_on_mount(path: str | os.PathLike[str]) -> bool:
    from gpufs import mounting

    try:
        device = os.stat(path).st_dev
    except (OSError, TypeError, ValueError):
        return False  # safetensors says what is wrong
    return any(entry.st_dev == device and entry.fstype == mounting.FILESYSTEM_TYPE for entry in mounting.listed())


def _open(path: str | os.PathLike[str], device: Any) -> Any:
    """Open the file in place; None if that is impossible: then safetensors reads it, or reports what is wrong."""
    from gpufs.torch._file import InPlaceFile
    from gpufs.torch._gpu_errors import explain_gpu_errors
    from gpufs.torch._private_buffers import copy_registered_buffers

    copy_registered_buffers()
    explain_gpu_errors()
    mode = os.environ.get(IN_PLACE_VARIABLE, "r")
    try:
        if mode not in MODES:
            raise ValueError(f"{IN_PLACE_VARIABLE} is {mode!r}, which is none of 'r', 'r+' and 'c'")
        return InPlaceFile(path, device, mode)
    except (OSError, ValueError) as error:
        import logging

        from gpufs.torch._report import loading

        name = os.fspath(path)
        loading.opened(name).copied("not mapped", os.stat(name).st_size, tensors=0)
        logging.getLogger("gpufs").warning("%s is copied instead of used in place: %s", os.fspath(path), error)
        return None


def _replace_warmup(modeling_utils: ModuleType) -> None:
    """Keep transformers from allocating memory for all weights before it loads them, where none will be copied."""
    original = getattr(modeling_utils, "caching_allocator_warmup", None)
    if original is None or getattr(original, "of_gpufs", False):
        return

    @functools.wraps(original)
    def caching_allocator_warmup(*arguments: Any, **named: Any) -> None:
        files = sys._getframe(1).f_locals.get("checkpoint_files")
        if not files or not all(_lies_on_mount(file) for file in files):
            original(*arguments, **named)

    _put("caching_allocator_warmup", original, caching_allocator_warmup)


def _replace_setter(modeling: ModuleType) -> None:
    """Keep accelerate from making buffers of tensors in place; other libraries are seen by torch's hook."""
    original = getattr(modeling, "set_module_tensor_to_device", None)
    if original is None or getattr(original, "of_gpufs", False):
        return
    from gpufs.torch._private_buffers import copying_buffers  # accelerate has imported torch

    _put("set_module_tensor_to_device", original, copying_buffers(original))


def _replace_materialize(core_model_loading: ModuleType) -> None:
    """Have the report see what transformers makes of each tensor."""
    original = getattr(core_model_loading, "_materialize_copy", None)
    if original is None or getattr(original, "of_gpufs", False):
        return

    @functools.wraps(original)
    def _materialize_copy(tensor: Any, *arguments: Any, **named: Any) -> Any:
        made = original(tensor, *arguments, **named)
        note = getattr(tensor, "became", None)  # of a TensorSlice
        if note is not None:
            note(made)
        return made

    _put("_materialize_copy", original, _materialize_copy)


_REPLACEMENTS: Final = {
    "accelerate.utils.modeling": _replace_setter,
    "safetensors": _replace_safe_open,
    "transformers.core_model_loading": _replace_materialize,
    "transformers.modeling_utils": _replace_warmup,
}
