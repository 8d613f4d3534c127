"""An engine of vLLM, as a program of the environment in which vLLM is installed: loads a model, and generates.

Usage: vllm_engine.py JSON, with the fields of `Settings`. Prints one line of JSON with those of `Outcome`.
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from support.stops import stop

PROMPT = [1, 2, 3, 4, 5]
ANSWER = "ANSWER "  # begins the lines that answer


class Settings(NamedTuple):
    """onednn: whether vLLM may move weights into oneDNN's forms. attempts: see `try_to`. options: more settings.

    stops: a folder, see `support.stops`. There are "load", "generate" and "end". updates: files with new weights, each
    loaded while the engine runs. prompts: what to answer besides PROMPT. conversation: the length of one, see
    `converse`. talks: answers what each line asks for, see `talk`, instead.
    """

    model: str
    load_format: str = "gpufs"
    extra: dict[str, Any] = {}  # noqa: RUF012  not changed
    onednn: bool = False
    attempts: tuple[str, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012  not changed
    stops: str | None = None
    updates: tuple[str, ...] = ()
    prompts: tuple[list[int], ...] = ()
    conversation: int = 0
    talks: bool = False


class Outcome(NamedTuple):
    """private_bytes: memory of this process alone. external_bytes: what the loader says about shared weights.

    start_seconds: until the engine is there. load_seconds: of loading the model alone, which takes own_bytes of this
    process' memory (torch's on a GPU) and device_bytes of the whole device's. log: what the plug-in says. updated: the
    tokens after each update, or why it failed. answers: to the prompts. conversations: see `converse`.
    """

    tokens: list[int]
    private_bytes: int
    external_bytes: int
    errors: list[str]
    start_seconds: float
    load_seconds: float
    own_bytes: int
    device_bytes: int
    log: list[str]
    updated: list[list[int] | str]
    answers: list[list[int]]
    conversations: list[dict[str, Any]]


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    import vllm._custom_ops as operations
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader import get_model_loader

    import gpufs.integrations.vllm

    if not settings.onednn:
        operations._supports_onednn = False
    gpufs.integrations.vllm.register()
    log: list[str] = []
    loads = measure_loads(settings.stops, PluginLog(log))
    start = time.perf_counter()
    llm = LLM(
        model=settings.model,
        load_format=settings.load_format,
        model_loader_extra_config=settings.extra,
        skip_tokenizer_init=True,
        enforce_eager=True,
        **{"dtype": "bfloat16", "max_model_len": 64, **settings.options},
    )
    start_seconds = time.perf_counter() - start
    stop(settings.stops, "generate")

    def generate(prompt: list[int] = PROMPT) -> list[int]:
        parameters = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=prompt is not PROMPT)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    if settings.talks:
        talk(llm, generate)
        return
    tokens = generate()
    ctypes.CDLL(None).malloc_trim(0)
    private = private_bytes()
    config = llm.llm_engine.vllm_config
    external = get_model_loader(config.load_config).get_external_weight_memory(config)
    errors = [try_to(attempt, llm) for attempt in settings.attempts]
    assert generate() == tokens
    updated = [update(path, llm) or generate() for path in settings.updates]
    stop(settings.stops, "end")
    load = loads[0] if loads else (0.0, 0, 0)  # none where ranks are processes of their own
    answers = [generate(prompt) for prompt in settings.prompts]
    conversations = converse(llm, settings.conversation) if settings.conversation else []
    outcome = Outcome(tokens, private, external, errors, start_seconds, *load, log, updated, answers, conversations)
    print(json.dumps(outcome._asdict()), file=sys.__stdout__, flush=True)


class PluginLog(logging.Handler):
    """Collects what the plug-in logs."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "vllm.gpufs":
            self._lines.append(record.getMessage().removeprefix("gpufs: "))


def measure_loads(stops: str | None, log: logging.Handler) -> list[tuple[float, int, int]]:
    """Returns a list that gets seconds, own_bytes and device_bytes of each load of a model. log: of the loads."""
    import torch
    from vllm.v1.worker.gpu_worker import Worker

    on_gpu = torch.cuda.is_available()
    loads: list[tuple[float, int, int]] = []
    load_model = Worker.load_model

    def memory() -> tuple[int, int]:
        if not on_gpu:
            return private_bytes(), 0
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), total - free

    def measured(self: Any, **named: Any) -> None:
        stop(stops, "load")
        own, device = memory()
        logging.getLogger("vllm").addHandler(log)  # vLLM has configured its loggers by now, and removed all handlers
        start = time.perf_counter()
        load_model(self, **named)
        seconds = time.perf_counter() - start
        after = memory()
        loads.append((seconds, after[0] - own, after[1] - device))

    Worker.load_model = measured
    return loads


def private_bytes() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10


def update(path: str, llm: Any) -> str:
    """Loads new weights, as a trainer does; returns the error's text."""
    return prepare(path, llm) or finish(llm)


def prepare(path: str, llm: Any) -> str:
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    try:
        llm.update_weights({"update_info": {"path": path}})
    except Exception as error:  # noqa: BLE001  its text is the result
        return str(error)
    return ""


def finish(llm: Any) -> str:
    try:
        llm.finish_weight_update()
    except Exception as error:  # noqa: BLE001  its text is the result
        return str(error)
    llm.reset_prefix_cache()
    return ""


def converse(llm: Any, length: int) -> list[dict[str, Any]]:
    """Has the second turn of a conversation after the engine has slept: not at all, with its KV cache, without it.

    Each is a few times. The engine also sleeps in the middle of the answer where it keeps its cache. Returns for each:
    way; tokens of both turns; hits: of the prefix cache; sleep, wake, first: seconds, the last until the first token;
    freed: bytes of the device while it slept; pinned: bytes of host memory then.
    """
    import torch
    from vllm import SamplingParams

    on_gpu = torch.cuda.is_available()
    found: list[dict[str, Any]] = []

    def free() -> int:
        return int(torch.cuda.mem_get_info()[0]) if on_gpu else 0

    def sleep(way: str) -> dict[str, Any]:
        if way == "awake":
            return {"sleep": 0.0, "wake": 0.0, "freed": 0, "pinned": 0}
        before, start = free(), time.perf_counter()
        if way == "kept":
            llm.sleep(0, mode="keep")
            llm.collective_rpc("sleep", kwargs={"level": 0})
        else:
            llm.sleep(1)
        asleep = time.perf_counter()
        freed = free() - before
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
        wake = time.perf_counter()
        if way == "kept":
            llm.collective_rpc("wake_up")
            llm.wake_up(["scheduling"])
        else:
            llm.wake_up()
        return {"sleep": asleep - start, "wake": time.perf_counter() - wake, "freed": freed, "pinned": pinned}

    def generate(prompt: list[int], count: int, way: str = "awake") -> list[int]:
        parameters = SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True)
        llm.enqueue([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        for _ in range(count // 2):
            assert not llm.llm_engine.step()  # outputs come at the end
        sleep(way)
        (output,) = llm.wait_for_completion(use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def hits() -> int:
        return sum(int(each.value) for each in llm.get_metrics() if each.name == "vllm:prefix_cache_hits")

    prompt = [number * 37 % 2000 for number in range(length)]
    for _ in range(3):
        for way in ("awake", "kept", "dropped"):
            llm.reset_prefix_cache()
            turns = [*prompt, *generate(prompt, 32), 7, 8, 9]
            slept, before, start = sleep(way), hits(), time.perf_counter()
            generate(turns, 1)
            first, after = time.perf_counter() - start, hits()
            answer = generate(turns, 64, "kept" if way == "kept" else "awake")
            found.append(
                {"way": way, "tokens": [*turns[length:], *answer], "hits": after - before, "first": first, **slept}
            )
    return found


def talk(llm: Any, generate: Callable[[], list[int]]) -> None:
    """Answers each line of the standard input by a line: a command and a path, in JSON; "die" ends in the middle."""
    import gpufs
    import gpufs.integrations._vllm_pieces as pieces

    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    commands: dict[str, Callable[[str], Any]] = {
        "update": lambda path: update(path, llm),
        "prepare": lambda path: prepare(path, llm),
        "finish": lambda _: finish(llm),
        "tokens": lambda _: generate(),
        "sleep": lambda _: gpufs.sleep(),
        "wake": lambda _: gpufs.wake(),
        "private": lambda _: private_bytes(),
        "addresses": lambda _: [each.data_ptr() for each in (*model.parameters(), *model.buffers())],
    }

    def die(*_: Any) -> None:
        print(ANSWER + '"dies"', file=sys.__stdout__, flush=True)
        time.sleep(3600)

    print(ANSWER + '""', file=sys.__stdout__, flush=True)
    for line in sys.stdin:
        command, path = json.loads(line)
        if command == "die":
            vars(pieces)["finalize_layerwise_reload"] = die  # in the middle of a load
            command = "update"
        print(ANSWER + json.dumps(commands[command](path)), file=sys.__stdout__, flush=True)


def try_to(attempt: str, llm: Any) -> str:
    """Tries what shared weights do not allow; returns the error's text."""
    from vllm.model_executor.model_loader import get_model_loader

    config = llm.llm_engine.vllm_config
    try:
        if attempt == "sleep":
            config.model_config.enable_sleep_mode = True
            get_model_loader(config.load_config).load_model(config, config.model_config)
        elif attempt == "reload":
            llm.collective_rpc("reload_weights")
    except Exception as error:  # noqa: BLE001  its text is the result
        return str(error)
    finally:
        config.model_config.enable_sleep_mode = False
    return ""


if __name__ == "__main__":
    main()
