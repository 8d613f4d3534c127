"""--include and --exclude beside rsync, for random trees and patterns: what is chosen, and what --delete leaves."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from support.cli import gpufs_here
from support.processes import run

pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="compares with rsync")

NAMES = ("a", "b", "ab", "logs", "x.bin", ".git", "a b", "[x]", "a*")
PARTS = (
    *NAMES,
    *("*", "?", "**", "***", "a*", "*b", "[ab]", "[!a]", "[^l]*", "*.bin", "[[:alpha:]]*", "\\[x]", "a\\*", "l*s"),
    *("?*", "[]x]", "."),
)


def make_tree(top: Path, random: random.Random, depth: int = 0) -> None:
    top.mkdir()
    for name in random.sample(NAMES, random.randint(1, 4)):
        if depth < 2 and random.random() < 0.5:
            make_tree(top / name, random, depth + 1)
        else:
            (top / name).touch()


def pattern(random: random.Random) -> str:
    text = "/".join(random.choice(PARTS) for _ in range(random.randint(1, 3)))
    start, end = random.choice(["", "", "", "/", "**/"]), random.choice(["", "", "", "/", "/**", "/***"])
    return f"{start}{text}{end}"


def names_below(top: Path) -> list[str]:
    return sorted(f"{path.relative_to(top)}{'/' * path.is_dir()}" for path in top.rglob("*"))


def check(root: Path, host: Path, seed: int) -> None:
    """gpufs --include chooses files in all directories; rsync says so with three rules."""
    rng = random.Random(seed)
    source, ours, theirs = host / f"source{seed}", root / f"copy{seed}", host / f"copy{seed}"
    make_tree(source, rng)
    make_tree(theirs, rng)
    shutil.copytree(theirs, ours)
    excluded = [pattern(rng) for _ in range(rng.randint(0, 2))]
    included = [pattern(rng) for _ in range(rng.choice([0, 0, 1, 2]))]
    rules = [f"--exclude={text}" for text in excluded]
    words = [*rules, *(f"--include={text}" for text in included)]
    if included:
        rules += ["--include=*/", *(f"--include={text}" for text in included), "--exclude=*"]
    delete = ["--delete"] if rng.random() < 0.7 else []
    # rsync without --delete replaces no directory that has files; gpufs then says which.
    done = run("rsync", "-a", *delete, *rules, f"{source}/", f"{theirs}/", check=False)
    gpufs_done = gpufs_here("sync", "-q", *delete, *words, source, ours, check=False)
    shown = (seed, words, delete, done.stderr, gpufs_done.stderr)
    assert names_below(ours) == names_below(theirs), shown
    assert (gpufs_done.returncode == 0) == (done.returncode == 0), shown


@pytest.mark.parametrize("seeds", [range(30)], ids=["some"])
def test_what_is_chosen(root: Path, host: Path, seeds: range) -> None:
    for seed in seeds:
        check(root, host, seed)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_what_is_chosen_of_many(root: Path, host: Path) -> None:
    for seed in range(1000, 1800):
        check(root, host, seed)
        shutil.rmtree(root / f"copy{seed}")
        shutil.rmtree(host / f"copy{seed}")
