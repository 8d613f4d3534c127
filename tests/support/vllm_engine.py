"""An engine of vLLM, as a program of the environment in which vLLM is installed: loads a model, and generates.

Usage: vllm_engine.py JSON, with the fields of `Settings`. Prints one line of JSON with those of `Outcome`.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

PROMPT = [1, 2, 3, 4, 5]


class Settings(NamedTuple):
    """onednn: whether vLLM may move weights into oneDNN's forms. attempts: see `try_to`. options: more settings."""

    model: str
    load_format: str = "gpufs"
    extra: dict[str, Any] = {}  # noqa: RUF012  not changed
    onednn: bool = False
    attempts: tuple[str, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012  not changed


class Outcome(NamedTuple):
    """private_bytes: memory of this process alone. external_bytes: what the loader says about shared weights."""

    tokens: list[int]
    private_bytes: int
    external_bytes: int
    errors: list[str]


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    import vllm._custom_ops as operations
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader import get_model_loader

    import gpufs.integrations.vllm

    if not settings.onednn:
        operations._supports_onednn = False
    gpufs.integrations.vllm.register()
    llm = LLM(
        model=settings.model,
        load_format=settings.load_format,
        model_loader_extra_config=settings.extra,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        **{"dtype": "bfloat16", **settings.options},
    )
    (output,) = llm.generate(
        [{"prompt_token_ids": PROMPT}], SamplingParams(temperature=0, max_tokens=16, detokenize=False), use_tqdm=False
    )
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    config = llm.llm_engine.vllm_config
    external = get_model_loader(config.load_config).get_external_weight_memory(config)
    errors = [try_to(attempt, llm) for attempt in settings.attempts]
    outcome = Outcome(list(output.outputs[0].token_ids), int(status["RssAnon"].split()[0]) << 10, external, errors)
    print(json.dumps(outcome._asdict()), file=sys.__stdout__, flush=True)


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
