"""gpufs run, GPUFS_IN_PLACE and use_in_place(): programs built on safetensors use files in place, unchanged."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.cli import fails
from support.mounting import GPUFS, REPOSITORY
from support.processes import PATIENCE
from support.stores import Model, web_server

import gpufs.torch

# Programs know nothing of gpufs. They print what they found as JSON.
WHERE = """
    import json, sys
    def kinds(tensors):
        "How many of the tensors lie in a file's memory, and how many elsewhere."
        mapped = [line.split(None, 5) for line in open("/proc/self/maps")]
        buffers = [[int(x, 16) for x in line[0].split("-")] for line in mapped if "gpufs-buffer" in line[-1]]
        inside = [any(start <= tensor.data_ptr() < end for start, end in buffers) for tensor in tensors]
        return [sum(inside), len(inside) - sum(inside)]
"""


def in_program(script: str, *arguments: object, run: bool = True, mode: str = "r", quiet: bool = False) -> Any:
    """Runs a Python program, by `gpufs run` or not, and returns what it has printed as JSON.

    quiet: it must print no warning.
    """
    text = textwrap.dedent(WHERE) + textwrap.dedent(script)
    command = [*(GPUFS if run else ()), *(("run", "--mode", mode) if run else ()), sys.executable, "-c", text]
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=10 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not quiet or done.stderr == ""
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def weights(root: Path) -> Path:
    path = root / "weights.safetensors"
    safetensors.torch.save_file({"a": torch.arange(4000.0), "b": torch.ones(30, 20).half()}, path)
    return path


def file_with_a_hole(root: Path) -> Path:
    """A file of one tensor, all of whose bytes are a hole."""
    path = root / "sparse.safetensors"
    header = json.dumps({"a": {"dtype": "U8", "shape": [8 << 20], "data_offsets": [0, 8 << 20]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + (8 << 20))
    return path


@pytest.mark.timeout(900)
def test_models_of_transformers(
    root: Path, tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A language model of several files, and one with buffers, by a program that does all that is asked of them here.

    It computes the same in place. Functions that save all tensors, but those of a storage that they have saved already,
    save all. A forward in training mode changes the statistics of BatchNorm in the program alone. last_report() knows
    what is in place, what was copied and why.
    """
    import transformers

    torch.manual_seed(0)
    language = small("qwen3", tie_word_embeddings=True)
    language.save_pretrained(tmp_path / "language", max_shard_size="100KB")
    sizes: Any = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    images: Any = transformers.ResNetModel(transformers.ResNetConfig(**sizes))
    images.save_pretrained(tmp_path / "images")
    subprocess.run([*GPUFS, "cp", "-r", tmp_path / "language", tmp_path / "images", root], check=True, timeout=PATIENCE)
    sparse = file_with_a_hole(root)
    script = """
        import pickle
        import huggingface_hub, safetensors, safetensors.torch, torch, transformers
        import gpufs.torch
        root, saved, weights, sparse = sys.argv[1:]
        def report():
            one = gpufs.torch.last_report()
            amounts = {} if one is None else {"in place": one.in_place, **one.copied}
            return {name: [amount.tensors, amount.nbytes] for name, amount in amounts.items()}
        answer, reports = {}, [report()]

        for dtype in ("auto", torch.bfloat16):
            model = transformers.AutoModelForCausalLM.from_pretrained(root + "/language", dtype=dtype)
            tokens = model.generate(torch.arange(6)[None], max_new_tokens=5, do_sample=False)
            answer[str(dtype)] = [kinds(model.parameters()), tokens.tolist()]

        model = transformers.AutoModel.from_pretrained(root + "/language")
        safetensors.torch.save_model(model, saved)
        with safetensors.safe_open(saved, "numpy") as file:
            count = len(file.keys())
        shards = huggingface_hub.split_torch_state_dict_into_shards(model.state_dict(), max_shard_size="50KB")
        names = [name for names in shards.filename_to_tensors.values() for name in names]
        answer["saved"] = [count, len(names), len(shards.filename_to_tensors), len(pickle.dumps(model.norm))]

        report()  # it ends with what was loaded up to now
        model = transformers.AutoModel.from_pretrained(root + "/images")
        reports.append(report())
        own = transformers.AutoModel.from_config(model.config)
        own.load_state_dict(safetensors.torch.load_file(root + "/images/model.safetensors"), assign=True)
        answer["trained"], answer["places"] = [], []
        for one in (model, own):
            answer["places"].append([kinds(one.parameters()), kinds(one.buffers())])
            result = one.train()(torch.ones(2, 3, 32, 32)).pooler_output.sum().item()
            answer["trained"].append([result, [buffer.double().sum().item() for buffer in one.buffers()]])

        report()
        transformers.AutoModel.from_pretrained(root + "/images", dtype=torch.bfloat16)
        reports.append(report())
        tensors = safetensors.torch.load_file(weights)
        reports.append(report())
        del tensors["a"]
        half = gpufs.torch.load_file(weights, "meta")
        reports.append(report())
        safetensors.torch.load_file(sparse)
        reports.append(report())
        print(json.dumps([answer, reports]))
    """
    before = (root / "images/model.safetensors").read_bytes()
    found, reports = in_program(script, root, tmp_path / "in-place.safetensors", weights, sparse)
    # Here, as a program on its own would have to load torch and transformers again.
    monkeypatch.setattr(sys, "argv", ["", *map(str, (root, tmp_path / "plain.safetensors", weights, sparse))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(textwrap.dedent(WHERE) + textwrap.dedent(script), {})
    plain, _ = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (root / "images/model.safetensors").read_bytes() == before

    count = len(list(language.parameters()))
    assert [found[dtype][1] for dtype in ("auto", "torch.bfloat16")] == [
        plain[dtype][1] for dtype in ("auto", "torch.bfloat16")
    ]
    assert plain["auto"][0] == [0, count]
    assert found["auto"][0] == [count, 0]
    assert found["torch.bfloat16"][0] == [0, count]  # another dtype needs a copy

    assert found["saved"][:2] == plain["saved"][:2]
    assert found["saved"][2] > 3
    assert found["saved"][3] < 4000

    assert found["trained"] == plain["trained"]
    for parameters, buffers in found["places"]:
        assert parameters[1] == buffers[0] == 0

    nothing, same, bfloat16, whole, moved, holes = reports
    weighed, others = list(images.parameters()), list(images.buffers())
    assert nothing == {}
    assert same["in place"] == [len(weighed), sum(one.nbytes for one in weighed)]
    assert same["buffer"][0] == len(others)
    assert sum(amount[0] for amount in same.values()) == len(weighed) + len(others)
    assert bfloat16["in place"][0] == 0
    assert bfloat16["dtype"][0] >= len(weighed)
    assert whole == {"in place": [2, 17200]}
    assert moved == {"in place": [0, 0], "device": [2, 17200]}
    assert holes == {"in place": [0, 0], "not mapped": [0, sparse.stat().st_size]}


def test_functions_of_safetensors(root: Path, weights: Path, tmp_path: Path) -> None:
    """Each function that opens a file; also by a link, and in a process that the program starts. Others as before.

    A file with holes is read as before; a damaged one gives the error of safetensors.
    """
    sparse = file_with_a_hole(root)
    damaged = root / "damaged.safetensors"
    damaged.write_bytes(weights.read_bytes()[:-1])
    link = tmp_path / "link.safetensors"
    link.symlink_to(weights)
    plain = tmp_path / "plain.safetensors"
    plain.write_bytes(weights.read_bytes())
    found = in_program(
        """
        assert "torch" not in sys.modules and "gpufs.torch" not in sys.modules
        import multiprocessing, subprocess
        import safetensors, safetensors.torch, torch
        link, plain, sparse, damaged = sys.argv[1:]
        load = safetensors.torch.load_file
        with safetensors.safe_open(link, framework="pt", device="cpu") as file:
            opened = [file.get_tensor("a"), file.get_slice("b")[3:5]]
            assert file.metadata() is None and sorted(file.keys()) == ["a", "b"]
            for get in (file.get_tensor, file.get_slice):
                try:
                    get("c")
                except safetensors.SafetensorError:
                    pass
                else:
                    raise AssertionError("a tensor that is not there was returned")
        module = torch.nn.Module()
        module.a, module.b = torch.nn.Parameter(torch.empty(4000)), torch.nn.Parameter(torch.empty(30, 20).half())
        assert safetensors.torch.load_model(module, link) == (set(), [])
        assert torch.equal(module.a, load(plain)["a"]) and torch.equal(module.b, load(plain)["b"])
        with safetensors.safe_open(link, framework="numpy") as file:
            assert file.get_tensor("a")[7] == 7
        child = [sys.executable, "-c", "import safetensors; print(hasattr(safetensors.safe_open, 'of_gpufs'))"]
        children = subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip()
        try:
            load(damaged)
        except safetensors.SafetensorError:
            pass
        else:
            raise AssertionError("a damaged file was loaded")
        holes = load(sparse)
        print(json.dumps([
            kinds(opened), kinds(load(link).values()), kinds(load(plain).values()), children,
            kinds(holes.values()), int(holes["a"].sum()),
        ]))
        """,
        link,
        plain,
        sparse,
        damaged,
    )
    assert found == [[2, 0], [2, 0], [0, 2], "True", [0, 1], 0]


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_modes(root: Path, weights: Path, mode: str) -> None:
    """r+ changes the file, c does not. In each mode a program may change its model's buffers, and no file sees it.

    What r does: see the models above, and the writes to read-only tensors below.
    """
    norm = root / "norm.safetensors"
    safetensors.torch.save_file(torch.nn.BatchNorm1d(64).state_dict(), norm)
    script = """
        import safetensors.torch, torch
        safetensors.torch.load_file(sys.argv[1])["a"][0] = 42
        unchanged = float(safetensors.torch.load_file(sys.argv[1])["a"][1])
        module = torch.nn.BatchNorm1d(64)
        module.load_state_dict(safetensors.torch.load_file(sys.argv[2]), assign=True)
        places = [kinds(module.parameters()), kinds(module.buffers())]
        module.train()(torch.arange(128.0).view(2, 64))
        print(json.dumps([unchanged, places, module.running_mean.sum().item()]))
    """
    before = norm.read_bytes()
    unchanged, (parameters, buffers), mean = in_program(script, weights, norm, mode=mode)
    assert unchanged == 1
    assert safetensors.torch.load_file(weights)["a"][0] == (42 if mode == "r+" else 0)
    assert parameters == [2, 0]
    assert mode == "c" or buffers == [0, 3]
    assert mean > 0
    assert norm.read_bytes() == before


def test_a_mount_of_a_program_in_place(tmp_path: Path) -> None:
    """The variable that `gpufs run` sets is not reported as an unknown setting of a mount."""
    script = """
        import warnings
        warnings.simplefilter("error")
        import gpufs
        with gpufs.mount(sys.argv[1], driver="host", devices=1, memory="16M"):
            print("1")
    """
    in_program(script, tmp_path)


def test_a_program_prints_what_was_copied(weights: Path) -> None:
    """`gpufs run --report` prints a table when the loading is over, or at the end. Else a warning says if most is."""
    script = "import sys, time, torch\nfrom safetensors.torch import load_file\n"
    runs = {
        "runs on": ("weights = load_file(sys.argv[1]); time.sleep(60)", ["--report"]),
        "copies": ("weights = load_file(sys.argv[1], 'meta')", ["--report"]),
        "copies, and nobody asked": ("weights = load_file(sys.argv[1], 'meta')", []),
    }
    for what, (text, words) in runs.items():
        command = [*GPUFS, "run", *words, sys.executable, "-c", script + text, str(weights)]
        if what == "runs on":
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
                assert process.stderr is not None
                lines = [process.stderr.readline() for _ in range(3)]
                process.kill()
        else:
            lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
        if words:
            assert str(weights) in lines[1]
            assert ("2 tensors" in lines[2]) == (what == "runs on")
        else:
            assert len(lines) == 1


WRITES = {
    "in place": 'load_file(sys.argv[1])["a"].add_(1)',
    "in a thread": 'threading.Thread(target=load_file(sys.argv[1])["a"].zero_).start(); time.sleep(60)',
    "a small file": "torch.from_dlpack(gpufs.attach_many([sys.argv[1]])[0]).zero_()",
    "training": """
module = torch.nn.Linear(4000, 1, bias=False)
module.load_state_dict({"weight": load_file(sys.argv[1])["a"].view(1, 4000)}, assign=True)
module(torch.ones(2, 4000)).sum().backward()
with torch.no_grad():
    module.weight -= 0.1 * module.weight.grad
""",
}


@pytest.mark.parametrize(
    "what",
    ["in a thread", *(pytest.param(one, marks=pytest.mark.slow) for one in WRITES if one != "in a thread")],
)
def test_a_write_to_read_only_tensors_explains_itself(weights: Path, what: str) -> None:
    """One line names the file. The program ends as it would otherwise, and faulthandler shows where."""
    program = f"import sys, threading, time, gpufs, torch\nfrom safetensors.torch import load_file\n{WRITES[what]}"
    words = ("-X", "faulthandler") if what in ("in place", "in a thread") else ()
    command = [*GPUFS, "run", sys.executable, *words, "-c", program, str(weights)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10 * PATIENCE, check=False)
    assert done.returncode == -signal.SIGSEGV
    lines = [line for line in done.stderr.splitlines() if line.startswith("gpufs: ")]
    assert len(lines) == 1
    assert what == "a small file" or str(weights) in lines[0]
    assert ("Segmentation fault" in done.stderr) == bool(words)


@pytest.mark.slow
def test_other_faults_are_as_ever(weights: Path) -> None:
    """A handler of the program's own, signals that others send, and faults elsewhere."""
    load = "import ctypes, faulthandler, os, signal, sys, safetensors.torch\n"
    load += "tensors = safetensors.torch.load_file(sys.argv[1])\n"
    faults = {"ctypes.string_at(0)": ("-X", "faulthandler"), "os.kill(os.getpid(), signal.SIGSEGV)": ()}
    for fault, words in faults.items():
        command = [*GPUFS, "run", sys.executable, *words, "-c", load + fault, str(weights)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10 * PATIENCE, check=False)
        assert done.returncode == -signal.SIGSEGV
        assert "gpufs: " not in done.stderr
        assert ("Segmentation fault" in done.stderr) == bool(words)
    handled = "signal.signal(signal.SIGSEGV, lambda *_: os._exit(7))\n" + load + "signal.raise_signal(signal.SIGSEGV)"
    command = [*GPUFS, "run", sys.executable, "-c", f"import os, signal\n{handled}", str(weights)]
    assert subprocess.run(command, timeout=10 * PATIENCE, check=False).returncode == 7


def test_safe_open_is_a_class(weights: Path, tmp_path: Path) -> None:
    """What programs do with the original they do with what takes its place; finders that Python skips are skipped."""
    plain = tmp_path / "plain.safetensors"
    plain.write_bytes(weights.read_bytes())
    found = in_program(
        """
        import inspect, pickle, types, typing

        class Without:
            find_module = staticmethod(lambda *_: None)

        class Asked:
            names = []
            def find_spec(self, name, path, target=None):
                self.names.append(name)

        sys.meta_path[:0] = [Without(), Asked()]
        sys.meta_path.append(Without())
        sys.meta_path.insert(4, Without())
        import safetensors.torch
        from safetensors import safe_open

        def annotated(file: safe_open | None, several: list[safe_open]) -> typing.Optional[safe_open]: ...

        assert typing.get_type_hints(annotated)["file"] == safe_open | None
        assert pickle.loads(pickle.dumps(safe_open)) is safe_open is safetensors.torch.safe_open
        assert [*inspect.signature(safe_open).parameters][:3] == ["filename", "framework", "device"]
        assert isinstance(safe_open, type) and not isinstance(None, safe_open)
        for path in sys.argv[1:]:
            with safe_open(path, "pt") as file:
                assert isinstance(file, safe_open) and issubclass(type(file), safe_open)
                assert safe_open.get_tensor(file, "a")[7] == 7 and hasattr(safe_open, "get_slice")
        for wrong in (lambda: safe_open(path), lambda: types.new_class("Own", (safe_open,))):
            try:
                wrong()
            except TypeError:
                pass
            else:
                raise AssertionError("no TypeError")
        print(json.dumps(Asked.names.count("safetensors")))
        """,
        weights,
        plain,
        quiet=True,
    )
    assert found == 1


def test_a_library_without_the_name_is_imported(tmp_path: Path) -> None:
    """Also where gpufs itself is removed in part: a start of Python says so in one line, and goes on."""
    (tmp_path / "safetensors.py").write_text("deserialize = 1")
    start = (REPOSITORY / "gpufs" / "gpufs_in_place.pth").read_text()
    for words in (("-c", "import safetensors; print(1)"), ("-I", "-S", "-c", f"{start}\nprint(1)")):
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "GPUFS_IN_PLACE": "r"},
            timeout=PATIENCE,
            check=False,
        )
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (0, "1\n", 1), done


def test_in_a_running_program(weights: Path) -> None:
    """use_in_place() reaches modules that have imported the function already."""
    found = in_program(
        """
        from safetensors import safe_open
        from safetensors.torch import load_file
        import gpufs.torch
        before = kinds(load_file(sys.argv[1]).values())
        gpufs.torch.use_in_place()
        opened = safe_open(sys.argv[1], "pt").get_tensor("b")
        print(json.dumps([before, kinds(load_file(sys.argv[1]).values()), kinds([opened])]))
        """,
        weights,
        run=False,
        quiet=True,
    )
    assert found == [[0, 2], [2, 0], [1, 0]]


def test_a_loader_that_asks_for_the_cpu(weights: Path) -> None:
    """As ComfyUI's does: all of host memory is in place, until a module is filled with copies."""
    script = """
        import torch, safetensors
        with safetensors.safe_open(sys.argv[1], framework="pt", device=torch.device("cpu").type) as file:
            found = {name: file.get_tensor(name) for name in file.keys()}
        module = torch.nn.Module()
        module.a = torch.nn.Parameter(torch.empty(4000))
        answer = [kinds(found.values())]
        for assign in (False, True):
            module.load_state_dict({"a": found["a"]}, assign=assign)
            answer.append(kinds(module.parameters()))
        print(json.dumps(answer))
    """
    assert in_program(script, weights, quiet=True) == [[2, 0], [0, 1], [1, 0]]


def test_what_a_user_has_mistaken_is_named(weights: Path, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import safetensors, sys; safetensors.safe_open(sys.argv[1], 'pt')")
    assert fails(126, "run", script).endswith(f"not executable, or not in PATH: gpufs run python {script}")
    elsewhere = tmp_path / "weights.safetensors"
    elsewhere.write_bytes(weights.read_bytes())
    for words, environment, line in (
        ([*GPUFS, "run", "--report"], {}, f"gpufs: {elsewhere} is on no mount, and is read as without gpufs"),
        ([], {"GPUFS_IN_PLACE": "1"}, f"{weights} is copied instead of used in place: GPUFS_IN_PLACE is '1'"),
    ):
        command = [*words, sys.executable, str(script), str(elsewhere if words else weights)]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
        assert done.stderr.startswith(line)


def test_a_name_of_the_hub(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gpufs run --hub` loads a model by its name into the mount, once, and it is in place; else a line says so."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    small("qwen3").save_pretrained(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(WHERE) + "import transformers\n"
        "model = transformers.AutoModel.from_pretrained(sys.argv[1])\nprint(kinds(model.parameters()))\n"
    )

    def run(*words: object) -> tuple[int, str]:
        """How many tensors are not in place, and standard error."""
        command = [*GPUFS, "run", *map(str, words), sys.executable, str(script), "org/model"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10 * PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
        inside, outside = json.loads(done.stdout.splitlines()[-1])
        assert inside + outside
        return outside, done.stderr

    with web_server() as server, web_server() as server.redirects_to:
        server.models["org/model"] = Model(files, lfs=tuple(name for name in files if name.endswith(".safetensors")))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        for _ in range(2):
            outside, _ = run("--hub", root / "hub")
            assert outside == 0
        asked = [request.path for request in server.redirects_to.requests]
        assert len(asked) == len(set(asked))
        outside, warning = run()
        assert outside
        assert "--hub" in warning
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        (root / "copied").mkdir()
        subprocess.run([*GPUFS, "cp", "-a", tmp_path / "home/hub/models--org--model", root / "copied"], check=True)
        assert run("--hub", root / "copied")[0] == 0
    assert "not on a gpufs mount" in fails(1, "run", "--hub", tmp_path / "elsewhere/hub", "true")
    assert not (tmp_path / "elsewhere").exists()


def test_programs_that_cannot_be_run(tmp_path: Path) -> None:
    """Names of no program and Pythons without gpufs are refused; other programs run as they are."""
    assert "no-such-program" in fails(127, "run", "no-such-program")
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    message = fails(1, "run", python, "-c", "pass")
    assert str(python) in message
    assert Path(shlex.split(message)[-1]).exists()  # what its command installs gpufs from
    script = tmp_path / "script"
    script.write_text(f"#!{python}\n")
    script.chmod(0o755)
    assert str(python) in fails(1, "run", script)
    done = subprocess.run(
        [*GPUFS, "run", "sh", "-c", "echo $GPUFS_IN_PLACE -v; exit 3"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (3, "r -v\n")


def small(kind: str, **more: Any) -> Any:
    """A model of transformers with random weights."""
    import transformers  # it takes ten seconds: not in each process that collects tests

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 500}
    sizes |= {"num_attention_heads": 4}
    kinds: Any = {
        "llama": lambda: transformers.LlamaConfig(**sizes, tie_word_embeddings=True),
        "qwen3": lambda: transformers.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=16, **more),
        "bert": lambda: transformers.BertConfig(**sizes),
        "t5": lambda: transformers.T5Config(d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=500),
    }
    models: Any = transformers.AutoModel
    return models.from_config(kinds[kind]()).eval()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "bert", "t5"])
def test_attach_module_takes_the_directory_of_a_model(root: Path, tmp_path: Path, kind: str) -> None:
    """Buffers that are in no file are computed as the model's class does; outputs equal those of from_pretrained."""
    import transformers

    torch.manual_seed(0)
    small(kind).save_pretrained(tmp_path / "model", max_shard_size="100KB")
    subprocess.run([*GPUFS, "cp", "-r", tmp_path / "model", root], check=True, timeout=PATIENCE)
    expected = transformers.AutoModel.from_pretrained(tmp_path / "model").eval()
    with torch.device("meta"):
        model = small(kind)
    gpufs.torch.attach_module(model, root / "model")
    tokens: dict[str, Any] = {"input_ids": torch.arange(12)[None]}
    tokens |= {"decoder_input_ids": torch.arange(3)[None]} if kind == "t5" else {}
    with torch.no_grad():
        assert torch.equal(model(**tokens)[0], expected(**tokens)[0])
    for (name, buffer), other in zip(model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(buffer, other), name
