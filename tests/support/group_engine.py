"""An engine of a group, with a module of torch in the place of a server's model.

Usage: group_engine.py DEVICE CHECKPOINT [RANK FILE]: a program that does what each line says, and answers with a line:
"update CHECKPOINT" (errno, 0 if it has), "has CHECKPOINT" (True or False), "hang CHECKPOINT" (while it processes),
"fail CHECKPOINT" (in the middle). RANK: of an engine with two, which meet by the file.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Mapping
from errno import EIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gpufs.integrations._checkpoint import ModelFiles
from gpufs.integrations._group import Group
from gpufs.integrations._shared_weights import OpenWeights, SharedWeights, fill
from gpufs.integrations._sharing import Log, ModelServer, get_model

ONE_RANK = SimpleNamespace(world_size=1, rank_in_group=0)
Tensors = Mapping[str, torch.Tensor]


class Model(torch.nn.Module):
    """Two tied layers, a small parameter and a buffer that the server computes."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(256, 256, bias=False)
        self.two = torch.nn.Linear(256, 256, bias=False)
        self.two.weight = self.one.weight
        self.norm = torch.nn.LayerNorm(256)
        self.register_buffer("total", torch.zeros(()), persistent=False)


def write_version(folder: Path, number: int, **changes: torch.Tensor) -> Path:
    """Writes a checkpoint of the model."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(number)
    shapes = {"one.weight": (256, 256), "norm.weight": (256,), "norm.bias": (256,)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file({**tensors, **changes}, folder / "model.safetensors")
    return folder


def process(checkpoint: Path, target: Tensors) -> None:
    """What this server makes of a checkpoint: twice its values, and their sum."""
    total = torch.zeros(())
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name not in target or target[name].shape != tensor.shape:
            raise ValueError(f"{name} does not fit")
        target[name].copy_(tensor * 2)
        total += tensor.sum()
    target["total"].copy_(total)


class OwnWeights(Exception):
    """The engine has weights of its own."""


class Lines(logging.Handler):
    """Collects what is logged."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


class Engine:
    """An engine of a group, which starts with a checkpoint."""

    def __init__(self, device: Path, checkpoint: Path, log: list[str] | None = None, ranks: Any = ONE_RANK) -> None:
        files = ModelFiles([str(checkpoint / "model.safetensors")], device)
        key = {"rank": ranks.rank_in_group}
        label = f"group-{ranks.rank_in_group}"
        shared = SharedWeights(device, "engines", label, key, (), files.mode(), files.version)
        logger = logging.Logger("engine")
        if log is not None:
            logger.addHandler(Lines(log))
        server = ModelServer(
            logger=Log(logger, {}),
            load=lambda: self._load(checkpoint),
            build=self._build,
            restored_on_failure=lambda: torch.no_grad(),
            reason_against=lambda _: None,
            attributes=lambda _: {},
            moved=lambda _: None,
            ranks=ranks,
        )
        loaded = get_model(server, shared)
        if loaded.shared is None:
            raise OwnWeights
        self.model = loaded.model
        self.group = Group(self.model, shared, loaded.shared, ranks, server.logger)
        self.addresses = self._addresses()

    @staticmethod
    def _load(checkpoint: Path) -> torch.nn.Module:
        model = Model().requires_grad_(False)
        process(checkpoint, {**dict(model.named_parameters()), **dict(model.named_buffers())})
        return model

    @staticmethod
    def _build(weights: OpenWeights) -> torch.nn.Module:
        with torch.device("meta"):
            model = Model()
        fill(model, weights)
        return model

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.group.tensors.values()]

    def prepare(self, checkpoint: Path, work: Callable[[Path, Tensors], None] = process) -> None:
        self.group.prepare(self.group.checkpoint(str(checkpoint)), lambda target: work(checkpoint, target))

    def update(self, checkpoint: Path, work: Callable[[Path, Tensors], None] = process) -> None:
        self.prepare(checkpoint, work)
        self.group.commit()

    def has(self, checkpoint: Path) -> bool:
        """Whether all of the model is that version's, where it was from the beginning."""
        assert self._addresses() == self.addresses
        expected = dict(self._load(checkpoint).named_parameters()) | dict(self._load(checkpoint).named_buffers())
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        same = [torch.equal(own[name], value) for name, value in expected.items()]
        assert len(set(same)) == 1, "a mixture"
        return same[0]


def main() -> None:
    device, first, *of_rank = sys.argv[1:]
    ranks = ONE_RANK
    if of_rank:
        rank, file = of_rank
        torch.distributed.init_process_group("gloo", f"file://{file}", world_size=2, rank=int(rank))
        ranks = SimpleNamespace(world_size=2, rank_in_group=int(rank), cpu_group=None)
    try:
        engine = Engine(Path(device), Path(first), ranks=ranks)
    except OwnWeights:
        print("own", flush=True)
        return

    def hang(_checkpoint: Path, target: Tensors) -> None:
        target["one.weight"].zero_()
        print("hangs", flush=True)
        signal.pause()

    def fail(_checkpoint: Path, target: Tensors) -> None:
        target["one.weight"].zero_()
        raise OSError(EIO, "as asked for")

    print("ready", flush=True)
    for line in sys.stdin:
        command, path = line.split()
        answer: object = 0
        try:
            if command == "has":
                answer = engine.has(Path(path))
            else:
                engine.update(Path(path), {"hang": hang, "fail": fail}.get(command, process))
        except OSError as error:
            answer = error.errno
        except RuntimeError:  # another rank has failed
            answer = EIO
        print(answer, flush=True)


if __name__ == "__main__":
    main()
