"""The loader of models that SGLang uses for `--load-format gpufs`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from errno import EAGAIN, ENOTDIR
from functools import partial
from typing import Any

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.weight_utils import maybe_add_mtp_safetensors

from gpufs.integrations import _sharing
from gpufs.integrations._checkpoint import ModelFiles, release
from gpufs.integrations._group import Group
from gpufs.integrations._module_state import ModuleState
from gpufs.integrations._shared_weights import OpenWeights, SharedWeights, hash_of
from gpufs.torch import load_file

pieces, _MISSING = _sharing.private_pieces("_sglang_pieces")
logger = _sharing.Log(logging.getLogger(__name__))
# An attribute of a model: how many tensors its checkpoint has, and a digest of their names and shapes.
_FORM = "gpufs_names_and_shapes"
_FORMATS = (None, "auto", "gpufs", "safetensors")


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
        self._loaded: dict[str, list[int]] = {}  # the shapes of the checkpoint's tensors
        self._group: tuple[Group, OpenWeights] | None = None  # and the weights that the engine has begun with
        # The default loader finds the files, and knows only its own formats and keys.
        others = self._settings.others
        super().__init__(replace(load_config, load_format="safetensors", model_loader_extra_config=others))

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        load_own = partial(super().load_model, model_config=model_config, device_config=device_config)
        if self._settings.group is not None:
            reason = _MISSING if pieces is None else pieces.obstacle_to_group()
            if reason is not None:
                raise ValueError(f'--model-loader-extra-config: leave out "group": {reason}')
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
            if self._settings.group is not None and shared is not None:
                self._group = Group(loaded.model, shared, loaded.shared, server.ranks, logger), loaded.shared
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
                group = self._settings.group
                source, version = checkpoint.shared_as(group)
                key = pieces.weights_key(model_config, self.load_config, source)
                draft, trusted = model_config.is_draft_model, self._settings.trusted
                name = group or model_config.model_path
                label = _sharing.weights_label(name, "sglang", key, ("pp", "tp"), is_draft=draft)
                return checkpoint, SharedWeights(directory, "sglang", label, key, trusted, checkpoint.mode(), version)
        except (_sharing.NoDirectoryError, OSError) as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001  SGLang's pieces are private and may fail in any way
            reason = repr(error)
        logger.warning("The engine loads weights of its own: %s", reason)
        return None, None

    def load_weights_and_postprocess(self, model: torch.nn.Module, weights: Any, target_device: torch.device) -> None:
        state = ModuleState(model, "sglang.srt.layers")
        self._loaded.clear()

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                self._loaded[name] = list(tensor.shape)
                yield name, tensor

        super().load_weights_and_postprocess(model, noted(), target_device)
        self._attributes, self._changed = state.changes()
        # SGLang takes a checkpoint that lacks tensors, and a part of one that is too large.
        self._attributes[_FORM] = f"{len(self._loaded)} tensors, {hash_of(self._loaded)[:16]}"

    def take_version(
        self, updater: Any, model_path: str, load_format: str | None, *_: Any, **__: Any
    ) -> tuple[bool, str] | None:
        """Make the weights of a group those of a checkpoint, and return what SGLang's own call does.

        None if the engine's weights are its own. Graphs need not be captured again, since no address changes.
        """
        if self._group is None:
            return None
        try:
            self._take_version(*self._group, updater, model_path, load_format)
        except Exception as error:  # noqa: BLE001  it would end SGLang's scheduler
            return False, f"The engine keeps its weights: {error}"
        updater.model_config.model_path = model_path
        runner = updater.get_model_runner()
        fields = {"model_path": model_path, "load_format": "gpufs", "load_config": runner.load_config}
        updater.update_model_fields(runner.model, **fields)
        return True, f"The weights are those of {model_path}."

    def _take_version(
        self, group: Group, weights: OpenWeights, updater: Any, path: str, load_format: str | None
    ) -> None:
        def process(tensors: Mapping[str, torch.Tensor]) -> None:
            self._loaded.clear()
            reason = None
            try:
                pieces.load_into(tensors, path, self, updater.model_config, torch.device(updater.device))
            except Exception as error:  # noqa: BLE001  SGLang's pieces are private and may fail in any way
                last = "{0[0]} {0[1]}".format(self._loaded.popitem()) if self._loaded else "its first tensor"
                reason = f"{path} cannot be loaded, at {last}: {error!r}"
            if reason := reason or self._reason_against():  # without the traceback, which keeps the tensors
                raise ValueError(reason)
            for name in sorted(self._attributes.keys() | weights.attributes.keys()):
                new, old = (each.get(name) for each in (self._attributes, weights.attributes))
                if new != old:
                    raise ValueError(f"{path} does not fit its group: {name} would be {new!r}, and is {old!r}")

        with _sharing.in_all_ranks(pieces.ranks()):
            if load_format not in _FORMATS:
                raise ValueError(f"load_format {load_format!r}: engines of a group load safetensors: leave it out")
            if pieces.is_asleep():
                raise OSError(EAGAIN, "the weights sleep: resume_memory_occupation first")
            if not os.path.isdir(path):
                raise NotADirectoryError(ENOTDIR, "is not a directory with a checkpoint", path)
            _, files, _ = self._prepare_weights(path, None, False)
            checkpoint = ModelFiles(files, weights.path.parents[1])
        group.prepare(checkpoint, process)
        group.commit()

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
