"""A program as users write it, for programs.py: loads a model by transformers, computes, and reports as JSON."""

from __future__ import annotations

import time

_started = time.perf_counter()

import argparse  # noqa: E402 - the clock runs from the start
import hashlib  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
from collections import Counter  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

_DECODED = 32


def make(path: Path, layers: int) -> None:
    """Write a model with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        Qwen3ForCausalLM(config).save_pretrained(path, max_shard_size="3GB")


def load(path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, device_map="cuda:0").eval()
    torch.cuda.synchronize()
    return model


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(tokens, use_cache=False, logits_to_keep=1).logits
    return logits


def measured(work: Any, runs: int) -> float:
    """Return the median of the milliseconds that work takes, after a first time."""
    times = []
    for _ in range(runs + 1):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1000)
    return statistics.median(times[1:])


def replayed(work: Any) -> float:
    """Return the milliseconds that work takes on the device, as a CUDA graph: without what Python takes."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return measured(graph.replay, 20)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).cpu().numpy()).hexdigest()[:16]


def computed(model: Any, first: torch.Tensor, prompts: dict[int, torch.Tensor]) -> dict[str, Any]:
    """Return what the model computes, and how long that takes."""
    results: dict[Any, Any] = {}
    forward_ms, device_ms = {}, {}
    for length, tokens in prompts.items():
        results[length] = digest(model(tokens).logits)
        forward_ms[length] = measured(lambda tokens=tokens: model(tokens, logits_to_keep=1), 10)
        device_ms[length] = replayed(lambda tokens=tokens: _logits(model, tokens))

    def decode() -> Any:
        return model.generate(first, max_new_tokens=_DECODED, min_new_tokens=_DECODED, do_sample=False)

    results["tokens"] = decode()[0, 16:].tolist()
    device_ms[1] = replayed(lambda: _logits(model, first[:, :1]))
    times = {"forward_ms": forward_ms, "device_ms": device_ms, "decode_ms": measured(decode, 3) / _DECODED}
    return {"results": results, **times}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--make", type=int, default=0)
    parser.add_argument("--tokens", default="512")
    parser.add_argument("--start-only", action="store_true", help="load twice, and compute one token alone")
    parser.add_argument(
        "--hold", action="store_true", help="load, print the free memory, and wait for the end of input"
    )
    args = parser.parse_args()
    if args.make:
        return make(args.model, args.make)
    if args.hold:
        model = load(args.model)
        print(torch.cuda.mem_get_info()[0], flush=True)
        sys.stdin.read()
        return None
    free, _ = torch.cuda.mem_get_info()
    torch.zeros(1, device="cuda")
    begun = time.perf_counter()
    model = load(args.model)
    loaded = time.perf_counter()
    generator = torch.Generator().manual_seed(1)

    def prompt(length: int) -> torch.Tensor:
        return torch.randint(0, 1000, (1, length), generator=generator).cuda()

    with torch.inference_mode():
        first = prompt(16)
        int(model(first).logits[0, -1].argmax())
        report: dict[str, Any] = {
            "first_token_s": time.perf_counter() - _started,
            "import_s": begun - _started,
            "load_s": loaded - begun,
            "gpu_gib": (free - torch.cuda.mem_get_info()[0]) / 2**30,
            "mod_16": dict(Counter(weight.data_ptr() % 16 for weight in model.parameters())),
        }
        if not args.start_only:
            report |= computed(model, first, {length: prompt(length) for length in map(int, args.tokens.split(","))})
        del model
        begun = time.perf_counter()
        load(args.model)
        report["second_load_s"] = time.perf_counter() - begun
    print(json.dumps(report))


if __name__ == "__main__":
    main()
