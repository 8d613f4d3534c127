"""The loader of models that vLLM uses for `--load-format gpufs`."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from gpufs.integrations import _sharing
from gpufs.integrations._checkpoint import ModelFiles, release
from gpufs.integrations._group import Group
from gpufs.integrations._shared_weights import SharedWeights
from gpufs.torch import load_file
from gpufs.torch._module import named_tensors

pieces, _MISSING = _sharing.private_pieces("_vllm_pieces")
logger = _sharing.Log(init_logger("vllm.gpufs"))


class GpufsModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """The default loader, with weights in the memory of a mount.

    ``model_loader_extra_config`` has the keys of :class:`~gpufs.integrations._sharing.LoaderSettings` and of the
    default loader.
    """

    def __init__(self, load_config: Any) -> None:
        self._settings = _sharing.LoaderSettings(load_config.model_loader_extra_config)
        self._elements: dict[str, int] = {}  # of each tensor before vLLM processes it
        self._helpers: Any = None  # as they were then
        # The default loader finds the files, and knows only its own formats and keys.
        others = self._settings.others
        super().__init__(replace(load_config, load_format="safetensors", model_loader_extra_config=others))

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        arguments = vllm_config, model_config, prefix
        load_own = partial(super().load_model, *arguments)
        if self._settings.share and pieces is None:
            if self._settings.group is not None:
                raise ValueError(f'--model-loader-extra-config: leave out "group": this vLLM shares none ({_MISSING})')
            logger.warning("The engine loads weights of its own: this vLLM shares none (%s)", _MISSING)
        if not self._settings.share or pieces is None:
            return load_own()  # type: ignore[no-any-return]
        if self._settings.group is not None:
            pieces.check_group(vllm_config)
        foreign = getattr(model_config, "sleep_mode_backend", None) != "gpufs"
        if model_config.enable_sleep_mode and foreign and pieces.obstacle(vllm_config, self._settings.group) is None:
            remedy = "add --sleep-mode-backend gpufs (vLLM 0.33), and mount with --host-memory; or start "
            raise ValueError(_sharing.SLEEP_REFUSED.format(option="--enable-sleep-mode", remedy=remedy))
        checkpoint, shared = self._find_shared(vllm_config, model_config)
        if model_config.enable_sleep_mode:
            _sharing.check_sleep("--enable-sleep-mode", shared)

        def load() -> torch.nn.Module:
            if checkpoint is not None and shared is not None:
                checkpoint.check(shared)
            return load_own()  # type: ignore[no-any-return]

        server = _sharing.ModelServer(
            logger=logger,
            load=load,
            build=partial(pieces.build, *arguments),
            restored_on_failure=partial(pieces.restored_on_failure, vllm_config.compilation_config),
            reason_against=lambda model: pieces.reason_against(model, self._settings.group) or self._emptied(model),
            attributes=lambda model: pieces.notes(model, self._helpers),
            moved=lambda _: None,
            ranks=get_tp_group(),
            released=checkpoint is not None and bool(checkpoint.released),
            sleeps=bool(model_config.enable_sleep_mode),
        )
        loaded = _sharing.get_model(server, shared)
        self._helpers = None
        if not self._settings.keep_checkpoint:
            release(server, loaded, checkpoint, pieces.reason_to_keep_checkpoint(vllm_config))
        if loaded.shared is not None:
            _sharing.refuse_reload(loaded.model, partial(pieces.undo_reload, loaded.model))
            if self._settings.group is not None and shared is not None:
                Group(loaded.model, shared, loaded.shared, server.ranks, logger)
        return loaded.model

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        if _sharing.refuses_reload(model):
            raise RuntimeError(_sharing.RELOAD_REFUSED)
        return super().get_all_weights(model_config, model)  # type: ignore[no-any-return]

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Return the bytes of the weights that this engine will map, and that are in the GPU's memory already."""
        configs = [vllm_config.model_config]
        speculative = vllm_config.speculative_config
        if speculative is not None and speculative.draft_model_config is not None:
            configs.append(speculative.draft_model_config)
        total = 0
        for model_config in configs:
            _, shared = self._find_shared(vllm_config, model_config)
            weights = _sharing.open_weights(shared, verify=False) if shared is not None else None
            if weights is not None and not weights.private:
                total += weights.bytes
        if total:
            # vLLM has just collected garbage, and does so three times more when it loads the model, which takes longer
            # than mapping the weights. What is frozen is left out. vLLM itself freezes when it has started.
            gc.freeze()
        return total

    def _find_shared(self, vllm_config: Any, model_config: Any) -> tuple[ModelFiles, SharedWeights] | tuple[None, None]:
        """Return the model's files, and where the weights of this engine are to be shared. None if they are not."""
        if not self._settings.share or pieces is None:
            return None, None
        reason = pieces.obstacle(vllm_config, self._settings.group)
        if reason is None:
            try:
                device = torch.device(self.load_config.device or vllm_config.device_config.device)
                directory = _sharing.device_directory(device, model_config.model, self._settings.mount)
                _, files, *_ = self._prepare_weights(model_config.model, None, model_config.revision, False, None)
                checkpoint = ModelFiles(files, directory)
                group = self._settings.group
                source, version = checkpoint.shared_as(group)
                key = pieces.weights_key(vllm_config, model_config, source)
                name = group or model_config.model
                label = _sharing.weights_label(name, "vllm", key, ("dp", "pp", "tp"), is_draft=key["is_draft"])
                where = directory, "vllm", label, key, self._settings.trusted, checkpoint.mode(), version
                return checkpoint, SharedWeights(*where)
            except (_sharing.NoDirectoryError, OSError) as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001  vLLM's pieces are private and may fail in any way
                reason = repr(error)
        logger.warning("The engine loads weights of its own: %s", reason)
        return None, None

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        self._elements = {name: tensor.numel() for name, tensor in named_tensors(model).items()}
        if pieces is not None:
            self._helpers = pieces.helpers(model)
        super().load_weights(model, model_config)

    def _emptied(self, model: torch.nn.Module) -> str | None:
        """Report which parameter vLLM has emptied: its bytes are where no other engine finds them. None if none is."""
        for name, tensor in named_tensors(model).items():
            if not tensor.numel() and self._elements.get(name):
                return f"vLLM keeps {name} in a form of its own (on CPUs oneDNN's)"
        return None

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        _, files, *_ = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            False,  # no .pt files
            source.allow_patterns_overrides,
        )
        if not all(_sharing.is_on_mount(file) for file in files):
            return super()._get_weights_iterator(source)  # type: ignore[no-any-return]
        if not self.counter_before_loading_weights:  # of the first source
            self.counter_before_loading_weights: float = time.perf_counter()
        return ((source.prefix + name, tensor) for file in files for name, tensor in load_file(file).items())
