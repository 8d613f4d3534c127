"""vLLM: `--load-format gpufs` takes weights from the memory of a mount.

The first engine loads a model, lets vLLM process the weights, and publishes them on the mount of its GPU. It uses the
published memory itself, and so does every later engine: nothing is read or copied. Where a quantization method of vLLM
does not support that, the engine gets weights of its own, by a copy within the device if the model's files are on a
mount. That works with every quantization and any number of GPUs.
"""

from __future__ import annotations

from contextlib import suppress

from gpufs._harmless import harmless


def register() -> None:
    """Add the load format; vLLM calls this in each of its processes, also for engines that do not use it."""
    _register_loader()
    _register_sleep()
    _register_transfer()


@harmless("--load-format gpufs")
def _register_loader() -> None:
    from vllm.model_executor.model_loader import register_model_loader

    from gpufs.integrations._vllm_loader import GpufsModelLoader

    register_model_loader("gpufs")(GpufsModelLoader)


@harmless("gpufs as the backend of sleep mode")
def _register_sleep() -> None:
    """Add the backend for sleep mode. vLLM 0.32 has the hook, and 0.33 the option that chooses it."""
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    except ImportError:
        return
    with suppress(ValueError):  # the name is registered already
        SleepModeBackendFactory.register_backend("gpufs", "gpufs.integrations._vllm_sleep", "GpufsSleepBackend")


@harmless("gpufs as the backend of weight transfers")
def _register_transfer() -> None:
    """Add the backend for weights of a trainer, for which vLLM 0.32 and 0.33 have the hook."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    with suppress(ValueError):  # the name is registered already
        WeightTransferEngineFactory.register_engine(
            "gpufs", "gpufs.integrations._vllm_transfer", "GpufsWeightTransferEngine"
        )
