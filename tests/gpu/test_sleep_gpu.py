"""Models that leave a real GPU and come back, and new versions in place: captured CUDA graphs go on working."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import wait_until
from support.surviving import mounted

import gpufs.torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_cuda"), pytest.mark.alone, pytest.mark.timeout(240)]

torch = pytest.importorskip("torch", reason="these tests use torch on a GPU")

GIB = 1 << 30
ROWS = 4096
PUBLISHER = """
    import sys, torch, gpufs.torch
    model = torch.nn.Linear(4096, 32768, bias=False, dtype=torch.float16, device=sys.argv[2])
    for version in range(2, 12):
        torch.nn.init.constant_(model.weight, version)
        gpufs.torch.publish(model, sys.argv[1], replace=True, metadata={"step": str(version)})
        print(version, flush=True)
        sys.stdin.readline()
"""


def captured(compute: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that replays a CUDA graph of `compute`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def free() -> int:
    found: int = torch.cuda.mem_get_info()[0]
    return found


def linear(rows: int, where: str) -> Any:
    with torch.device(where):
        return torch.nn.Linear(ROWS, rows, bias=False, dtype=torch.float16)


def run(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True, timeout=100)


def test_a_graph_works_after_another_model_had_the_memory(driver: str, tmp_path: Path) -> None:
    """The device takes one model at a time: the other one comes while this one sleeps, and goes before it wakes."""
    rows = GIB // 2 // ROWS
    with mounted(tmp_path / "mnt", "--host-memory", "3G", driver=driver, memory="1536M") as mount:
        path, other, aside = mount.device / "model", mount.device / "other", mount.path / "host0" / "other"
        gpufs.torch.publish(linear(rows, "cuda"), other)
        run("mv", other, aside)
        gpufs.torch.publish(linear(rows, "cuda"), path)
        model = gpufs.torch.attach_module(linear(rows, "meta"), path)
        given = torch.randn(64, ROWS, dtype=torch.float16, device="cuda")
        result = torch.empty(64, rows, dtype=torch.float16, device="cuda")
        replay = captured(lambda: torch.nn.functional.linear(given, model.weight, out=result))
        replay()
        expected, address = result.clone(), model.weight.data_ptr()
        before = free()
        for _ in range(3):
            gpufs.torch.sleep(model)
            wait_until(lambda: free() >= before + GIB - GIB // 8, 10, "the memory of a model that sleeps")
            run("mv", aside, other)
            run("mv", other, aside)
            mount.kill()
            gpufs.torch.wake(model)
            assert free() < before + GIB // 4
            result.zero_()
            replay()
            assert torch.equal(result, expected)
            assert model.weight.data_ptr() == address


def test_a_graph_uses_each_version(driver: str, tmp_path: Path) -> None:
    """A program that follows a file replays its graph over the newest version, which another program has published."""
    with mounted(tmp_path / "mnt", driver=driver, memory="1G") as mount:
        path = mount.device / "model"
        first = linear(32768, "cuda")
        torch.nn.init.constant_(first.weight, 1)
        gpufs.torch.publish(first, path, replace=True)
        model = gpufs.torch.attach_module(linear(32768, "meta"), path)
        follower = gpufs.torch.follow(model, on_forward=False)
        extremes = torch.empty(2, dtype=torch.float16, device="cuda")

        def find_extremes() -> None:
            extremes[0], extremes[1] = model.weight.amin(), model.weight.amax()

        replay = captured(find_extremes)
        words = [sys.executable, "-c", textwrap.dedent(PUBLISHER), str(path), "cuda"]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as publisher:
            assert publisher.stdin is not None
            assert publisher.stdout is not None
            for line in publisher.stdout:
                assert follower.update()
                replay()
                assert extremes.tolist() == [int(line)] * 2
                assert follower.metadata["step"] == line.strip()
                publisher.stdin.write("\n")
                publisher.stdin.flush()
        assert publisher.returncode == 0


def test_parameters_that_were_moved_or_cast_get_new_versions_by_a_copy(driver: str, tmp_path: Path) -> None:
    """The rest of the model follows in place, and a part that was quantised refuses the version by its name."""

    def models(where: str) -> Any:
        return torch.nn.Sequential(*(linear(512, where) for _ in range(4)))

    with mounted(tmp_path / "mnt", driver=driver, memory="256M") as mount:
        path = mount.device / "model"
        gpufs.torch.publish(models("cuda"), path, replace=True)
        model = gpufs.torch.attach_module(models("meta"), path)
        follower = gpufs.torch.follow(model, on_forward=False)
        model[0].cpu()
        model[1].float()
        model[2].load_state_dict({"weight": model[2].weight.detach().clone()}, assign=True)
        for _ in range(3):
            new = models("cuda")
            gpufs.torch.publish(new, path, replace=True)
            assert follower.update()
            for part, expected in zip(model.parameters(), new.parameters(), strict=True):
                assert torch.equal(part, expected.to(part.device, part.dtype))
        before = [parameter.clone() for parameter in model.parameters()]
        model[3].weight = torch.nn.Parameter(model[3].weight.to(torch.int8), requires_grad=False)
        gpufs.torch.publish(models("cuda"), path, replace=True)
        with pytest.raises(ValueError, match=r"3\.weight"):
            follower.update()
        assert all(torch.equal(*each) for each in zip(list(model.parameters())[:3], before, strict=False))
