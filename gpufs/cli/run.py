"""gpufs run: a program whose safetensors files are used in place."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Final

import click
from click.shell_completion import CompletionItem

from gpufs.cli._main import complete_files
from gpufs.cli._output import Failure
from gpufs.modes import IN_PLACE_VARIABLE, MODES, REPORT_VARIABLE

_PYTHON: Final = re.compile(r"(python|pypy)[\d.]*t?$")
_FIRST_LINE_BYTES: Final = 256
_PROBE_SECONDS: Final = 30.0
# Whether the start of a Python process loads gpufs.
_PROBE: Final = "import sys; sys.exit('gpufs.in_place' not in sys.modules)"


def _complete_words(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    items = complete_files(ctx, parameter, incomplete)
    if incomplete and not ctx.params.get("words"):
        places = filter(os.path.isdir, os.get_exec_path())
        items += map(CompletionItem, sorted({name for place in places for name in _programs(place, incomplete)}))
    return items


def _programs(directory: str, beginning: str) -> list[str]:
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries if entry.name.startswith(beginning) and os.access(entry.path, os.X_OK)]


@click.command(
    name="run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default="r",
    show_default=True,
    help="r: tensors are read-only, a program that writes to one ends. r+: changes go into the file. "
    "c: changes stay private to the program.",
)
@click.option("--report", is_flag=True, help="Print what is in place and what was copied, when a model is loaded.")
@click.option(
    "--caches",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Keep what torch, Triton, vLLM, SGLang and others compile below DIR, so that later starts load it.",
)
@click.option(
    "--hub",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Keep what the program loads by its name on the Hugging Face Hub below DIR on a mount, to be used in place.",
)
@click.argument(
    "words",
    metavar="PROGRAM [ARGUMENT]...",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    shell_complete=_complete_words,
)
def command(mode: str, report: bool, caches: str | None, hub: str | None, words: tuple[str, ...]) -> None:
    """Run PROGRAM so that it uses safetensors files of a mount in place, without a copy.

    For Python programs that load weights with safetensors, or with a library that is built on it: transformers,
    diffusers, sentence-transformers, peft, accelerate. The program needs no change. Files that are not on a mount are
    read as before. The Python that runs the program needs gpufs, too.

    \b
      gpufs run python generate.py --model /mnt/gpufs/gpu0/Qwen3-8B
      gpufs run --hub /mnt/gpufs/gpu0/hub python generate.py Qwen/Qwen3-8B
      gpufs run --mode c torchrun train.py
      gpufs run --caches /var/cache/gpufs-jit vllm serve /mnt/gpufs/gpu0/Qwen3-8B

    The same by a variable, for services and containers: GPUFS_IN_PLACE=r.
    """
    program = shutil.which(words[0])
    if program is None:
        if not os.path.isfile(words[0]):
            raise Failure(f"{words[0]}: no such program", 127)
        hint = f": gpufs run python {shlex.quote(words[0])}" if words[0].endswith(".py") else ""
        raise Failure(f"{words[0]}: is not executable, or not in PATH{hint}", 126)
    environment = {**os.environ, IN_PLACE_VARIABLE: mode, **({REPORT_VARIABLE: "1"} if report else {})}
    python = _python_of(program)
    if python is not None and not _has_gpufs(python, environment):
        raise Failure(
            f"{python}, which runs {words[0]}, has no gpufs. Install it there, or in a virtual environment of it: "
            f"{shlex.quote(python)} -m pip install {shlex.quote(_origin())}"
        )
    if caches is not None:
        if not caches:
            raise click.BadParameter("an empty name", param_hint="--caches")
        from gpufs.cli._caches import variables  # imported late: other programs start without it

        # A shell script's programs find their Python as this command does.
        environment |= variables(caches, python or shutil.which("python3"), environment)
    if hub is not None:
        environment["HF_HUB_CACHE"] = _made_on_mount(hub)
    try:
        os.execve(program, list(words), environment)
    except OSError as error:
        raise Failure(f"{program}: {error.strerror}", 126) from None


def _made_on_mount(directory: str) -> str:
    """Return the path of the Hub's cache, which exists then. Failure if it would be on no mount."""
    from gpufs import mounting

    path = Path(directory).resolve()
    try:
        parent = next(each for each in (path, *path.parents) if each.exists())
        mounting.places_of(parent.stat().st_dev, directory)
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"--hub {directory}: {error.strerror} (name a directory such as MOUNTPOINT/gpu0/hub)") from None
    return str(path)


def _origin() -> str:
    """Return what pip installs gpufs from: a wheel, a checkout or a URL, as pip has noted it for this gpufs."""
    from importlib import metadata  # takes longer to load than all else of this command
    from urllib.parse import unquote, urlsplit

    record = json.loads(metadata.distribution("gpufs").read_text("direct_url.json") or "{}")
    url = record.get("url", "gpufs")  # without a note it came from an index
    if url.startswith("file:"):
        return unquote(urlsplit(url).path)
    return f"{record['vcs_info']['vcs']}+{url}" if "vcs_info" in record else url


def _python_of(program: str) -> str | None:
    """Return the Python that runs a program: itself, or the interpreter that a script names; else None."""
    if _PYTHON.fullmatch(Path(program).name):
        return program
    try:
        with open(program, "rb") as file:
            line = os.fsdecode(file.readline(_FIRST_LINE_BYTES))
    except OSError:
        return None  # as a program that may be run but not read
    words = line[2:].split() if line.startswith("#!") else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return None
    return shutil.which(words[0])


def _has_gpufs(python: str, environment: dict[str, str]) -> bool:
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            env={**environment, "PYTHONSAFEPATH": "1"},  # the working directory may be another user's
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return True  # the program itself shows what is wrong
    return done.returncode == 0
