"""An engine of vLLM that takes commands, as a program of the environment in which vLLM is installed.

Usage: vllm_session.py JSON, with the arguments of `LLM()`. Each line of standard input is a command in JSON, and
answered by a line of JSON on descriptor 3, as "ready" is after the start:

- {"do": "update", "path": P}: the calls of a trainer. The answer has when they and a token were done, or an "error".
- {"do": "generate"}: tokens for three prompts.
- {"do": "sleep"}, {"do": "wake"}: of weights that lie on a mount, and on a GPU of all that vLLM frees.
- {"do": "addresses"}: a number that is another one when a parameter has moved.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

PROMPTS = ([1, 2, 3, 4, 5], list(range(40, 80)), [900, 7])


def main() -> None:
    import vllm._custom_ops as operations
    from vllm import LLM, SamplingParams

    import gpufs
    import gpufs.integrations.vllm

    operations._supports_onednn = False
    gpufs.integrations.vllm.register()
    given = json.loads(sys.argv[1])
    llm = LLM(
        **{"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 64, **given},
    )
    parameters = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
    one = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)

    def generate(asked: SamplingParams, *prompts: list[int]) -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def update(path: str) -> dict[str, Any]:
        begun = time.perf_counter()
        llm.start_weight_update()
        try:
            llm.update_weights({"update_info": {"path": path}})
        except Exception as error:  # noqa: BLE001  its text is the answer
            llm.finish_weight_update()  # of nothing
            return {"error": str(error)}
        prepared = time.perf_counter()
        llm.finish_weight_update()
        llm.reset_prefix_cache()
        updated = time.perf_counter()
        generate(one, PROMPTS[0])
        ends = prepared, updated, time.perf_counter()
        return dict(zip(("prepared", "updated", "first_token"), (end - begun for end in ends), strict=True))

    def addresses() -> int:
        model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        return hash(tuple(parameter.data_ptr() for parameter in model.parameters()))

    def move(what: str) -> None:
        if given.get("enable_sleep_mode"):
            llm.sleep(1) if what == "sleep" else llm.wake_up()
        else:
            gpufs.sleep() if what == "sleep" else gpufs.wake()

    def answer(value: object) -> None:
        os.write(3, json.dumps(value).encode() + b"\n")

    if "weight_transfer_config" in given:
        llm.init_weight_transfer_engine({"init_info": {}})
    answer("ready")
    for line in sys.stdin:
        command = json.loads(line)
        match command.pop("do"):
            case "update":
                answer(update(**command))
            case "generate":
                answer(generate(parameters, *PROMPTS))
            case "addresses":
                answer(addresses())
            case "sleep" | "wake" as what:
                move(what)
                answer(None)


if __name__ == "__main__":
    main()
