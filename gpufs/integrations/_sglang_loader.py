"""The loader of models that SGLang uses for `--load-format gpufs`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.weight_utils import maybe_add_mtp_safetensors

from gpufs.integrations import _sharing
from gpufs.integrations._checkpoint import ModelFiles, release
from gpufs.integrations._module_state import ModuleState
from gpufs.integrations._shared_weights import SharedWeights
from gpufs.torch import load_file

pieces, _MISSING = _sharing.private_pieces("_sglang_pieces")
logger = _sharing.Log(logging.getLogger(__name__))


class GpufsModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """The default loader, with weights in the memory of a mount.

    ``model_loader_extra_config`` has the keys of :class:`~gpufs.integrations._sharing.LoaderSettings` and of the
    default loader.
    """

    def __init__(self, load_config: Any) -> None:
        self._settings = _sharing.LoaderSettings(load_config.model_loader_extra_config)
        # What SGLang has changed in the model besides its weights: what can be noted, and a name of what cannot.
        self._attributes: dict[str, Any] = {}
        self._changed: str | None = None
        # The default loader finds the files, and knows only its own formats and keys.
        others = self._settings.others
        super().__init__(replace(load_config, load_format="safetensors", model_loader_extra_config=others))

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        load_own = partial(super().load_model, model_config=model_config, device_config=device_config)
        if self._settings.group is not None:
            raise ValueError('--model-loader-extra-config: leave out "group": only vLLM takes new versions in place')
        if self._settings.share and pieces is None:
            logger.warning("The engine loads weights of its own: this SGLang shares none (%s)", _MISSING)
        if not self._settings.share or pieces is None:
            return load_own()  # type: ignore[no-any-return]
        sleeps = pieces.uses_memory_saver()
        checkpoint, shared = self._find_shared(model_config, device_config)
        if sleeps:
            _sharing.check_sleep("--enable-memory-saver", shared)

        def load() -> torch.nn.Module:
            if checkpoint is not None and shared is not None:
                checkpoint.check(shared)
            return load_own()  # type: ignore[no-any-return]

        server = _sharing.ModelServer(
            logger=logger,
            load=load,
            build=partial(pieces.build, self.load_config, model_config),
            restored_on_failure=pieces.restored_on_failure,
            reason_against=lambda model: pieces.reason_against(model) or self._reason_against(),
            attributes=lambda _: self._attributes,
            moved=pieces.rebind,
            ranks=pieces.ranks(),
            released=checkpoint is not None and bool(checkpoint.released),
            sleeps=sleeps,
        )
        loaded = _sharing.get_model(server, shared)
        if not self._settings.keep_checkpoint:
            release(server, loaded, checkpoint, pieces.reason_to_keep_checkpoint())
        self.preloaded_weights_bytes = loaded.preloaded_bytes
        if loaded.shared is not None:
            _sharing.refuse_reload(loaded.model)
            setattr(loaded.model, pieces.REASON_AGAINST_CHANGES, _sharing.RELOAD_REFUSED)
            if sleeps:
                pieces.sleep_with_memory_saver(loaded.model)
        return loaded.model

    def _find_shared(
        self, model_config: Any, device_config: Any
    ) -> tuple[ModelFiles, SharedWeights] | tuple[None, None]:
        """Return the model's files, and where the weights of this engine are to be shared. None if they are not."""
        try:
            reason = pieces.obstacle(self.load_config, model_config)
            if reason is None:
                name = device_config.device
                device = torch.device(name if name == "cpu" else f"{name}:{device_config.gpu_id}")
                directory = _sharing.device_directory(device, model_config.model_path, self._settings.mount)
                _, files, _ = self._prepare_weights(model_config.model_path, model_config.revision, False)
                checkpoint = ModelFiles(files, directory)
                key = pieces.weights_key(model_config, self.load_config, [*checkpoint.identities.values()])
                draft, trusted = model_config.is_draft_model, self._settings.trusted
                label = _sharing.weights_label(model_config.model_path, "sglang", key, ("pp", "tp"), is_draft=draft)
                return checkpoint, SharedWeights(directory, "sglang", label, key, trusted, checkpoint.mode())
        except (_sharing.NoDirectoryError, OSError) as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001  SGLang's pieces are private and may fail in any way
            reason = repr(error)
        logger.warning("The engine loads weights of its own: %s", reason)
        return None, None

    def load_weights_and_postprocess(self, model: torch.nn.Module, weights: Any, target_device: torch.device) -> None:
        state = ModuleState(model, "sglang.srt.layers")
        super().load_weights_and_postprocess(model, weights, target_device)
        self._attributes, self._changed = state.changes()

    def _reason_against(self) -> str | None:
        return None if self._changed is None else f"SGLang changes {self._changed} when it loads the model"

    def _get_weights_iterator(self, source: Any, **named: Any) -> Iterator[tuple[str, torch.Tensor]]:
        folder, files, _ = self._prepare_weights(
            source.model_or_path,
            source.revision,
            False,  # no .pt files
            source.allow_patterns_overrides,
        )
        if source.model_config is not None:
            index_file = "model.safetensors.index.json"
            files = maybe_add_mtp_safetensors(files, folder, index_file, source.model_config.hf_config)
        if not all(_sharing.is_on_mount(file) for file in files):
            return super()._get_weights_iterator(source, **named)  # type: ignore[no-any-return]
        if not self.counter_before_loading_weights:  # of the first source
            self.counter_before_loading_weights: float = time.perf_counter()
        weights = (item for file in files for item in load_file(file).items())
        index = self.load_config.draft_model_idx
        if index is not None:
            return self._filter_mtp_weights(weights, source.prefix, index)  # type: ignore[no-any-return]
        return ((source.prefix + name, tensor) for name, tensor in weights)
