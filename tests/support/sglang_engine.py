"""An engine of SGLang, as a program of the environment in which SGLang is installed: loads a model, and generates.

Usage: sglang_engine.py JSON, with the fields of `Settings`. Prints one line of JSON with those of `Outcome`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from support.stops import stop

PROMPT = [1, 2, 3, 4, 5]


class Settings(NamedTuple):
    """options: more settings of the engine. attempts: see `main`. stops: a folder, see `support.stops`."""

    model: str
    load_format: str = "gpufs"
    extra: dict[str, Any] = {}  # noqa: RUF012  not changed
    options: dict[str, Any] = {}  # noqa: RUF012  not changed
    attempts: tuple[str, ...] = ()
    stops: str | None = None


class Outcome(NamedTuple):
    """private_bytes: memory of the engine's processes alone. errors: of each attempt; of "sleep", what was seen, and
    of an update the tokens after it.

    The fields from external_bytes on are as vllm_engine.py has them, of the first rank; with measure_loads alone.
    """

    tokens: list[int]
    private_bytes: int
    errors: list[str]
    start_seconds: float
    external_bytes: int = 0
    load_seconds: float = 0
    own_bytes: int = 0
    device_bytes: int = 0
    log: tuple[str, ...] = ()


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    import sglang
    import torch

    on_gpu = torch.cuda.is_available()
    options = {
        "model_path": settings.model,
        "load_format": settings.load_format,
        "model_loader_extra_config": json.dumps(settings.extra),
        "skip_tokenizer_init": True,
        "log_level": "warning",
        "device": "cuda" if on_gpu else "cpu",
        "dtype": "bfloat16",
        "attention_backend": "triton" if on_gpu else "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "context_length": 64,
        "max_total_tokens": 256,
        "max_running_requests": 2,
        "disable_cuda_graph": True,
    }
    loads = Path(tempfile.mkstemp(prefix="gpufs-loads-")[1])
    os.environ["GPUFS_TEST_LOADS"] = str(loads)  # for measure_loads in sglang_plugin.py
    if settings.stops is not None:
        os.environ["GPUFS_TEST_STOPS"] = settings.stops
    start = time.perf_counter()
    engine = sglang.Engine(**{**options, **settings.options})
    start_seconds = time.perf_counter() - start
    stop(settings.stops, "generate")
    parameters = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    output: Any = engine.generate(input_ids=PROMPT, sampling_params=parameters)
    private = sum(private_bytes(process) for process in schedulers())
    errors = []
    for attempt in settings.attempts:
        if attempt == "sleep":
            errors.append(json.dumps(sleep_and_wake(engine, Path(settings.model), parameters)))
        elif attempt.startswith("update "):
            done, text, *_ = engine.update_weights_from_disk(attempt.partition(" ")[2])
            assert done, text
            after: Any = engine.generate(input_ids=PROMPT, sampling_params=parameters)
            errors.append(json.dumps(after["output_ids"]))
        else:
            errors.append(try_to(attempt, engine, settings.model))
    stop(settings.stops, "end")
    measured = json.loads(loads.read_text().partition("\n")[0] or "{}")
    loads.unlink()
    outcome = Outcome(output["output_ids"], private, errors, start_seconds, **measured)
    print(json.dumps(outcome._asdict()), file=sys.__stdout__, flush=True)
    engine.shutdown()


def schedulers() -> list[Path]:
    """The processes that hold the weights."""
    own = str(os.getpid())
    processes = [Path("/proc", child) for child in Path(f"/proc/{own}/task/{own}/children").read_text().split()]
    return [process for process in processes if b"scheduler" in (process / "cmdline").read_bytes()]


def private_bytes(process: Path) -> int:
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10


def sleep_and_wake(engine: Any, model: Path, parameters: dict[str, Any]) -> list[Any]:
    """Returns the parked bytes of the published weights before, while and after the engine sleeps, and tokens then.

    And after the weights alone have slept: tokens, and how many of the prompt were in the cache.
    """

    def parked() -> int:
        return sum(int(os.getxattr(file, "user.gpufs.parked_bytes")) for file in model.parent.glob("sglang*/*"))

    found: list[Any] = [parked()]
    engine.release_memory_occupation()
    engine.release_memory_occupation()  # again: SGLang does not refuse it
    found.append(parked())
    engine.resume_memory_occupation()
    output: Any = engine.generate(input_ids=PROMPT, sampling_params=parameters)
    found += [parked(), output["output_ids"]]
    engine.release_memory_occupation(tags=["weights"])
    engine.resume_memory_occupation(tags=["weights"])
    output = engine.generate(input_ids=PROMPT, sampling_params=parameters)
    return [*found, output["output_ids"], output["meta_info"]["cached_tokens"]]


def try_to(attempt: str, engine: Any, model: str) -> str:
    """Tries what shared weights do not allow; returns the error's text."""
    import torch

    if attempt == "reload":
        done, text, *_ = engine.update_weights_from_disk(model, load_format="safetensors")
    else:
        engine.begin_weight_update()
        done, text = engine.update_weights_from_tensor([("model.norm.weight", torch.zeros(1))], load_format="direct")
        engine.end_weight_update()
    return "" if done else str(text)


if __name__ == "__main__":
    main()
