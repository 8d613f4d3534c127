"""The commands and programs of the how-to pages run as they are shown, on mounts of host memory.

Other tests run those of inspect-files.md (test_inspect.py), load-from-s3-and-the-hub.md (test_remote_s3.py),
share-weights.md and restart.md (test_examples.py), containers.md (test_containers.py); `scripts/check install` those of
fstab-and-systemd.md, `scripts/check servers` those of model-servers.md, and `make test-gpu` the pool of
build-a-model-in-gpufs.md, which needs a GPU.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from errno import EACCES
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support import attaching
from support.cli import gpufs as gpufs_command
from support.mounting import GpufsMount
from support.pages import DOCS, ENVIRONMENT, Shell, block, blocks, commands, options_of
from support.processes import NOBODY, as_nobody, as_other, errno_of, run, wait_until
from support.watchdog import mounted_at, rescue
from torch import nn

import gpufs


@pytest.fixture
def mounted(mount: object, driver: str) -> GpufsMount:
    if driver != "host":
        pytest.skip("the pages run on host memory")
    return mount("--devices", "3", "--memory", "64M", "--allow-other")  # type: ignore[operator,no-any-return]


def test_limits(mounted: GpufsMount, tmp_path: Path) -> None:
    user = "nobody"
    shell = Shell(mounted.path, tmp_path, alice=user)
    first, *others = commands("howto/limits.md")
    assert first.startswith("gpufs mount")
    assert len(others) >= 8
    for command in others:
        shell(command)
        if "40G" in command:
            rules = json.loads(shell("gpufs quota list --json"))
            (rule,) = [rule for rule in rules if rule["path"] == str(mounted.device) and rule["user"] == user]
            assert rule["limit_bytes"] == 40 << 30


def test_see_gpu_memory(mounted: GpufsMount, tmp_path: Path) -> None:
    shell = Shell(mounted.path, tmp_path, **{"--interval 5": "--interval 0.1"})
    (mounted.device / "llama.safetensors").write_bytes(b"x" * 4096)
    printed = {command: shell(command) for command in commands("howto/see-gpu-memory.md")}
    assert len(printed) >= 8
    for command, text in printed.items():
        assert str(mounted.path) in text or "stats" in command, command
    assert f"{mounted.device}/llama.safetensors" in printed["gpufs ls -r /mnt/gpufs"]
    (largest_first,) = [text for text in printed if text.startswith("gpufs ls -r --json")]
    assert f"4096 {mounted.device}/llama.safetensors" in printed[largest_first]


def test_upgrade(mounted: GpufsMount, tmp_path: Path) -> None:
    """Results are copied out, the mount ends, and a new one answers."""
    shell = Shell(mounted.path, tmp_path)
    (mounted.device / "results").mkdir()
    (mounted.device / "results/a").write_bytes(b"a" * 100_000)
    shown = [command for command in commands("howto/upgrade.md") if not command.startswith("cp ")]
    end = shown.index("gpufs umount /mnt/gpufs")
    for command in shown[: end + 1]:
        shell(command)
    assert (tmp_path / "results/a").read_bytes() == b"a" * 100_000
    assert not os.path.ismount(mounted.path)
    try:
        shell("gpufs mount /mnt/gpufs --driver host --memory 64M")
        for command in shown[end + 1 :]:
            shell(command)
    finally:
        shell("! mountpoint -q /mnt/gpufs || gpufs umount /mnt/gpufs")


def test_save_and_restore(mounted: GpufsMount, tmp_path: Path) -> None:
    """In the order of the page: a mount, a part of one, and a mount that ends."""
    shell = Shell(mounted.path, tmp_path)
    models = mounted.device / "models"
    models.mkdir()
    (models / "a").write_bytes(b"a" * 100_000)
    shown = commands("howto/save-and-restore.md")
    assert len(shown) == 10
    try:
        for command in shown:
            if command == "gpufs restore /data/save /mnt/gpufs":
                shutil.rmtree(models)
            shell(command + " --driver host --devices 3 --memory 64M" * command.startswith("gpufs mount"))
        for name in ("gpu0/models", "gpu1/models", "gpu1/copy"):
            assert (mounted.path / name / "a").read_bytes() == b"a" * 100_000
    finally:
        shell("! mountpoint -q /mnt/gpufs || gpufs umount /mnt/gpufs")


def test_a_live_tensor(mounted: GpufsMount, tmp_path: Path) -> None:
    """The page's shell looks into an array of the page's program, which lies in shared memory here."""
    shell = Shell(mounted.path, tmp_path)
    page = "howto/inspect-a-live-tensor.md"
    program = blocks(page)[0]
    (shared,) = re.findall(r"`(torch\.randn\(.*share_memory_\(\))`", (DOCS / page).read_text())
    program = re.sub(r"torch\.randn\(.*\)", shared, program)
    looks = [look for look in commands(page) if "live" not in look]
    assert [look.split()[0] for look in looks][-3:-1] == ["printf", "gpufs"]
    program += (
        "import subprocess\ndef look(text):\n    return subprocess.check_output(['bash', '-euc', text], text=True)\n"
        "activations[0, 1] = 1\nactivations[0, 32] = 1\nactivations[7, 5] = float('nan')\n"
        f"print(look({'; '.join(looks[:-2])!r}))\nassert activations[0, 32] == 0\n"
        f"look({looks[-2]!r})\nassert activations[0, 32] == 1\nprint(look({looks[-1]!r}))\n"
    )
    printed = shell(f"python - <<'END'\n{shell.here(program).replace('4096', '64')}\nEND")
    assert "registered float32 64x64" in printed
    assert "0000 803f" in printed
    assert printed.split()[-2:] == ["[7,", "5]"]


def test_a_live_model(mounted: GpufsMount, tmp_path: Path) -> None:
    shell = Shell(mounted.path, tmp_path)
    page = "howto/inspect-a-live-tensor.md"
    looks = [look for look in commands(page) if "live" in look]
    model = nn.BatchNorm1d(4).share_memory()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    names: dict[str, Any] = {"model": model, "gpufs": gpufs}
    names["input"] = lambda _: [shell(f"{look} || [ $? = 1 ]") for look in looks]
    with torch.no_grad():
        model.weight[2] = float("nan")
    exec(shell.here(block(page, "gpufs.register(model")).replace("input(", "seen = input("), names)
    nan, differences = names["seen"]
    assert nan.split()[-5:] == ["weight", "float32", "4", "1", "[2]"]
    assert "weight" in differences
    assert "bias" not in differences


def test_attach_and_load(mounted: GpufsMount, tmp_path: Path) -> None:
    shell = Shell(mounted.path, tmp_path)
    device = mounted.device
    for name in ("weights", "buffer", "new-weights"):
        target = tmp_path / name if name.startswith("new") else device / name
        target.write_bytes(os.urandom(4096 * 16))
    save_file({"weight": torch.ones(3, 3), "bias": torch.ones(3)}, tmp_path / "model.safetensors")
    program = block("howto/attach.md", 'gpufs.attach("/mnt/gpufs/gpu0/weights")')
    shell(f"python - <<'END'\n{program.replace('torch.cuda.synchronize()', '')}\nassert weights.shape[0] == 4096\nEND")
    assert (device / "buffer").read_bytes() == bytes(4096 * 16)
    for command in commands("howto/attach.md"):
        shell(command)
    assert (device / "weights").read_bytes() == (tmp_path / "new-weights").read_bytes()
    hub = tmp_path / ".cache/huggingface/hub/models--Qwen--Qwen3-8B"
    (hub / "blobs").mkdir(parents=True)
    shutil.copy(tmp_path / "model.safetensors", hub / "blobs/1")
    (hub / "snapshots/1").mkdir(parents=True)
    (hub / "snapshots/1/model.safetensors").symlink_to("../../blobs/1")
    for command in commands("howto/load-into-torch.md"):
        shell(command.replace("~", str(tmp_path)))
    assert load_file(device / "Qwen3-8B/model.safetensors")["weight"].sum() == 9
    load = block("howto/load-into-torch.md", "weights = gpufs.torch.load_file(")
    models = (block("howto/share-weights.md", "attach_module("), block("howto/load-into-torch.md", "Model(config)"))
    attach, train = (text.replace("Model(config)", "nn.Linear(3, 3)") for text in models)
    aligned = block("howto/load-into-torch.md", "aligned.safetensors")
    program = f"{load}\n{aligned}\nassert weights['bias'].sum() == 3\nimport torch\nfrom torch import nn\n{attach}\n"
    program += f"assert model.weight.sum() == 9\nbatch = torch.ones(1, 3)\n{train}"
    shell(f"python - <<'END'\n{program}END")
    assert load_file(device / "model.safetensors")["weight"].sum() < 9
    assert set(load_file(tmp_path / "model.safetensors")) == set(nn.Linear(3, 3).state_dict())


@pytest.mark.slow
def test_workers(mounted: GpufsMount, tmp_path: Path) -> None:
    """Each worker attaches the file, also if the program itself has attached something."""
    save_file({"tokens": torch.ones(8, 16)}, mounted.device / "data.safetensors")
    shell = Shell(mounted.path, tmp_path)
    program = shell.here(block("howto/attach.md", "class Tokens"))
    ready = "if __name__ == "
    attached = f'kept = gpufs.torch.load_file("{mounted.device}/data.safetensors")\n'
    (tmp_path / "program.py").write_text(program.replace(ready, f"{attached}\n{ready}"))
    assert shell("python program.py").splitlines() == ["torch.Size([1, 16])"] * 8


def test_mount_from_python(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"model")
    (tmp_path / "mnt").mkdir()
    shell = Shell(tmp_path / "mnt", tmp_path)
    program = block("howto/mount-from-python.md", "with gpufs.mount").replace('devices=["GPU-4f3e"]', 'driver="host"')
    program = program.replace('memory="40G"', 'memory="64M"')
    shell(f"python - <<'END'\n{program}    print((directory / 'model.safetensors').read_bytes())\nEND")
    assert not os.path.ismount(tmp_path / "mnt")


def test_prometheus_and_fast(mounted: GpufsMount, tmp_path: Path) -> None:
    shell = Shell(mounted.path, tmp_path)
    assert 'device="gpu2"' in shell("gpufs metrics | grep held")
    for command in commands("howto/prometheus.md"):
        if "--listen" not in command:  # test_statistics.py asks it over HTTP
            assert "gpufs" in shell(command)
    (scrape,) = [text for text in blocks("howto/prometheus.md") if "scrape_configs" in text]
    assert yaml.safe_load(scrape)["scrape_configs"][0]["job_name"] == "gpufs"


def test_manifests_of_kubernetes() -> None:
    """They are YAML, and the commands in them have these options."""
    pages = [yaml.safe_load(text) for text in blocks("containers.md") if "containers:" in text]
    assert len(pages) >= 2
    words: list[list[str]] = []
    for document in [*pages, *yaml.safe_load_all((DOCS.parent / "deploy/gpufs.yaml").read_text())]:
        words += [words for found in _command_lists(document) for words in _calls(found)]
    assert any(command[:2] == ["gpufs", "mount"] and "--allow-other" in command for command in words)
    for program, command, *options in words:
        assert program == "gpufs"
        assert {word for word in options if word.startswith("-")} <= options_of(command)


def _calls(command: list[str]) -> list[list[str]]:
    """The calls of gpufs in a container's command, which may be a script."""
    if command[:2] != ["sh", "-c"]:
        return [list(command)]
    return [shlex.split(call[0]) for call in re.finditer(r"gpufs (mount|umount)[^|&;']*", command[2])]


def _command_lists(tree: object) -> list[list[str]]:
    if isinstance(tree, dict):
        own = [tree["command"]] if "command" in tree else []
        return own + [found for value in tree.values() for found in _command_lists(value)]
    if isinstance(tree, list):
        return [found for value in tree for found in _command_lists(value)]
    return []


def test_tutorial_in_place(driver: str, tmp_path: Path) -> None:
    if driver != "host":
        pytest.skip("numpy reaches host memory only")
    (tmp_path / "mnt").mkdir()
    shell = Shell(tmp_path / "mnt", tmp_path)
    (program,) = [text for text in blocks("tutorial.md") if text.startswith("gpufs mount /mnt/gpufs ")]
    program = program.replace(
        "gpufs mount /mnt/gpufs",
        "trap 'mountpoint -q mnt && gpufs umount mnt' EXIT\ngpufs mount /mnt/gpufs --driver host",
    )
    assert "0000 c03f 0000 c03f" in shell(program)
    assert not os.path.ismount(tmp_path / "mnt")


def test_slurm_prolog_and_epilog(open_directory: Path) -> None:
    mountpoint = open_directory / "jobs/7"
    environment = {**ENVIRONMENT, "SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0", "SLURM_JOB_UID": str(NOBODY)}
    scripts = {}
    for name, containing in (("prolog", "chown"), ("epilog", "rmdir")):
        text = block("howto/slurm-prolog.md", containing).replace("/run/gpufs-jobs", str(open_directory / "jobs"))
        scripts[name] = open_directory / name
        scripts[name].write_text(text.replace("--driver cuda", "--driver host --memory 64M"))
        scripts[name].chmod(0o755)
    try:
        run(scripts["prolog"], env=environment)
        file = mountpoint / "gpu0/weights"
        as_nobody(lambda: file.write_bytes(b"x" * 4096))
        assert file.stat().st_uid == NOBODY
        assert as_other(lambda: errno_of(os.listdir, mountpoint / "gpu0")) == EACCES
        with open(file, "rb"):  # what a job leaves behind does not keep its memory
            run(scripts["epilog"], env=environment)
        assert not mountpoint.exists()
        run(scripts["epilog"], env=environment)  # of a job that had no mount
        run(scripts["prolog"], env={**environment, "SLURM_JOB_GPUS": ""})
        assert not mountpoint.exists()
    finally:
        if mounted_at(str(mountpoint)):
            rescue(str(mountpoint), None)


def test_troubleshooting(tmp_path: Path) -> None:
    Shell(tmp_path, tmp_path)(block("howto/troubleshooting.md", "gpufs doctor\ngpufs status\n"))


def test_several_models(mount: Any, driver: str, tmp_path: Path) -> None:
    if driver != "host":
        pytest.skip("the pages run on host memory")
    made = mount("--host-memory", "64M", "--memory", "64M", "--evict")
    folder = made.device / "Qwen3-8B"
    folder.mkdir()
    (folder / "weights").write_bytes(os.urandom(5 << 20))
    shell = Shell(made.path, tmp_path)
    for command in commands("howto/several-models.md"):
        if command.split()[1] in ("sleep", "wake", "pin", "unpin"):
            assert "1 file, " in shell(command)


# Computes with a module in sharded files under the lock of the page, and prints each result that differs.
COMPUTING = """
import sys, time
import gpufs, gpufs.torch, torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1000, 1000, bias=False) for _ in range(3))
    def forward(self, x):
        return sum(layer(x).sum() for layer in self.layers).item()

with torch.device("meta"):
    model = Model()
gpufs.torch.attach_module(model, sys.argv[1])
PAGE
x = torch.ones(1000)
first = model(x)
try:
    gpufs.torch.sleep(model)
except gpufs.DeviceFull:
    print("full", flush=True)
rounds = 0
while True:
    with idle:
        result = model(x)
    rounds += 1
    if result != first or rounds == 1:
        print(result == first, flush=True)
    time.sleep(0.01)
"""


def test_a_program_that_is_asked(mount: Any, driver: str, tmp_path: Path) -> None:
    if driver != "host":
        pytest.skip("the pages run on host memory")
    made = mount("--host-memory", "16M", "--memory", "32M")
    folder = made.device / "model"
    folder.mkdir()
    places = {}
    for number in range(3):
        name = f"layers.{number}.weight"
        places[name] = f"model-{number + 1:05}-of-00003.safetensors"
        save_file({name: torch.rand(1000, 1000)}, folder / places[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    filler = made.path / "host0/filler"
    filler.write_bytes(bytes(8 << 20))
    script = COMPUTING.replace("PAGE", block("howto/several-models.md", "when_asked"))
    with attaching.program(script, folder) as computing:
        assert computing.stdout is not None
        assert computing.stdout.readline() == "True\n"
        for _ in range(2):
            filler.write_bytes(bytes(8 << 20))
            assert gpufs_command("sleep", folder, check=False).returncode == 1  # the program goes on
            filler.unlink()
            wait_until(lambda: gpufs_command("sleep", folder, check=False).returncode == 0, 60, "the program to listen")
            leases = json.loads((made.path / ".gpufs/leases").read_text())["leases"]
            assert [lease["asleep"] for lease in leases] == [True] * 3
            gpufs_command("wake", folder)
        wait_until(lambda: not gpufs_command("sleep", folder, check=False).returncode, 60, "the program to wake")
        gpufs_command("wake", folder)
        assert computing.poll() is None
        computing.kill()
        assert set(computing.stdout.read().split()) <= {"True"}


def test_update_weights_in_place(mounted: GpufsMount, tmp_path: Path) -> None:
    page = "howto/update-weights-in-place.md"
    shell = Shell(mounted.path, tmp_path)

    class Policy(nn.Module):
        def __init__(self, value: float = 0.0) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((1000, 1000), value))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.weight[0, 0] * tokens

    names: dict[str, Any] = {"Policy": Policy, "policy": Policy(1.0), "tokens": torch.ones(())}
    trainer, engine = block(page, "replace=True, metadata"), block(page, "attach_module")
    exec(shell.here(trainer), names)
    exec(shell.here(engine), names)
    assert names["follower"].metadata["step"] == "1200"
    names["policy"] = Policy(2.0)
    exec(shell.here(trainer), names)
    assert names["model"](names["tokens"]) == 2.0
    exec(shell.here(block(page, "on_forward=False")), names)
    shutil.copy(mounted.device / "policy.safetensors", mounted.device / "new.safetensors")
    (replaced,) = commands(page)
    shell(replaced)
    assert names["follower"].update()
