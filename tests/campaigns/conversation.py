"""`python -m campaigns.conversation`: a conversation with vLLM that goes on after the engine has slept, on a GPU.

With the KV cache kept, dropped, and without sleep, by turns: hits of the prefix cache in the second turn, and seconds
until its first token, of going to sleep and of waking. Ends with 1 if keeping the cache changes tokens or loses hits.
GPUFS_VLLM_PYTHON is as for campaigns.servers. With --driver host, for vLLM's build for CPUs, no memory sleeps.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from support.data import GIB, MIB
from support.mounting import REPOSITORY
from support.processes import run
from support.surviving import mounted

from campaigns.servers import make_server, scratch


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaigns.conversation", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--driver", choices=["cuda", "host"], default="cuda", help="host: vLLM's build for CPUs")
    parser.add_argument("--tokens", type=int, default=8192, help="of the first turn [default: 8192]")
    parser.add_argument("--pool", type=int, default=4, help="GiB of the KV cache [default: 4]")
    parser.add_argument("--width", type=int, help="of the model [default: 4096, 7.2 GiB; host: 512]")
    given = parser.parse_args()
    width = given.width or (512 if given.driver == "host" else 4096)
    python = Path(os.environ.get("GPUFS_VLLM_PYTHON", REPOSITORY / "build" / "vllm-venv" / "bin" / "python"))
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(tempfile.gettempdir(), "gpufs-servers-compiled")))
    options = {
        "max_model_len": given.tokens + 256,
        "hf_overrides": {"max_position_embeddings": given.tokens + 256},
        "disable_log_stats": False,  # which would leave the counters out
    }
    if given.driver == "cuda":
        options |= {"enable_sleep_mode": True, "sleep_mode_backend": "gpufs", "gpu_memory_utilization": 0.4}
        options |= {"kv_cache_memory_bytes": given.pool * GIB}
    with tempfile.TemporaryDirectory(prefix="gpufs-conversation-", dir=scratch()) as folder:
        words = ["--width", str(width), "--make", "bfloat16", f"{folder}/model"]
        run(sys.executable, "-m", "campaigns.servers", *words, timeout=1200)
        weights = sum(file.stat().st_size for file in Path(folder, "model").glob("*.safetensors"))
        memory = [str(weights * number + 256 * MIB) for number in (2, 1)]
        with mounted(
            Path(folder, "mnt"), "--memory", memory[0], "--host-memory", memory[1], driver=given.driver
        ) as mount:
            server = make_server("vllm", python, given.driver, mount, Path(folder))
            extra = {"mount": str(mount.path)}
            found = server.start(options=options, extra=extra, conversation=given.tokens).conversations
    heads = f"{'hits':>6} {'first_s':>8} {'sleep_s':>8} {'wake_s':>8} {'freed_GiB':>10} {'pinned_GiB':>10}"
    print(f"{'way':8} {heads}  tokens")
    awake = found[0]
    wrong = []
    for row in found:
        same = row["tokens"] == awake["tokens"]
        print(
            f"{row['way']:8} {row['hits']:6} {row['first']:8.3f} {row['sleep']:8.3f} {row['wake']:8.3f} "
            f"{row['freed'] / GIB:10.2f} {row['pinned'] / GIB:10.2f}  {'equal' if same else 'different'}"
        )
        # What is computed again is computed in other portions, which may round in another way.
        if row["way"] != "dropped" and (not same or row["hits"] < 0.9 * given.tokens):
            wrong.append(f"{row['way']}: {row['hits']} hits, tokens {row['tokens']} instead of {awake['tokens']}")
    print(*wrong, f"conversation: {'FAILED' if wrong else 'all good'}", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
