"""Engines of model servers as programs of their own, and small models for them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

import safetensors.torch
import torch

from support.mounting import REPOSITORY, GpufsMount
from support.processes import wait_until
from support.surviving import Survivor

Outcome = TypeVar("Outcome")
Mount = TypeVar("Mount", GpufsMount, Survivor)


@dataclass
class Servers(Generic[Outcome, Mount]):
    """Engines of one server that load a model from a mount, or from a directory of this machine.

    program: runs an engine to its end, and prints an outcome. log: of the last engine.
    """

    program: str
    outcome: type[Outcome]
    python: Path
    environment: Mapping[str, str]
    mount: Mount
    model: Path
    scratch: Path
    log: str = ""

    def start(self, *prefix: str, model: Path | None = None, plugins: str | None = None, **settings: object) -> Outcome:
        """Runs an engine to its end. prefix: a program that runs it, with its arguments. plugins: of SGLang."""
        command, environment = self._engine(prefix, model, plugins, settings)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{(late.stderr or b'').decode()}\nThe engine did not end within 600 s") from None
        assert done.returncode == 0, done.stdout + done.stderr
        self.log = done.stdout + done.stderr
        last = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
        return self.outcome(**json.loads(last))

    def _engine(
        self, prefix: Sequence[str], model: Path | None, plugins: str | None, settings: Mapping[str, object]
    ) -> tuple[list[str], dict[str, str]]:
        text = json.dumps({"model": str(model or self.model), **settings})
        environment = {**os.environ, "HOME": str(self.scratch), "HF_HUB_OFFLINE": "1", **self.environment}
        if plugins is not None:
            environment["SGLANG_PLUGINS"] = plugins
        program = REPOSITORY / "tests" / "support" / f"{self.program}_engine.py"
        return [*prefix, str(self.python), str(program), text], environment

    @contextmanager
    def talk(self, name: str, model: Path | None = None, **settings: object) -> Iterator[Talk]:
        """Runs an engine that answers; its log is NAME.log in the scratch directory."""
        command, environment = self._engine((), model, None, {**settings, "talks": True})
        log = self.scratch / f"{name}.log"
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            ) as process,
        ):
            try:
                engine = Talk(process, log)
                engine.answer()
                yield engine
            finally:
                process.kill()

    @contextmanager
    def serve(self, command: str, *arguments: str, **environment: str) -> Iterator[str]:
        """Runs a command of `vllm` with more arguments, and yields its address when it answers."""
        programs = self.scratch / "bin"
        programs.mkdir(exist_ok=True)
        vllm = programs / "vllm"
        vllm.write_text(f'#!/bin/sh\nexec {self.python} {REPOSITORY}/tests/support/vllm_command.py "$@"\n')
        vllm.chmod(0o755)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        environment = {
            **os.environ,
            "HOME": str(self.scratch),
            "HF_HUB_OFFLINE": "1",
            **self.environment,
            **environment,
        }
        environment["PATH"] = f"{programs}:{os.environ['PATH']}"
        log = self.scratch / "server.log"
        with log.open("wb") as output:
            server = subprocess.Popen(
                ["bash", "-c", f"{command} {shlex.join(arguments)} --port {port}"],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        address = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            assert server.poll() is None, log.read_text()
            with suppress(OSError):
                return bool(urllib.request.urlopen(f"{address}/health", timeout=10).status == HTTPStatus.OK)
            return False

        try:
            wait_until(answers, 600, "vllm serve")
            yield address
        finally:
            Preloaded(server).kill()
            self.log = log.read_text()

    @contextmanager
    def preload(self, sockets: Path, options: Mapping[str, Any]) -> Iterator[Preloaded]:
        """Keeps the model in a process of vLLM's own weight cache, with sockets in that folder."""
        words: list[Any] = [
            "--model",
            self.model,
            "--weight-cache-socket-dir",
            sockets,
            "--dtype",
            "bfloat16",
            "--enforce-eager",
        ]
        words += ["--max-model-len", "64", "--skip-tokenizer-init"]
        words += [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        environment = {**os.environ, "HOME": str(self.scratch), "HF_HUB_OFFLINE": "1", **self.environment}
        program = REPOSITORY / "tests" / "support" / "vllm_preload.py"
        log = sockets / "log"
        begun = time.perf_counter()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(self.python), str(program), *map(str, words)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        cache = Preloaded(process)
        try:
            wait_until(lambda: b"READY" in log.read_bytes() or process.poll() is not None, 600, "vllm preload")
            assert process.poll() is None, log.read_text()
            cache.seconds = time.perf_counter() - begun
            yield cache
        finally:
            cache.kill()

    def published(self) -> list[Path]:
        """The weights that engines have published."""
        return sorted(self.mount.device.glob(f"{self.program}*/*.safetensors"))

    def bytes_read(self) -> int:
        """Bytes of the model's and of published weights that were ever read through the mount."""
        files = [*self.model.glob("*.safetensors"), *self.published()]
        return sum(int(os.getxattr(file, "user.gpufs.bytes_read")) for file in files)


@dataclass
class Talk:
    """An engine that answers."""

    process: subprocess.Popen[str]
    log: Path

    def ask(self, command: str, path: Path | None = None) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, str(path)]) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise AssertionError(self.log.read_text())


@dataclass
class Preloaded:
    """vLLM's weight cache: a process with one for each GPU. seconds: until it was ready."""

    process: subprocess.Popen[bytes]
    seconds: float = 0

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def python_path(folder: Path, group: str, program: str, *plugins: str) -> str:
    """Returns directories for PYTHONPATH, with which a server finds the plug-in of gpufs and those of the tests.

    group: of entry points, by which the server finds them. plugins: functions in support/PROGRAM_plugin.py.
    """
    package = folder / "plugins" / "gpufs-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: gpufs\nVersion: 0\n")
    lines = [f"{point.name} = {point.value}" for point in entry_points(group=group)]
    lines += [f"{name} = support.{program}_plugin:{name}" for name in plugins]
    (package / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    return os.pathsep.join(map(str, (package.parent, REPOSITORY, REPOSITORY / "tests")))


def make_model(folder: Path, seed: int, width: int = 512, layers: int = 6, shards: str = "20MB") -> int:
    """Writes a random model, small by default; returns the bytes of its weights. shards: the largest size of a file."""
    import transformers

    config = transformers.Qwen3Config(**_form(width, layers), intermediate_size=3 * width)
    return _write(transformers.Qwen3ForCausalLM, config, folder, seed, shards)


def make_tokenizer(folder: Path, words: int) -> None:
    """Writes a tokenizer with so many words beside a model."""
    import transformers
    from tokenizers import Tokenizer, models

    known = {f"t{number}": number for number in range(words)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="t0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)


def make_experts(folder: Path, seed: int) -> int:
    """Writes a small random mixture of 8 experts, of which each token has 2."""
    import transformers

    width = 512
    config = transformers.Qwen3MoeConfig(
        **_form(width, layers=4),
        intermediate_size=width,
        moe_intermediate_size=width // 2,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    return _write(transformers.Qwen3MoeForCausalLM, config, folder, seed, "20MB")


def _form(width: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": 4 * width,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 128,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }


def _write(kind: Any, config: Any, folder: Path, seed: int, shards: str) -> int:
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        module = kind(config).bfloat16()
    module.save_pretrained(folder, max_shard_size=shards)
    return sum(parameter.nbytes for parameter in module.parameters())


def quantise_to_fp8(folder: Path, target: Path) -> None:
    """Writes a model with the linear layers' weights in FP8 and one scale for each of them, a scalar."""
    target.mkdir()
    tensors = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in safetensors.torch.load_file(file).items():
            if name.endswith("proj.weight"):
                scale = tensor.float().abs().max() / torch.finfo(torch.float8_e4m3fn).max
                tensors[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
                tensors[f"{name}_scale"] = scale
            else:
                tensors[name] = tensor
    safetensors.torch.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    quantisation = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))


def quantise_model(folder: Path, target: Path) -> None:
    """Writes a model with the linear layers' weights in 8 bits, one scale a row, as compressed-tensors has them."""
    target.mkdir()
    tensors = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in safetensors.torch.load_file(file).items():
            if name.endswith("proj.weight"):
                scale = tensor.float().abs().amax(1, keepdim=True) / 127
                tensors[name] = (tensor.float() / scale).round().to(torch.int8)
                tensors[f"{name}_scale"] = scale.bfloat16()
            else:
                tensors[name] = tensor
    safetensors.torch.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**numbers, "strategy": "channel", "dynamic": False},
        "input_activations": {**numbers, "strategy": "token", "dynamic": True},
    }
    quantisation = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
