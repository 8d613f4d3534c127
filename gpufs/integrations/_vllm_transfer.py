"""New weights for an engine of vLLM that runs, from a file of a mount: `--weight-transfer-config`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from gpufs.formats.records import UNSAVED_BUFFER
from gpufs.formats.safetensors import without_garbage_collection
from gpufs.integrations import _vllm_pieces as pieces
from gpufs.integrations._group import group_of
from gpufs.torch._file import Checkpoint


@dataclass
class GpufsInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on."""


@dataclass
class GpufsUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """``path``: a safetensors file of a mount, or the index or directory of several, in the form of a checkpoint."""

    path: str


class GpufsWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Loads the tensors of a file where they are, so that only the engine's own weights are written.

    A session of vLLM, from its start to its end, may have several files. Each is checked when it is named, and all are
    loaded at the end of the session. Until then the engine serves as before, whatever becomes of the trainer.
    """

    init_info_cls = GpufsInitInfo
    update_info_cls = GpufsUpdateInfo
    defers_processing = True

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._accepted: dict[str, torch.Tensor] = {}
        self._group = group_of(model)
        self._named: str | None = None  # the version of the group in this session

    def init_transfer_engine(self, init_info: GpufsInitInfo) -> None:
        """Forget what a trainer has named that is gone."""
        self.shutdown()

    def start_weight_update(self) -> None:
        self.shutdown()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if self._group is None:
            with pieces.in_all_ranks():
                self.receive_weights(self.parse_update_info(update_info))
            return
        named, self._named = self._named, None
        self._group.forget()
        with pieces.in_all_ranks():
            path = _absolute(self.parse_update_info(update_info).path)
            if named is not None:
                raise ValueError(f"{path}: engines of a group take one version in a session, and {named} was named")
            checkpoint = self._group.checkpoint(path)
        arguments = self.vllm_config.load_config, self.model_config, self.model, self._group.tensors
        self._group.prepare(checkpoint, lambda target: pieces.process(*arguments, _tensors_of(path), target))
        self._named = path

    def receive_weights(self, update_info: GpufsUpdateInfo) -> None:
        """Accept a file. OSError, FormatError or ValueError if it cannot be used: nothing has changed then."""
        tensors = _tensors_of(_absolute(update_info.path))
        pieces.check_weights(self.vllm_config.load_config, self.model_config, self.model, tensors)
        self._accepted |= tensors

    def finish_weight_update(self) -> None:
        """Load what was accepted, or use the version of the group that is prepared."""
        if self._group is not None:
            self._group.commit()
        accepted, self._accepted = self._accepted, {}
        if accepted:
            pieces.load_weights(self.model, self.model_config, accepted)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._named = None

    def shutdown(self) -> None:
        """Forget what was accepted."""
        self._accepted.clear()
        self._named = None
        if self._group is not None:
            self._group.forget()


def _absolute(path: str) -> str:
    if not os.path.isabs(path):
        raise ValueError(f"{path} is not an absolute path")
    return path


def _tensors_of(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, which has no buffers that are not in a state_dict()."""
    with without_garbage_collection():
        file = Checkpoint(path, "r")
        return {name: each for name, each in file.tensors() if file.record(name).kind != UNSAVED_BUFFER}
