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

from gpufs.integrations._sharing import RELOAD_REFUSED, refuses_reload
from gpufs.torch import load_file


@dataclass
class GpufsInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on."""


@dataclass
class GpufsUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """``path``: a safetensors file of a mount, or the index or directory of several, in the form of a checkpoint."""

    path: str


class GpufsWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Loads the tensors of a file where they are, so that only the engine's own weights are written.

    A session of vLLM, from its start to its end, may have several files. The engine is changed when the first of them
    has been opened: a wrong path changes nothing.
    """

    init_info_cls = GpufsInitInfo
    update_info_cls = GpufsUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._has_begun = False
        if refuses_reload(model):
            raise ValueError(RELOAD_REFUSED)

    def init_transfer_engine(self, init_info: GpufsInitInfo) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        self._has_begun = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: GpufsUpdateInfo) -> None:
        """Load a file. OSError or FormatError if it cannot be used."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if not os.path.isabs(update_info.path):
            raise ValueError(f"{update_info.path} is not an absolute path")
        weights = load_file(update_info.path)
        if not self._has_begun:
            initialize_layerwise_reload(self.model)
            self._has_begun = True
        with disable_mtp_completeness_check():
            self.model.load_weights(weights.items())

    def finish_weight_update(self) -> None:
        """End a session: vLLM processes the weights that it has not processed yet."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._has_begun:
            finalize_layerwise_reload(self.model, self.model_config)
            self._has_begun = False

    def shutdown(self) -> None:
        """Do nothing: a file is open only while it is loaded."""
