"""Plug-ins of SGLang, by which tests make it do what it does elsewhere."""

from __future__ import annotations

import json
import logging
import os
import pkgutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.stops import stop

OBJECT = object()


def change_model() -> None:
    """Changes a model as some of SGLang's models do when they are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def change(_result: Any, model: Any, *_: Any, **__: Any) -> None:
        model.model.layers[0].object = OBJECT

    HookRegistry.register("sglang.srt.models.qwen3.Qwen3ForCausalLM.load_weights", change, HookType.AFTER)


def stop_loads() -> None:
    """Stops after weights are loaded, see `support.stops`, while the folder GPUFS_TEST_STOPS has a file "armed".

    The number of the process is in the file "pid" there.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def stop_if_armed(*_: Any, **__: Any) -> None:
        folder = Path(os.environ["GPUFS_TEST_STOPS"])
        if (folder / "armed").exists():
            (folder / "pid").write_text(str(os.getpid()))
            stop(str(folder), "loaded")

    HookRegistry.register("sglang.srt.models.qwen3.Qwen3ForCausalLM.load_weights", stop_if_armed, HookType.AFTER)


def enable_memory_saver() -> None:
    """Loads the model with `--enable-memory-saver`, which without CUDA the server refuses earlier.

    In torch_memory_saver.py a stand-in of the package has the memory, which is CUDA's.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def load(original: Callable[..., None], *arguments: Any) -> None:
        from sglang.srt.runtime_context import get_exec

        with get_exec().features.override(enable_memory_saver=True):
            original(*arguments)

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", load, HookType.AROUND)
    adapters = "sglang.srt.utils.torch_memory_saver_adapter"

    def create(_original: Callable[..., Any], **_: Any) -> Any:
        return pkgutil.resolve_name(f"{adapters}._TorchMemorySaverAdapterReal")()

    HookRegistry.register(f"{adapters}.TorchMemorySaverAdapter.create", create, HookType.AROUND)


def measure_loads() -> None:
    """Appends a line of JSON to the file GPUFS_TEST_LOADS for each load of a model: some fields of an engine's outcome.

    Before a load it stops, see `support.stops`, in the folder GPUFS_TEST_STOPS.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def load(original: Callable[..., None], runner: Any, *arguments: Any) -> None:
        stop(os.environ.get("GPUFS_TEST_STOPS"), "load")
        lines: list[str] = []
        log = logging.getLogger("gpufs")
        log.addHandler(_Lines(lines))
        log.setLevel(logging.INFO)
        own, device = _memory()
        start = time.perf_counter()
        original(runner, *arguments)
        after = _memory()
        fields = {
            "load_seconds": time.perf_counter() - start,
            "own_bytes": after[0] - own,
            "device_bytes": after[1] - device,
            "external_bytes": runner.preloaded_weights_bytes,
            "log": lines,
        }
        with open(os.environ["GPUFS_TEST_LOADS"], "a") as file:
            file.write(json.dumps(fields) + "\n")

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", load, HookType.AROUND)


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def _memory() -> tuple[int, int]:
    """Returns the bytes that torch holds, of this process alone without a GPU, and those of the device in use."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), total - free
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10, 0
