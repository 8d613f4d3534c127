"""The plug-in for vLLM, with vLLM itself on the CPU.

vLLM is in an environment of its own, which scripts/setup-vllm makes; GPUFS_VLLM_PYTHON names the Python of another one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import textwrap
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.cli import gpufs
from support.data import MIB
from support.model_servers import Servers, make_experts, make_model, make_tokenizer, python_path, quantise_model
from support.mounting import REPOSITORY, GpufsMount, Mounter
from support.pages import block
from support.processes import NOBODY, PATIENCE, run
from support.vllm_engine import Outcome

import gpufs as gpufs_client
import gpufs.torch as gpufs_torch

PYTHON = Path(os.environ.get("GPUFS_VLLM_PYTHON", REPOSITORY / "build" / "vllm-venv" / "bin" / "python"))
pytestmark = pytest.mark.slow


@pytest.fixture
def servers(mount: Mounter, tmp_path: Path) -> Servers[Outcome, GpufsMount]:
    return make_servers(mount("--host-memory", "128M", memory=512 * MIB, allow_other=True), tmp_path)


def make_servers(mounted: GpufsMount, tmp_path: Path) -> Servers[Outcome, GpufsMount]:
    """Returns vLLM with a random model, on the mount and, as "model", in a folder."""
    if not PYTHON.exists():
        pytest.skip(f"there is no {PYTHON}: scripts/setup-vllm makes it")
    model = mounted.device / "Tiny-Qwen3"
    make_model(tmp_path / "model", seed=0)
    shutil.copytree(tmp_path / "model", model)
    environment = {
        "PYTHONPATH": python_path(tmp_path, "vllm.general_plugins", "vllm", "without_onednn", "kernels_with_state"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "none",  # the program registers the plug-in
        # Threads that wait for each other at each layer are slow on a machine that does more than this.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return Servers("vllm", Outcome, PYTHON, environment, mounted, model, tmp_path)


def test_vllm_engines_share_weights(servers: Servers[Outcome, GpufsMount]) -> None:
    """The first start publishes, later ones and those beside it map: nothing is read, and no memory is private."""
    weights = sum(file.stat().st_size for file in servers.model.glob("*.safetensors"))
    default = servers.start(load_format="auto")
    first = servers.start()
    (published,) = servers.published()
    assert published.stat().st_size == pytest.approx(weights, rel=0.02)
    assert published.name in gpufs("ls", published.parent).stdout
    read = servers.bytes_read()
    second = servers.start()
    assert servers.bytes_read() < read + MIB  # headers alone
    assert first.tokens == second.tokens == default.tokens
    for engine in (first, second):
        assert engine.private_bytes < default.private_bytes - 0.9 * weights
    assert second.external_bytes == published.stat().st_size

    published.unlink()
    assert not servers.published()
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: servers.start(), range(2)))
    assert [engine.tokens for engine in both] == [default.tokens] * 2
    assert servers.published() == [published]


def test_vllm_kernels_find_their_state(servers: Servers[Outcome, GpufsMount]) -> None:
    """What kernels note beside tensors while weights are processed is there in engines that map the weights."""
    engines = replace(servers, environment={**servers.environment, "VLLM_PLUGINS": "kernels_with_state"})
    first = engines.start()
    second = engines.start()
    assert any(line.startswith("Mapped") for line in second.log)
    assert first.tokens == second.tokens


def test_vllm_keeps_weights_apart(servers: Servers[Outcome, GpufsMount]) -> None:
    """Models with equal headers have weights of their own, also under the other's name or at its path.

    Damaged ones are replaced.
    """
    make_model(servers.scratch / "other", seed=1)
    other = servers.scratch / "other"  # on the machine's disk: only its processed weights are on the mount
    mount = {"mount": str(servers.mount.path)}
    expected = servers.start(load_format="auto").tokens, servers.start(load_format="auto", model=other).tokens
    assert expected[0] != expected[1]
    assert (servers.start().tokens, servers.start(model=other, extra=mount).tokens) == expected
    first, second = servers.published()
    os.replace(first, second)
    swapped = servers.start(model=other, extra=mount)
    assert swapped.tokens == expected[1]
    assert servers.published() == [second], swapped.log

    for damage in ("contents", "size", "header"):
        with open(second, "r+b") as file:
            if damage == "size":
                file.truncate(MIB)
            else:
                file.seek(100 if damage == "header" else 20 * MIB)
                file.write(b"damaged")
        assert servers.start(model=other, extra=mount).tokens == expected[1], damage
        assert second.stat().st_size > 20 * MIB, damage
        read = servers.bytes_read()
        assert servers.start(model=other, extra=mount).tokens == expected[1], damage
        assert servers.bytes_read() < read + MIB, damage

    shutil.copytree(other, servers.model, dirs_exist_ok=True)  # over the files, into the same inodes
    assert servers.start().tokens == expected[1]


def test_vllm_shares_what_has_the_same_weights(servers: Servers[Outcome, GpufsMount]) -> None:
    """A mode, adapters and variables that decide about something else lead to the same file; a writer to none."""
    expected = servers.start().tokens
    (published,) = servers.published()
    for file in servers.model.glob("*.safetensors"):
        file.chmod(0o640)
    variables = {"VLLM_ENGINE_READY_TIMEOUT_S": "900", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
    others = replace(servers, environment={**servers.environment, **variables})
    assert others.start().tokens == expected
    assert servers.start(options={"enable_lora": True}).tokens == expected
    assert servers.published() == [published]
    assert published.stat().st_mode & 0o007 == 0

    make_model(servers.scratch / "other", seed=1)
    other = sorted((servers.scratch / "other").glob("*.safetensors"))
    changed = servers.start(load_format="auto", model=servers.scratch / "other").tokens
    arrays = [gpufs_client.attach(servers.model / file.name, "r+") for file in other]
    for array, file in zip(arrays, other, strict=True):
        numpy.asarray(array)[:] = numpy.fromfile(file, numpy.uint8)
    assert servers.start().tokens == changed  # the times of the files have not changed yet
    assert servers.published() == [published]
    for array in arrays:
        array.close()
    assert servers.start().tokens == changed
    assert len(servers.published()) == 2


def test_vllm_frees_a_published_checkpoint(servers: Servers[Outcome, GpufsMount]) -> None:
    """With keep_checkpoint=false the weights are in memory once; what no longer works says how it does again."""
    release = {"keep_checkpoint": False}
    files = sorted(servers.model.glob("*.safetensors"))
    other = servers.scratch / "model"  # the same model on the machine's disk, whose files stay
    contents = [(other / file.name).read_bytes() for file in files]
    expected = servers.start(load_format="auto").tokens
    assert servers.start(extra={**release, "mount": str(servers.mount.path)}, model=other).tokens == expected
    assert [(other / file.name).read_bytes() for file in files] == contents
    for published in servers.published():
        published.unlink()

    assert servers.start(extra=release).tokens == expected
    (published,) = servers.published()
    used = os.statvfs(servers.mount.device)
    assert (used.f_blocks - used.f_bfree) * used.f_frsize < published.stat().st_size + 16 * MIB
    assert max(file.stat().st_size for file in files) < MIB
    read = servers.bytes_read()
    found = servers.start()
    assert (found.tokens, found.external_bytes) == (expected, published.stat().st_size)
    assert servers.bytes_read() - read < MIB  # headers of the checkpoint
    link = servers.mount.device / "current"
    link.symlink_to(servers.model.name)
    assert servers.start(model=link).tokens == expected
    renamed = servers.model.rename(servers.model.with_name("renamed"))
    assert servers.start(model=renamed).tokens == expected
    renamed.rename(servers.model)
    for load_format, dtype in (("gpufs", "float32"), ("auto", "bfloat16")):
        with pytest.raises(AssertionError) as failed:
            servers.start(load_format=load_format, options={"dtype": dtype})
        assert "safetensors" in str(failed.value)
        assert ("gpufs cp -rL" in str(failed.value)) == (load_format == "gpufs")
    with pytest.raises(gpufs_torch.FormatError):
        gpufs_torch.load_file(files[0])
    assert servers.published() == [published]

    make_model(servers.scratch / "changed", seed=1)
    shutil.copytree(servers.scratch / "changed", servers.model, dirs_exist_ok=True)
    changed = servers.start(load_format="auto").tokens
    assert changed != expected
    assert servers.start().tokens == changed
    assert len(servers.published()) == 2


def test_vllm_copies_where_weights_cannot_be_shared(servers: Servers[Outcome, GpufsMount]) -> None:
    """With oneDNN vLLM moves weights out of the parameters; with share=false nothing is published."""
    options = {"dtype": "float32"}  # which oneDNN takes on every processor
    expected = servers.start(load_format="auto", onednn=True, options=options).tokens
    found = servers.start(onednn=True, options=options)
    assert (found.tokens, found.external_bytes) == (expected, 0)
    assert not servers.published()
    took = float(servers.log.partition("Loading weights took ")[2].split()[0])
    assert took < PATIENCE
    expected = servers.start(load_format="auto").tokens
    found = servers.start(extra={"share": False})
    assert (found.tokens, found.external_bytes) == (expected, 0)
    assert not servers.published()
    servers.mount.device.joinpath("full").write_bytes(bytes(455 * MIB))
    assert servers.start().tokens == expected  # no memory to publish
    assert not servers.published()


def test_vllm_copies_quantised_weights(servers: Servers[Outcome, GpufsMount]) -> None:
    """A quantisation whose processed weights vLLM does not share works as before."""
    model = servers.mount.device / "quantised"
    quantise_model(servers.scratch / "model", model)
    expected = servers.start(load_format="auto", model=model).tokens
    found = servers.start(model=model)
    assert (found.tokens, found.external_bytes) == (expected, 0)
    assert not servers.published()


def test_vllm_refuses_to_change_shared_weights(servers: Servers[Outcome, GpufsMount]) -> None:
    found = servers.start(attempts=("sleep", "reload"))
    for text in found.errors:
        assert '"share": false' in text


def test_vllm_sleeps_with_or_without_its_cache(mount: Mounter, tmp_path: Path) -> None:
    """Level 0 keeps the KV cache, the others only what vLLM needs. A sleep that fails leaves the engine awake."""
    with mount("--host-memory", str(64 * MIB), memory=64 * MIB) as mounted:
        weights = mounted.device / "weights"
        weights.write_bytes(b"good" * MIB)
        path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
        command = [str(PYTHON), str(REPOSITORY / "tests/support/vllm_sleep.py"), str(weights)]
        done = run(*command, env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": path}, timeout=300)
        found = json.loads(done.stdout.splitlines()[-1])
        everything = ["weights", "kv_cache", "runtime", "cudagraph"]
        assert found["level 0"] == [True, everything, ""]
        assert found["level 1"] == found["level 2"] == [True, ["weights", "runtime", "cudagraph"], ""]
        for attempt, told in (("full", "pinned"), ("too large", "1.0 PiB")):
            parked, there, error = found[attempt]
            assert (parked, there[:4]) == (False, everything)
            assert told in error


def test_vllm_uses_weights_of_trusted_users(servers: Servers[Outcome, GpufsMount]) -> None:
    """Root's weights serve all users; those of another user only engines that trust it."""
    servers.scratch.chmod(0o777)
    expected = servers.start().tokens
    (published,) = servers.published()
    read = servers.bytes_read()
    # The capability to read: the Python here may be closed to other users.
    capability = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    nobody = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *capability)
    assert servers.start(*nobody).tokens == expected
    assert servers.bytes_read() < read + MIB  # headers alone
    published.unlink()
    assert servers.start(*nobody).tokens == expected
    (own,) = servers.published()
    assert (own.parent.name, own.stat().st_uid) == (f"vllm-{NOBODY}", NOBODY)
    assert servers.start().tokens == expected
    assert servers.published() == sorted([own, published])
    published.unlink()
    read = servers.bytes_read()
    assert servers.start(extra={"trust": ["nobody"]}).tokens == expected
    assert servers.published() == [own]
    assert servers.bytes_read() < read + MIB


def test_vllm_ranks_share_weights(servers: Servers[Outcome, GpufsMount]) -> None:
    """Each rank has weights of its own, and all ranks of an engine map or all load."""
    # The ranks are processes of their own, which find the plug-ins by themselves.
    ranks = {"VLLM_PLUGINS": "gpufs,without_onednn", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    servers.environment = {**servers.environment, **ranks}
    options = {"tensor_parallel_size": 2}
    expected = servers.start(load_format="auto", options=options).tokens
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: servers.start(options=options), range(2)))
    assert [engine.tokens for engine in both] == [expected] * 2
    published = servers.published()
    assert len(published) == 2
    published[1].unlink()
    assert servers.start(options=options).tokens == expected
    assert servers.published() == published


def test_vllm_takes_new_weights_from_a_file(servers: Servers[Outcome, GpufsMount]) -> None:
    """As from a trainer beside it: whole models, another one after it, and wrong paths, after which it goes on."""
    make_model(servers.scratch / "other", seed=1)
    other = servers.scratch / "other"
    expected = servers.start(load_format="auto").tokens, servers.start(load_format="auto", model=other).tokens
    assert expected[0] != expected[1]
    new = servers.mount.device / "new.safetensors"
    shards = sorted(other.glob("*.safetensors"))
    weights = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    gpufs_torch.publish(weights, new, replace=True)
    wrong = [str(shards[0]), str(new.with_name("missing")), "new.safetensors"]
    options = {"weight_transfer_config": {"backend": "gpufs"}}
    done = servers.start(updates=[*wrong, str(new), str(servers.model)], options=options)
    assert done.tokens == expected[0]
    for text, told in zip(done.updated, ("mount", "missing", "absolute"), strict=False):
        assert isinstance(text, str)
        assert told in text
    assert done.updated[3:] == [expected[1], expected[0]]
    assert not servers.published()


@pytest.mark.timeout(1800)
def test_vllm_engines_of_a_group_take_versions_together(servers: Servers[Outcome, GpufsMount]) -> None:
    """One processes and the other follows, at the same addresses, with the tokens of fresh engines.

    Also while one sleeps, one dies, and versions are refused or replaced by later ones.
    """
    versions = [servers.model, *(servers.mount.device / f"version{number}" for number in (1, 2))]
    for number, version in enumerate(versions[1:], start=1):
        make_model(servers.scratch / version.name, seed=number)
        shutil.copytree(servers.scratch / version.name, version)
    make_model(servers.scratch / "narrow", seed=0, width=256)
    shutil.copytree(servers.scratch / "narrow", servers.mount.device / "narrow")
    whole = {name: each for file in servers.model.glob("*.safetensors") for name, each in load_file(file).items()}
    for lost in ("layers.2.", "lm_head.", "norm.weight", "layers.5.mlp."):
        folder = servers.mount.device / f"without-{lost}"
        folder.mkdir()
        rest = {name: each for name, each in whole.items() if lost not in name}
        gpufs_torch.publish(rest, folder / "model.safetensors")
    fresh = [servers.start(load_format="auto", model=version).tokens for version in versions]
    assert len({tuple(tokens) for tokens in fresh}) == len(versions)
    settings: dict[str, Any] = {
        "extra": {"group": "policy"},
        "options": {"weight_transfer_config": {"backend": "gpufs"}},
    }
    with servers.talk("one", **settings) as one, servers.talk("two", **settings) as two:

        def check(first: int, second: int) -> None:
            """Both have these versions, and one file is all that there is."""
            assert [engine.ask("tokens") for engine in (one, two)] == [fresh[first], fresh[second]]
            assert [engine.ask("addresses") for engine in (one, two)] == addresses
            assert len(servers.published()) == 1
            assert len(list(servers.published()[0].parent.iterdir())) == 1

        def used() -> int:
            status = os.statvfs(servers.mount.device)
            return (status.f_blocks - status.f_bfree) * status.f_frsize

        addresses = [engine.ask("addresses") for engine in (one, two)]
        check(0, 0)
        before, own = used(), [engine.ask("private") for engine in (one, two)]
        assert one.ask("update", versions[1]) == ""
        check(1, 0)
        assert two.ask("update", versions[1]) == ""
        check(1, 1)
        assert two.ask("update", versions[2]) == ""  # the one that maps processes
        assert one.ask("update", versions[2]) == ""
        check(2, 2)
        assert used() == before
        weights = servers.published()[0].stat().st_size
        assert all(
            engine.ask("private") < private + weights / 2 for engine, private in zip((one, two), own, strict=True)
        )

        for wrong in ("narrow", "missing", *(folder.name for folder in servers.mount.device.glob("without-*"))):
            refusal = two.ask("update", servers.mount.device / wrong)
            assert refusal, wrong
            check(2, 2)
        assert used() == before
        assert one.ask("prepare", versions[0]) == ""
        assert two.ask("update", versions[0]) == ""
        assert two.ask("update", versions[1]) == ""
        check(2, 1)
        assert one.ask("finish") == ""
        check(0, 1)

        one.ask("sleep")
        assert two.ask("update", versions[2]) == ""
        assert "wake" in one.ask("update", versions[2])
        one.ask("wake")
        check(0, 2)
        assert one.ask("update", versions[2]) == ""
        check(2, 2)

        with servers.talk("three", **settings) as three, ThreadPoolExecutor(1) as pool:
            assert three.ask("tokens") == fresh[2]
            assert three.ask("die", versions[1]) == "dies"
            updated = pool.submit(two.ask, "update", versions[1])
            assert one.ask("tokens") == fresh[2]
            assert not updated.done()
            three.process.kill()
            assert updated.result() == ""
        assert one.ask("update", versions[1]) == ""
        check(1, 1)


def test_vllm_experts_are_processed_as_at_a_start(servers: Servers[Outcome, GpufsMount]) -> None:
    """vLLM leaves out a part of that when it reloads experts."""
    for seed in range(2):
        make_experts(servers.scratch / f"experts{seed}", seed)
        shutil.copytree(servers.scratch / f"experts{seed}", servers.mount.device / f"experts{seed}")
    first, second = (servers.mount.device / f"experts{seed}" for seed in range(2))
    expected = servers.start(load_format="auto", model=second).tokens
    options = {"weight_transfer_config": {"backend": "gpufs"}}
    for extra in ({"share": False}, {"group": "policy"}):
        done = servers.start(model=first, extra=extra, options=options, updates=[str(second), str(first), str(second)])
        assert done.updated == [expected, done.tokens, expected] != [done.tokens] * 3
    assert len(servers.published()) == 1


@pytest.mark.timeout(1800)
def test_vllm_ranks_of_a_group_have_one_version(servers: Servers[Outcome, GpufsMount]) -> None:
    """All ranks take a version or none; an engine does not map files of two versions."""
    ranks = {"VLLM_PLUGINS": "gpufs,without_onednn", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    servers.environment = {**servers.environment, **ranks}
    options = {"tensor_parallel_size": 2}
    other = servers.mount.device / "other"
    make_model(servers.scratch / "other", seed=1)
    shutil.copytree(servers.scratch / "other", other)
    expected = servers.start(load_format="auto", options=options).tokens
    settings: dict[str, Any] = {
        "extra": {"group": "policy"},
        "options": {**options, "weight_transfer_config": {"backend": "gpufs"}},
    }
    # The refused one comes last: with several ranks, vLLM answers the next call with its error, too.
    first = servers.start(updates=[str(other), str(servers.model), str(other), "/missing"], **settings)
    assert first.tokens == first.updated[1] == expected
    assert first.updated[0] == first.updated[2] != expected
    assert "missing" in first.updated[3]
    published = servers.published()
    assert len(published) == 2
    before = published[0].read_bytes()
    second = servers.start(updates=[str(servers.model)], **settings)
    assert second.tokens == first.updated[0]  # not what it was started with, but what the group has
    assert second.updated == [expected]
    servers.mount.device.joinpath("old").write_bytes(before)
    servers.mount.device.joinpath("old").rename(published[0])  # as after a crash between two renames
    torn = servers.start(updates=[str(other)], **settings)
    assert torn.tokens == expected
    assert torn.updated == [first.updated[0]]


# Some longer than a block of the prefix cache, and one of them with the beginning of another.
PROMPTS = ([5, 6, 7, 8, 9], [42], *([number * 37 % 2000 for number in range(count)] for count in (300, 400)))
VERSIONS = 5
SERVED = ("--served-model-name", "policy", "--enforce-eager", "--max-model-len", "512", "--dtype", "bfloat16")


def ask(address: str, prompt: Sequence[int], model: str = "policy", tokens: int = 16) -> list[int]:
    """Returns the tokens of an answer over HTTP."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "return_token_ids": True}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return list(json.load(answer)["choices"][0]["token_ids"])


def make_adapter(folder: Path, seed: int) -> None:
    """Writes a LoRA adapter for what make_model() makes."""
    parts = ["q_proj", "o_proj"]
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 64, "target_modules": parts, "bias": "none"}
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(6):
        for part in parts:
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, 512)
            tensors[f"{name}.lora_B.weight"] = torch.randn(512, 8) / 16
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.timeout(900)
def test_vllm_serves_adapters_and_keeps_its_cache(mount: Mounter, tmp_path: Path) -> None:
    """As the howtos show: adapters in gpu0 and host0 are loaded, dropped, swapped and removed as those on a disk are.

    A pause in which the engine sleeps (which an engine on CPUs ignores) keeps the prefix cache.
    """
    swap = block("howto/model-servers.md", '"load_inplace"')
    serve, load, unload = block("howto/model-servers.md", "--enable-lora").splitlines()[-3:]
    pause, sleep, _, wake, resume = block("howto/several-models.md", "/collective_rpc").splitlines()
    with mount("--host-memory", str(256 * MIB), memory=512 * MIB) as mounted:
        servers = make_servers(mounted, tmp_path)
        make_tokenizer(servers.model, 2048)
        places = {"disk": tmp_path, "gpu": mounted.device, "host": mounted.path / "host0"}
        for seed in range(3):
            make_adapter(tmp_path / f"adapter{seed}", seed)
            for name in ("gpu", "host"):
                gpufs("cp", "-r", tmp_path / f"adapter{seed}", places[name])
        serve = serve.replace(" MODEL ", f" {servers.model} ")
        few = ("--max-loras", "1", "--max-cpu-loras", "2", "--max-lora-rank", "8")
        variables = {"VLLM_PLUGINS": "gpufs", "VLLM_SERVER_DEV_MODE": "1"}
        with servers.serve(serve, *SERVED, *few, **variables) as address:

            def shell(command: str, name: str = "", path: Path = tmp_path) -> None:
                command = command.replace("localhost:8000", address).replace('"sql"', f'"{name}"')
                run("bash", "-euc", re.sub("/mnt/gpufs/host0/[a-z0-9-]*", str(path), command))

            def answer(name: str = "policy") -> list[int]:
                return ask(address, PROMPTS[-1], name, tokens=6)

            def cached() -> int:
                with urllib.request.urlopen(f"{address}/metrics") as page:
                    (hits,) = re.findall(r"^vllm:prefix_cache_hits_total\S* (\S+)", page.read().decode(), re.MULTILINE)
                return int(float(hits))

            base = answer()
            for place, folder in places.items():
                for seed in range(3):
                    shell(load, f"{place}{seed}", folder / f"adapter{seed}")
            expected = [answer(f"disk{seed}") for seed in range(3)]
            assert len({tuple(each) for each in (base, *expected)}) == 4
            for _ in range(2):  # each is dropped for the others
                for place in ("gpu", "host"):
                    assert [answer(f"{place}{seed}") for seed in range(3)] == expected
                run("curl", "-fsX", "POST", f"{address}/reset_prefix_cache")
                gpufs("sleep", *(mounted.device / f"adapter{seed}" for seed in range(3)))

            shell(swap, "gpu0", mounted.device / "adapter1")
            assert answer("gpu0") == expected[1]
            make_adapter(mounted.device / "adapter1", 2)
            shell(swap, "gpu0", mounted.device / "adapter1")
            run("curl", "-fsX", "POST", f"{address}/reset_prefix_cache")
            assert answer("gpu0") == expected[2]
            shell(unload, "gpu0")
            with pytest.raises(urllib.error.HTTPError):
                answer("gpu0")
            shutil.rmtree(mounted.device / "adapter0")
            assert (answer("host0"), answer()) == (expected[0], base)

            before = cached()
            with ThreadPoolExecutor(1) as pool:
                shell(pause)
                shell(sleep)
                waiting = pool.submit(answer)
                shell(wake)
                assert not waiting.done()
                shell(resume)
                assert waiting.result() == base
            assert cached() > before


def wrong_files(good: Path) -> Iterator[tuple[str, Path]]:
    """Yields what is wrong with a file, and the file. All tensors differ from those of the good one."""
    weights = {name: tensor + 1 for name, tensor in load_file(good).items() if "rotary" not in name}
    down, gate, key = (
        f"model.layers.2.{name}.weight" for name in ("mlp.down_proj", "mlp.gate_proj", "self_attn.k_proj")
    )
    wrong = good.with_name("wrong.safetensors")
    yield "missing", wrong
    yield "relative", Path(good.name)
    yield "off the mount", Path(__file__)
    wrong.mkdir()
    yield "an empty directory", wrong
    wrong.rmdir()
    os.mkfifo(wrong)
    yield "a FIFO", wrong
    wrong.unlink()
    for what, content in (
        ("empty", b""),
        ("damaged", b"\x10" + bytes(7) + b"not a header" + bytes(1000)),
        ("cut off", good.read_bytes()[:MIB]),
        ("another format", b"PK\3\4" + bytes(1000)),
    ):
        wrong.write_bytes(content)
        yield what, wrong
    for what, tensors in (
        ("too narrow", {**weights, down: weights[down][:, :64].contiguous()}),
        ("too wide", {**weights, gate: torch.cat([weights[gate]] * 2)}),
        ("an unknown name", {**weights, "model.layers.2.extra.weight": weights[gate]}),
        ("names with a prefix", {f"policy.{name}": tensor for name, tensor in weights.items()}),
        ("a part of a layer", {name: tensor for name, tensor in weights.items() if name != key}),
        ("another dtype", {**weights, down: weights[down].to(torch.int8)}),
        ("a layer more", {**weights, "model.layers.9.mlp.down_proj.weight": weights[down]}),
    ):
        gpufs_torch.publish(tensors, wrong)
        yield what, wrong


@pytest.mark.timeout(1800)
def test_vllm_is_updated_as_the_howto_says(servers: Servers[Outcome, GpufsMount]) -> None:
    """What docs/howto/update-weights-in-place.md prints: tokens are those of fresh engines, and no answer is a mixture.

    Files that do not fit leave the engine as it is, and so does a trainer that dies.
    """
    page = (REPOSITORY / "docs/howto/update-weights-in-place.md").read_text()
    original, good = servers.scratch / "model", servers.mount.device / "policy.safetensors"
    make_tokenizer(original, 2048)
    shutil.copytree(original, servers.model, dirs_exist_ok=True)

    def shown(section: str) -> list[str]:
        """Returns the blocks of code in a section, with the names of this test."""
        (text,) = re.findall(rf"^## {section}\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
        blocks = re.findall(r"(?:^    .*\n)(?:\n*^    .*\n)*", text, re.MULTILINE)
        named = (block.replace("/mnt/gpufs/gpu0", str(servers.mount.device)) for block in blocks)
        return [textwrap.dedent(block.replace(" MODEL ", f" {servers.model} ")) for block in named]

    def version_of(number: int) -> Path:
        return servers.scratch / f"version{number}"

    publish, (command, program, *_) = shown("The trainer")[0], shown("vLLM")
    policy = transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    fresh: list[list[list[int]]] = []  # of each version, the answers
    for version in range(VERSIONS + 1):
        policy.save_pretrained(version_of(version))
        engine = servers.start(
            model=version_of(version), load_format="auto", prompts=PROMPTS, options={"max_model_len": 512}
        )
        fresh.append(engine.answers)
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
    assert all(len({tuple(answers[number]) for answers in fresh}) == VERSIONS + 1 for number in range(len(PROMPTS)))

    ended = threading.Event()
    with servers.serve(command.strip(), *SERVED, VLLM_PLUGINS="gpufs") as address, ThreadPoolExecutor(1) as pool:

        def answers() -> list[list[int]]:
            return [ask(address, prompt) for prompt in PROMPTS]

        def ask_all_the_time() -> None:
            while not ended.is_set():
                for number, prompt in enumerate(PROMPTS):
                    assert ask(address, prompt) in [answers[number] for answers in fresh]

        assert answers() == fresh[0]
        trainer: dict[str, Any] = {}
        asking = pool.submit(ask_all_the_time)
        try:
            for version in range(1, VERSIONS + 1):
                policy = transformers.AutoModelForCausalLM.from_pretrained(version_of(version), dtype=torch.bfloat16)
                exec(publish, {"policy": policy})
                if version == 1:
                    exec(program.replace("http://localhost:8000", address), trainer)
                else:
                    trainer["update"](str(good))
                assert answers() == fresh[version], version
        finally:
            ended.set()
        asking.result()

        tried = []
        for what, file in wrong_files(good):
            with pytest.raises(urllib.error.HTTPError):
                trainer["update"](str(file))
            assert answers() == fresh[VERSIONS], what
            tried.append(what)
        assert len(tried) >= 10

        # A trainer dies before the end; the next one begins. What the first one named is forgotten.
        gpufs_torch.publish(load_file(version_of(1) / "model.safetensors"), good)
        trainer["post"]("/start_weight_update")
        trainer["post"]("/update_weights", update_info={"path": str(good)})
        trainer["begin"]()
        assert answers() == fresh[VERSIONS]
        trainer["update"](str(good))
        assert answers() == fresh[1]

        for version in (2, 3):  # written over the one before, with an equal header
            shutil.copyfile(version_of(version) / "model.safetensors", good)
            trainer["update"](str(good))
            assert answers() == fresh[version]
