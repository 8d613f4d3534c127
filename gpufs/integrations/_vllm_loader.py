"""The loader of models that vLLM uses for `--load-format gpufs`."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from gpufs.formats import FormatError
from gpufs.integrations._directories import NoDirectoryError, device_directory, is_on_mount
from gpufs.integrations._shared_weights import OpenWeights, SharedWeights, named_tensors, use_in_place
from gpufs.torch import load_file
from gpufs.units import bytes_text

pieces: Any
_MISSING = ""
try:
    from gpufs.integrations import _vllm_pieces as pieces
except ImportError as error:
    pieces = None
    _MISSING = str(error)

logger = init_logger("vllm.gpufs")

_FOLDER = "vllm"
# For an engine that loads the same model, perhaps from a slow disk.
_CLAIM_SECONDS = 600.0
_SLEEP_REFUSED = (
    "Sleep mode frees the weights of one engine, and with --load-format gpufs they belong to all engines. Start "
    "without --enable-sleep-mode, or with --model-loader-extra-config '{\"share\": false}', which gives this engine "
    "weights of its own"
)
_RELOAD_REFUSED = (
    "The weights of this engine are a file on the mount that other engines use too, and cannot be changed. Start the "
    "engine with --model-loader-extra-config '{\"share\": false}' to load weights into it"
)


class GpufsModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """The default loader, with weights in the memory of a mount.

    Keys of ``model_loader_extra_config``, besides those of the default loader:

    - share: false gives the engine weights of its own.
    - mount: the mount that keeps shared weights. Otherwise it is the one that has the model's files, or the only one
      that has the engine's GPU.
    - trust: a list of users whose shared weights are used, besides one's own, root's and those of the mount's owner.
    """

    def __init__(self, load_config: Any) -> None:
        extra = dict(load_config.model_loader_extra_config or {})
        self._share: bool = extra.pop("share", True)
        self._mountpoint: str | None = extra.pop("mount", None)
        self._trusted = tuple(str(user) for user in extra.pop("trust", ()))
        self._elements: dict[str, int] = {}  # of each tensor before vLLM processes it
        # The default loader finds the files, and knows only its own formats and keys.
        super().__init__(replace(load_config, load_format="safetensors", model_loader_extra_config=extra))

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        if self._share and model_config.enable_sleep_mode:
            raise ValueError(_SLEEP_REFUSED)
        shared = self._find_shared(vllm_config, model_config)
        if shared is None:
            return self._load(vllm_config, model_config, prefix)
        weights = _open(shared)
        if weights is None:
            with _claim(shared) as mine:
                weights = _open(shared, claimed=mine)
                if weights is None:
                    model = self._load(vllm_config, model_config, prefix)
                    if mine:
                        self._publish(model, shared)
                    return model
        try:
            return _map(vllm_config, model_config, prefix, weights)
        except Exception as error:  # noqa: BLE001  vLLM's pieces are private and may fail in any way
            logger.warning("%s does not fit this engine, which loads weights of its own: %r", shared.path, error)
            del weights
            return self._load(vllm_config, model_config, prefix)

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Returns the bytes of the weights that this engine will map, and that are in the GPU's memory already."""
        configs = [vllm_config.model_config]
        speculative = vllm_config.speculative_config
        if speculative is not None and speculative.draft_model_config is not None:
            configs.append(speculative.draft_model_config)
        total = 0
        for model_config in configs:
            shared = self._find_shared(vllm_config, model_config)
            weights = _open(shared, verify=False) if shared is not None else None
            if weights is not None and not weights.private:
                total += weights.bytes
        return total

    def _find_shared(self, vllm_config: Any, model_config: Any) -> SharedWeights | None:
        """Where the weights of this engine are to be shared; None if they are not."""
        if not self._share:
            return None
        reason = f"this vLLM shares no weights ({_MISSING})" if pieces is None else pieces.obstacle(vllm_config)
        if reason is None:
            try:
                device = torch.device(self.load_config.device or vllm_config.device_config.device)
                directory = device_directory(device, model_config.model, self._mountpoint)
                _, files, *_ = self._prepare_weights(model_config.model, None, model_config.revision, False, None)
                key = pieces.weights_key(vllm_config, model_config, files)
                return SharedWeights(directory, _FOLDER, pieces.weights_label(model_config, key), key, self._trusted)
            except NoDirectoryError as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001  vLLM's pieces are private and may fail in any way
                reason = repr(error)
        logger.warning("The engine loads weights of its own: %s", reason)
        return None

    def _load(self, vllm_config: Any, model_config: Any, prefix: str) -> torch.nn.Module:
        model: torch.nn.Module = super().load_model(vllm_config, model_config, prefix)
        return model

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        self._elements = {name: tensor.numel() for name, tensor in named_tensors(model).items()}
        super().load_weights(model, model_config)

    def _publish(self, model: torch.nn.Module, shared: SharedWeights) -> None:
        """Publishes the weights of a model, and moves the model to the published memory."""
        start = time.perf_counter()
        reason = pieces.reason_against(model) or self._emptied(model)
        if reason is None:
            try:
                weights = shared.publish(model, pieces.export_model_attrs(model))
            except (FormatError, OSError, TypeError) as error:
                reason = str(error)
        if reason is not None:
            logger.warning("The weights of this engine are its own: %s", reason)
            return
        use_in_place(model, weights)
        _refuse_reload(model)
        gc.collect()
        torch.accelerator.empty_cache()
        logger.info(
            "Published the weights as %s (%s) in %.2f seconds. Later engines map them",
            shared.path,
            bytes_text(weights.bytes),
            time.perf_counter() - start,
        )

    def _emptied(self, model: torch.nn.Module) -> str | None:
        """Says which parameter vLLM has emptied: its bytes are where no other engine finds them. None if none is."""
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
        if not all(is_on_mount(file) for file in files):
            return super()._get_weights_iterator(source)  # type: ignore[no-any-return]
        if not self.counter_before_loading_weights:  # of the first source
            self.counter_before_loading_weights: float = time.perf_counter()
        return ((source.prefix + name, tensor) for file in files for name, tensor in load_file(file).items())


def _open(shared: SharedWeights, *, verify: bool = True, claimed: bool | None = None) -> OpenWeights | None:
    """Attaches shared weights. None if there are none that can be used.

    claimed: whether the name is claimed, so that damaged ones can be removed. None: before that, nothing is logged.
    """
    try:
        return shared.open(verify=verify)
    except (FormatError, OSError) as error:
        if claimed is None:
            return None
        if claimed and isinstance(error, FormatError):
            logger.warning("Damaged shared weights are replaced: %s", error)
            shared.discard()
        else:
            logger.warning("Shared weights cannot be used: %s", error)
    return None


def _claim(shared: SharedWeights) -> AbstractContextManager[bool]:
    """Claims the name of shared weights, as long as the context lasts. It has False if that is not possible."""
    try:
        return shared.claim(_CLAIM_SECONDS, lambda: logger.info("Waiting for the engine that loads %s", shared.path))
    except OSError as error:
        logger.warning("Weights cannot be published: %s", error)
        return nullcontext(False)


def _map(vllm_config: Any, model_config: Any, prefix: str, weights: OpenWeights) -> torch.nn.Module:
    """Builds a model from shared weights."""
    start = time.perf_counter()
    model: torch.nn.Module = pieces.build(vllm_config, model_config, prefix, weights)
    _refuse_reload(model)
    logger.info(
        "Mapped %s (%s%s) in %.2f seconds",
        weights.path,
        bytes_text(weights.bytes),
        ", a private copy, since this user may not write to the file" if weights.private else "",
        time.perf_counter() - start,
    )
    return model


def _refuse_reload(model: torch.nn.Module) -> None:
    """Loading weights into the model would write to memory that is mapped read-only, which ends the process."""

    def load_weights(*_: object, **__: object) -> None:
        raise RuntimeError(_RELOAD_REFUSED)

    model.load_weights = load_weights  # type: ignore[assignment]
