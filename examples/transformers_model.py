"""A model of transformers that a second program uses where the first one put it.

Usage: python examples/transformers_model.py DIRECTORY     a directory of a mount, for example /mnt/gpufs/gpu0

The first start makes a model and publishes it; with a model of your own, load it with `from_pretrained` there. Later
starts build the model without memory and attach the file. Run it twice.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import gpufs.torch

CONFIG = LlamaConfig(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def main(directory: Path) -> None:
    path = directory / "llama.safetensors"
    if not path.exists():
        torch.manual_seed(1)
        gpufs.torch.publish(AutoModelForCausalLM.from_config(CONFIG), path)
        print(f"published {path.stat().st_size} bytes")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG).eval()
    begin = time.perf_counter()
    gpufs.torch.attach_module(model, path)
    print(f"attached in {1000 * (time.perf_counter() - begin):.1f} ms")
    prompt = torch.tensor([[1, 5, 8, 13]], device=model.device)
    answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    print(f"answer: {answer[0].tolist()}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
