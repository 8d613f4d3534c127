"""The directions in which parts depend on each other, and that importing gpufs starts nothing.

Which parts of the Python package use which is in pyproject.toml (tool.importlinter), and scripts/lint checks it.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpufs
from gpufs import engine

ROOT = Path(__file__).resolve().parents[2]

# A part may use those before it.
NATIVE_ORDER = ["base", "observe", "journal", "drivers", "device", "memory", "io", "async", "fuse", "abi"]

# Packages that give names to what lies elsewhere.
PUBLIC_NAMES = {"gpufs", "gpufs.client"}

COMPILED = {"gpufs.engine._native"}


def native_sources(folder: str = "native/src") -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in (".h", ".cc"))


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE)


def test_native_parts_depend_in_one_direction() -> None:
    """They follow NATIVE_ORDER; only abi, fuse and io know gpufs.h."""
    bad = []
    for path in native_sources():
        inside = path.relative_to(ROOT / "native/src")
        part = inside.parts[0]
        assert part in NATIVE_ORDER, f"{inside}: an unknown part"
        for name in includes(path):
            used = name.split("/")[0]
            if name == "gpufs.h":
                if part not in ("abi", "fuse", "io"):
                    bad.append(f"{inside} includes {name}")
            elif used in NATIVE_ORDER and NATIVE_ORDER.index(used) > NATIVE_ORDER.index(part):
                bad.append(f"{inside} includes {name}")
    assert not bad


def test_each_lock_has_its_order_where_it_is_declared() -> None:
    """The table of docs/design/requests.md, and no other lock claims a place in it."""
    rows = re.findall(r"^\| (\d) \| (.+?) \|", (ROOT / "docs/design/requests.md").read_text(), re.MULTILINE)
    named = {name: order for order, names in rows for name in re.findall(r"`([\w:]+)`", names)}
    declared = {}
    # What opens a class, and a lock with the comment above it or behind it.
    pattern = re.compile(
        r"^( *)(?:class|struct) (\w+)[^;\n]*\{$|"
        r"((?:^ *//.*\n)*)^( *)(?:mutable )?std::(?:shared_)?mutex\s+(\w+);(.*)$",
        re.MULTILINE,
    )
    for path in native_sources():
        around: dict[int, str] = {}  # by indentation
        for margin, opened, above, depth, lock, behind in pattern.findall(path.read_text()):
            if opened:
                around[len(margin)] = opened
            elif order := re.search(r"[oO]rder (\d) of docs/design/requests.md#locks", above + behind):
                declared[f"{around[max(each for each in around if each < len(depth))]}::{lock}"] = order[1]
    assert declared == {"::".join(name.split("::")[-2:]): order for name, order in named.items()}


def test_drivers_do_not_know_each_other() -> None:
    """They share what lies in drivers/gpu, which knows none of them."""
    bad = []
    for path in native_sources():
        inside = path.relative_to(ROOT / "native/src")
        if inside.parts[0] != "drivers" or len(inside.parts) < 3:
            continue
        for name in re.findall(r'^\s*#\s*include\s+"drivers/(\w+)/', path.read_text(), re.MULTILINE):
            if name not in (inside.parts[1], "gpu"):
                bad.append(f"{inside} includes drivers/{name}/")
    assert not bad


def test_the_keeper_uses_nothing_of_the_engine() -> None:
    """It must not die of what the daemon dies of. Headers of base alone have no other part behind them."""
    sources = native_sources("native/keeper")
    assert sources
    assert not [name for path in sources for name in includes(path) if not name.startswith("base/")]


def test_headers_say_what_they_are() -> None:
    """Each header opens with what it is for."""
    headers = [path for path in native_sources() if path.suffix == ".h"]
    assert not [str(path.relative_to(ROOT)) for path in headers if not path.read_text().startswith("// ")]


def imported_modules(path: Path, package: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - (node.level - 1)]
                base = ".".join([*parents, *filter(None, [node.module])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "gpufs"}


def test_no_module_uses_itself_in_a_circle() -> None:
    """Not even through imports within functions, or for types alone. Packages that only give names do not count."""
    modules = {}
    for path in sorted((ROOT / "gpufs").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = (path, ".".join(parts[:-1]))
    uses = {
        name: {used if used in modules else used.rpartition(".")[0] for used in imported_modules(*where) - COMPILED}
        - {name}
        for name, where in modules.items()
        if name not in PUBLIC_NAMES
    }
    while free := [name for name, used in uses.items() if not used & uses.keys()]:
        for name in free:
            del uses[name]
    assert not uses


def in_fresh_python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    return done.stdout


@pytest.mark.parametrize("module", ["gpufs", "gpufs.engine", "gpufs.config", "gpufs.cli"])
def test_importing_starts_nothing(module: str) -> None:
    """No thread, no socket, no driver: only the process's own three descriptors, and no vendor library mapped."""
    text = in_fresh_python(
        f"""
import os, sys
def opened():
    links = ("/proc/self/fd/" + name for name in os.listdir("/proc/self/fd"))
    return {{os.readlink(link) for link in links if os.path.lexists(link)}}
before = opened()
import {module}
print(len(os.listdir("/proc/self/task")))
print(sorted(path for path in opened() - before if not path.startswith("/proc/")))
print([line for line in open("/proc/self/maps") if "libcuda" in line or "libamdhip" in line or "cufile" in line])
"""
    )
    assert text.splitlines() == ["1", "[]", "[]"]


def test_a_copy_loads_only_what_it_needs() -> None:
    """Importing one of these takes longer than copying a small file."""
    others = {"concurrent.futures", "gpufs.engine", "hashlib", "json", "logging", "obstore", "subprocess", "tempfile"}
    text = in_fresh_python(f"import sys, gpufs.cli._cp_run; print(sorted({others} & sys.modules.keys()))")
    assert text == "[]\n"


def test_one_version() -> None:
    assert engine.engine_version() == gpufs.__version__
