"""Memory of a real GPU used in place: attached, registered, and as tensors of models."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import run

import gpufs
import gpufs.torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_cuda"), pytest.mark.alone, pytest.mark.timeout(240)]

torch = pytest.importorskip("torch", reason="these tests use torch on a GPU")

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def gpu(mount: Mounter) -> GpufsMount:
    return mount()


@contextmanager
def program(text: str, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A Python program in a process of its own. It is killed at the end if it still runs."""
    words = [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str], request: str = "") -> str:
    """Sends a line, if there is one, and returns the line that the program prints next."""
    assert process.stdin is not None
    assert process.stdout is not None
    if request:
        process.stdin.write(request + "\n")
        process.stdin.flush()
    line = process.stdout.readline()
    assert line, "the program has ended"
    return line.strip()


def json_of(*words: str | Path) -> Any:
    """What a command of gpufs prints as JSON."""
    return json.loads(subprocess.run([*GPUFS, *words, "--json"], check=True, capture_output=True).stdout)


def test_a_write_to_read_only_weights_explains_itself(gpu: GpufsMount) -> None:
    """torch raises the GPU's error in a later call. The line after it names the file."""
    path = gpu.device / "model.safetensors"
    gpufs.torch.publish({"weight": torch.ones(1000, 1000)}, path)
    program = """
import sys, safetensors.torch, torch
weight = safetensors.torch.load_file(sys.argv[1], device="cuda:0")["weight"]
weight.add_(1)
torch.cuda.synchronize()
"""
    for mode, code in (("r", 1), ("c", 0)):
        command = [*GPUFS, "run", "--mode", mode, sys.executable, "-c", program, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert (f"gpufs: a write to the weights may be the cause: {path}" in done.stderr) == bool(code)


def test_publishing_nothing_leaves_a_pool_alone(gpu: GpufsMount) -> None:
    path = gpu.device / "model.safetensors"
    pool = gpufs.torch.pool(path, 4 * MIB)
    assert not gpufs.torch.publish({}, gpu.device / "nothing.safetensors").in_place
    with pool:
        weight = torch.ones(1000, device="cuda")
    assert gpufs.torch.publish({"weight": weight}, path).in_place


def test_many_small_files(gpu: GpufsMount) -> None:
    """Their copies are tensors of their own, in one piece of memory."""
    contents = [os.urandom(17 * number % 5000) for number in range(500)]
    paths = [gpu.device / str(number) for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    free = torch.cuda.mem_get_info()[0]
    for mode in ("r", "c"):
        arrays = gpufs.attach_many(paths, mode)
        assert [torch.from_dlpack(array).cpu().numpy().tobytes() for array in arrays] == contents
    assert free - torch.cuda.mem_get_info()[0] <= 8 * MIB
    torch.from_dlpack(arrays[1]).fill_(7)  # "c": this program's own
    torch.cuda.synchronize()
    assert torch.from_dlpack(arrays[2]).cpu().numpy().tobytes() == contents[2]
    assert paths[1].read_bytes() == contents[1]


def memory_held(gpu: GpufsMount) -> int:
    """The device memory of all files. (What statvfs calls used includes the contexts of other programs.)"""
    return sum(device["used_bytes"] for device in json_of("df", gpu.path))


def fill(file: Path, size: int) -> bytes:
    """Fills a file of the mount with random bytes that repeat each MiB; the first MiB."""
    block = os.urandom(MIB)
    with open(file, "wb") as out:
        for _ in range(size // MIB):
            out.write(block)
    return block


def test_changes_are_seen_both_ways(gpu: GpufsMount) -> None:
    """A program's changes appear in the file, and changes of the file in the program's tensor."""
    file = gpu.device / "both"
    block = fill(file, 64 * MIB)
    with gpufs.attach(file, mode="r+") as array:
        tensor = torch.from_dlpack(array)
        assert tensor.device.type == "cuda"
        assert tensor.data_ptr() == array.address
        assert bytes(tensor[:MIB].cpu().numpy()) == block
        tensor[4096:8192] = 0x5A
        torch.cuda.synchronize()
        seen = subprocess.run(["xxd", "-p", "-s", "4096", "-l", "8", file], check=True, capture_output=True, text=True)
        assert seen.stdout.strip() == "5a" * 8
        with open(file, "r+b") as out:
            out.seek(32 * MIB)
            out.write(b"\x77" * 4096)
        assert int(tensor[32 * MIB : 32 * MIB + 4096].sum()) == 0x77 * 4096
        del tensor


def test_other_libraries(gpu: GpufsMount) -> None:
    """CuPy and JAX read the same memory."""
    cupy = pytest.importorskip("cupy", reason="this part uses CuPy")
    file = gpu.device / "others"
    block = fill(file, 8 * MIB)
    with gpufs.attach(file, mode="r+") as array:
        view = cupy.asarray(array)
        assert view.data.ptr == array.address
        assert cupy.asnumpy(view[:MIB]).tobytes() == block
        view[:16] = 9
        cupy.cuda.runtime.deviceSynchronize()
        assert file.read_bytes()[:16] == b"\x09" * 16
        del view
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        jax = pytest.importorskip("jax", reason="this part uses JAX")
        import numpy

        shown = jax.numpy.from_dlpack(array)
        assert numpy.asarray(shown[MIB : 2 * MIB]).tobytes() == block
        del shown


def test_large_files_attach_fast(gpu: GpufsMount) -> None:
    """The time of an attach hardly depends on the size. The limits are ten times what an idle machine needs."""
    for size, limit in ((4 * GIB, 0.08), (64 * GIB, 0.25)):
        if os.statvfs(gpu.device).f_bavail * os.statvfs(gpu.device).f_frsize < size:
            continue
        file = gpu.device / "large"
        with open(file, "wb") as out:
            os.posix_fallocate(out.fileno(), 0, size)
        gpufs.attach(file, mode="r+").close()
        times = []
        for _ in range(5):
            began = time.perf_counter()
            array = gpufs.attach(file, mode="r+")
            times.append(time.perf_counter() - began)
            array.close()
        file.unlink()
        assert sorted(times)[2] < limit


def test_results_stay_right_without_the_daemon(gpu: GpufsMount) -> None:
    """The memory outlives a daemon that is killed."""
    file = gpu.device / "survivor"
    block = fill(file, 256 * MIB)
    array = gpufs.attach(file, mode="r+")
    tensor = torch.from_dlpack(array)
    expected = int(tensor.to(torch.int64).sum())
    os.kill(int(json.loads((gpu.path / ".gpufs" / "status").read_text())["pid"]), signal.SIGKILL)
    time.sleep(0.5)
    for _ in range(3):
        assert int(tensor.to(torch.int64).sum()) == expected
    assert bytes(tensor[-MIB:].cpu().numpy()) == block
    del tensor
    array.close()


def test_tensors_equal_those_of_safetensors(gpu: GpufsMount, tmp_path: Path) -> None:
    """Each kind of element, from the mount in place and by safetensors through the host."""
    from safetensors.torch import load_file, save_file

    import gpufs.torch

    kinds = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
    tensors = {
        f"layer.{index}": (torch.randn(33, 65) * 4).to(kind) if kind is not torch.bool else torch.randn(33, 65) > 0
        for index, kind in enumerate(kinds)
    }
    source = tmp_path / "model.safetensors"
    save_file(tensors, source)
    file = gpu.device / source.name
    subprocess.run([*GPUFS, "cp", source, file], check=True)
    found, expected = gpufs.torch.load_file(file), load_file(source, device="cuda")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))


SERVER = """
import sys, torch, gpufs.torch
tensors = gpufs.torch.load_file(sys.argv[1])
print(sum(float(t.double().sum()) for t in tensors.values()), flush=True)
for line in sys.stdin:
    print(sum(float(t.double().sum()) for t in tensors.values()), flush=True)
"""


def test_a_restarted_program_loads_nothing(gpu: GpufsMount, tmp_path: Path) -> None:
    """Two programs and a restart after SIGKILL share one copy, and no weight byte moves again."""
    from safetensors.torch import save_file

    source = tmp_path / "weights.safetensors"
    save_file({f"w{index}": torch.randn(1024, 1024, 64) for index in range(4)}, source)
    file = gpu.device / source.name
    subprocess.run([*GPUFS, "cp", source, file], check=True)
    before = memory_held(gpu)
    assert before >= GIB

    def moved() -> int:
        return sum(_bytes_of(json_of("stats", gpu.path)))

    with program(SERVER, file) as first:
        result = answer(first)
        counted = moved()
        with program(SERVER, file) as second:
            assert answer(second) == result
            assert memory_held(gpu) - before < 64 * MIB
        first.send_signal(signal.SIGKILL)
        first.wait()
        with program(SERVER, file) as restarted:
            assert answer(restarted) == result
        assert moved() - counted < 16 * MIB


def _bytes_of(content: Any) -> Iterator[int]:
    """All counters of transferred bytes in the statistics."""
    if isinstance(content, dict):
        for name, value in content.items():
            if isinstance(value, int) and name == "bytes":
                yield value
            else:
                yield from _bytes_of(value)
    elif isinstance(content, list):
        for value in content:
            yield from _bytes_of(value)


EXPORTER = """
import sys, hashlib, torch, gpufs
padding = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
tensor = torch.randint(0, 256, (int(sys.argv[2]),), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
registration = gpufs.register(tensor, sys.argv[1])
print(hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest(), flush=True)
sys.stdin.read()
"""


def test_a_live_tensor_is_a_file(gpu: GpufsMount) -> None:
    """The file of a registered tensor has the tensor's bytes."""
    file = gpu.device / "live"
    with program(EXPORTER, file, str(200 * MIB + 513)) as exporter:
        digest = answer(exporter)
        assert file.stat().st_size == 200 * MIB + 513
        assert hashlib.sha256(file.read_bytes()).hexdigest() == digest
        with pytest.raises(PermissionError):
            os.truncate(file, 0)


def test_expandable_segments(gpu: GpufsMount) -> None:
    """A tensor in hundreds of allocations, as torch makes them with this setting."""
    text = """
        import hashlib, sys
        import gpufs, torch

        before = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")  # so that it begins inside a segment
        tensor = torch.randint(0, 256, (6 << 30,), dtype=torch.uint8, device="cuda")
        with gpufs.register(tensor, sys.argv[1]):
            print(hashlib.sha256(tensor.cpu().numpy()).hexdigest(), flush=True)
            sys.stdin.readline()
            print(int(tensor[-1]), flush=True)
            sys.stdin.readline()
    """
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    try:
        with program(text, gpu.device / "live") as process:
            expected = answer(process)
            assert run("sha256sum", gpu.device / "live").stdout.split()[0] == expected
            with open(gpu.device / "live", "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\x2a")
            assert answer(process, "written") == "42"
    finally:
        del os.environ["PYTORCH_CUDA_ALLOC_CONF"]


def test_an_exporter_killed_during_a_copy(gpu: GpufsMount, tmp_path: Path) -> None:
    """Readers get the right bytes or an error, never others, and nothing stays behind."""
    file = gpu.device / "dying"
    size = 64 * MIB
    before = memory_held(gpu)
    for round_ in range(8):  # of some 5 s each, most of it the start of torch
        with program(EXPORTER, file, str(size)) as exporter:
            digest = answer(exporter)
            target = tmp_path / "copy"
            with subprocess.Popen(["cp", file, target], stderr=subprocess.PIPE) as copy:
                time.sleep(0.005 * round_)
                exporter.send_signal(signal.SIGKILL)
                exporter.wait()
                copy.communicate(timeout=60)
            if copy.returncode == 0:
                assert hashlib.sha256(target.read_bytes()).hexdigest() == digest
        deadline = time.monotonic() + 10
        while file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not file.exists()
    assert memory_held(gpu) <= before + MIB


def model(device: str = "cuda", width: int = 1024) -> Any:
    torch.manual_seed(5)
    layers = [torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 64)]
    return torch.nn.Sequential(*layers).to(device).eval()


def test_a_model_built_in_a_pool_is_published_without_a_copy(gpu: GpufsMount) -> None:
    """Another process attaches it and computes the same, and the device has one copy."""
    file = gpu.device / "model.safetensors"
    before = memory_held(gpu)
    with torch.device("meta"):
        plan = model("meta")
    pool = gpufs.torch.pool(file, like=plan)
    taken = memory_held(gpu) - before
    assert 4 * MIB <= taken < 80 * MIB
    with pool:
        built = model()
    assert 4 * MIB <= pool.used <= taken
    assert not list(gpu.device.iterdir())
    assert gpufs.torch.publish(built, file).in_place
    assert memory_held(gpu) - before == taken
    question = torch.linspace(-1, 1, 1024, device="cuda").repeat(4, 1)
    with torch.no_grad():
        expected = built(question)
    text = """
        import gpufs.torch, sys, torch
        with torch.device("meta"):
            first, last = torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 64)
            model = torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.BatchNorm1d(1024), last).eval()
        gpufs.torch.attach_module(model, sys.argv[1])
        question = torch.linspace(-1, 1, 1024, device="cuda").repeat(4, 1)
        with torch.no_grad():
            print(float(model(question).double().sum()), flush=True)
        sys.stdin.read()
    """
    with program(text, file) as process:
        found = float(answer(process))
        assert memory_held(gpu) - before == taken
        (lease,) = [one for one in json_of("leases", gpu.path) if one["pid"] == process.pid]
        assert lease["path"].endswith("model.safetensors")
    assert found == float(expected.double().sum())
    safetensors = pytest.importorskip("safetensors.torch")
    plain = safetensors.load_file(str(file))
    for name, value in built.state_dict().items():
        assert torch.equal(plain[name], value.cpu())
    with gpufs.torch.safe_open(file, "pt", device="cuda") as opened:
        assert set(opened.keys()) == set(built.state_dict())
        tensors = opened.get_tensors()
    assert not [name for name, tensor in tensors.items() if tensor.nbytes >= 256 and tensor.data_ptr() % 256]


def test_tensors_outlive_their_pool(gpu: GpufsMount) -> None:
    before = memory_held(gpu)
    with gpufs.torch.pool(gpu.device / "f", 32 * MIB):
        kept = torch.full((4 * MIB,), 7, dtype=torch.uint8, device="cuda")
        gone = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
        del gone
    assert int(kept.sum()) == 7 * 4 * MIB
    assert memory_held(gpu) > before
    other = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")  # not in the pool
    assert int(kept.sum()) == 7 * 4 * MIB
    del kept, other
    gpufs.torch.pool(gpu.device / "g", 2 * MIB)
    gpufs.torch.pool(gpu.device / "g", 2 * MIB)
    assert memory_held(gpu) - before <= 8 * MIB


def test_pools_can_be_nested(gpu: GpufsMount) -> None:
    outer, inner = (gpufs.torch.pool(gpu.device / name, 32 * MIB) for name in ("outer", "inner"))
    with outer:
        with inner:
            first = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
        assert (outer.used, inner.used >= 4 * MIB) == (0, True)
        second = torch.ones(4 * MIB, dtype=torch.uint8, device="cuda")
    assert outer.used >= 4 * MIB
    assert int(first.sum()) + int(second.sum()) == 4 * MIB


def test_programs_end_while_memory_is_in_use(gpu: GpufsMount) -> None:
    """By a finalizer and an exit handler that runs last, and with a pool."""
    file = gpu.device / "f"
    gpufs.torch.publish({"a": torch.ones(8 * MIB, dtype=torch.uint8)}, file)
    text = """
        import atexit, sys
        atexit.register(lambda: print(int(tensor.sum()), flush=True))
        import gpufs.torch, torch
        tensor = gpufs.torch.load_file(sys.argv[1])["a"]
        pool = gpufs.torch.pool(sys.argv[1] + ".new", "32M")
        with pool:
            kept = torch.full((4 << 20,), 7, dtype=torch.uint8, device="cuda")
        class Reader:
            def __del__(self, tensor=tensor):
                print(int(tensor.sum()), flush=True)
        reader = Reader()
    """
    done = run(sys.executable, "-c", textwrap.dedent(text), file)
    assert done.stdout.split() == [str(8 * MIB)] * 2


def test_a_full_pool(gpu: GpufsMount) -> None:
    pool = gpufs.torch.pool(gpu.device / "small", 64 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as failure, pool:
        torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    assert "small" in "".join(failure.value.__notes__)
    with pool:
        assert int(torch.ones(MIB, dtype=torch.uint8, device="cuda").sum()) == MIB
    with pytest.raises(OSError, match="needed") as missing:
        gpufs.torch.pool(gpu.device / "large", 1 << 45)
    assert missing.value.errno == 28
    assert not list(gpu.device.iterdir())


def test_pools_do_not_grow(gpu: GpufsMount) -> None:
    """Load and free, many times: in a pool, and by publishing and loading."""
    file = gpu.device / "again.safetensors"
    before = 0
    for cycle in range(300):
        with gpufs.torch.pool(file, 4 * MIB):
            tensors = {"a": torch.full((MIB,), cycle % 100, dtype=torch.uint8, device="cuda")}
        gpufs.torch.publish(tensors, file)
        del tensors
        for _ in range(4):
            found = gpufs.torch.load_file(file)
            assert int(found["a"][-1]) == cycle % 100
            del found
        if cycle == 20:
            before = memory_held(gpu)
    assert memory_held(gpu) <= before + 16 * MIB


def test_copy_on_write(gpu: GpufsMount) -> None:
    """What a program writes with mode "c" stays in its own copy."""
    path = gpu.device / "file"
    path.write_bytes(bytes(8 * MIB))
    first, second = (torch.from_dlpack(gpufs.attach(path, "c")) for _ in range(2))
    first.fill_(7)
    torch.cuda.synchronize()
    assert int(first.sum(dtype=torch.int64)) == 7 * 8 * MIB
    assert int(second.sum(dtype=torch.int64)) == 0
    assert path.read_bytes() == bytes(8 * MIB)


UNCHANGED_PROGRAM = """
import json, sys, time, torch, transformers
torch.zeros(1, device="cuda")
before = torch.cuda.mem_get_info()[0]
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map="cuda:0")
time.sleep(3)  # the daemon keeps the memory through which it moved the file's contents, for a moment
taken = before - torch.cuda.mem_get_info()[0]
tokens = model.generate(torch.arange(8, device="cuda")[None], max_new_tokens=8, do_sample=False)
print(json.dumps([taken, tokens.tolist(), json.loads(model.config.to_json_string())["num_hidden_layers"]]))
"""


def test_transformers_takes_no_memory(gpu: GpufsMount, tmp_path: Path) -> None:
    """`gpufs run` of an unchanged program: no memory for the weights, and the same tokens."""
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 8000}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=8, num_key_value_heads=4, head_dim=128)
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    subprocess.run([*GPUFS, "cp", "-r", tmp_path / "model", gpu.device], check=True)
    answers = []
    for words in ([sys.executable], [*GPUFS, "run", sys.executable]):
        done = subprocess.run(
            [*words, "-c", UNCHANGED_PROGRAM, gpu.device / "model"], capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    plain, in_place = answers
    assert plain[1:] == in_place[1:]
    assert plain[0] > 200 * MIB
    assert in_place[0] < 32 * MIB


# A model server's loader: the plug-ins for vLLM and SGLang do all this, and here a model of torch alone stands in for
# theirs, since neither server runs where these tests do.
SERVER = """
    import contextlib, logging, sys, time
    from pathlib import Path
    from types import SimpleNamespace

    import torch
    from gpufs.integrations._shared_weights import SharedWeights, fill
    from gpufs.integrations._sharing import ModelServer, get_model

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4096, 4096) for _ in range(8))
            self.register_buffer("scale", torch.tensor([2.0]), persistent=False)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh() * self.scale
            return x

    def load():
        torch.manual_seed(3)
        return Model().cuda()

    def build(weights):
        with torch.device("meta"):
            model = Model()
        model.scale = torch.empty(1, device="cuda")
        fill(model, weights)
        return model

    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    torch.zeros(1, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    engine = ModelServer(
        logging.getLogger("server"), load, build, contextlib.nullcontext, lambda model: None, lambda model: {},
        lambda model: None, SimpleNamespace(world_size=1, rank_in_group=0),
    )
    loaded = get_model(engine, SharedWeights(Path(sys.argv[1]), "server", "model", {"seed": 3}))
    torch.cuda.synchronize()
    taken = free - torch.cuda.mem_get_info()[0]
    with torch.no_grad():
        answer = float(loaded.model(torch.ones(4, 4096, device="cuda")).double().sum())
    print(loaded.preloaded_bytes, taken, answer, flush=True)
    sys.stdin.readline()
"""


def test_servers_share_processed_weights(gpu: GpufsMount) -> None:
    """The first one publishes what it has loaded and uses the file itself; the next ones map it: one copy for all."""
    weights = 8 * (4096 * 4096 + 4096) * 4
    with program(SERVER, gpu.device) as first:
        nothing, published, expected = answer(first).split()
        (file,) = (gpu.device / "server").iterdir()
        assert int(nothing) == 0
        assert weights <= int(published) <= weights + 64 * MIB
        with ExitStack() as running:
            for _ in range(2):  # one after the other: each measures the free memory of the whole GPU
                preloaded, taken, found = answer(running.enter_context(program(SERVER, gpu.device))).split()
                assert int(preloaded) == file.stat().st_size >= weights
                assert int(taken) <= 32 * MIB
                assert found == expected
