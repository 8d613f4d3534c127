"""A campaign of `gpufs sync` beside `rsync -a`: random trees, changes and patterns, and copies that are killed.

Both make the copy of the same tree, and rsync says whether the copies are equal. What they do not agree on has its line
in docs/cp.md, and does not occur here.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import stat
import subprocess
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from support.cli import gpufs_here
from support.data import GRANULE, remove_tree, sha256
from support.hosts import script
from support.mounting import GPUFS
from support.processes import PATIENCE, Snapshot, children_of, run, wait_until

import gpufs
from campaigns.harness import Missing, Place, need

NAMES = ("a", "b", "ab", "logs", "x.bin", ".git", "a b", "[x]", "a*", "-n", "two\nlines", "ünï", "bad\udcff", "l" * 255)
SIZES = (0, 1, 5, 5, 5, 4095, 4096, 65_537, 200_000, 200_000, GRANULE - 1, GRANULE, GRANULE + 1)
MODES = (0o644, 0o644, 0o444, 0o600, 0o755, 0, 0o4755, 0o2711, 0o1777)
OWNERS = (0, 0, 0, 1234, 65534)
SECONDS = (1, 10**9, 1_700_000_000, 1_700_000_001, 5_000_000_000)
SPECIAL = {"fifo": stat.S_IFIFO, "socket": stat.S_IFSOCK, "device": stat.S_IFCHR}
# Of patterns. The longest name is reached by *, and one byte of a character by nothing.
PARTS = (
    *NAMES[:-3],
    *("*", "?", "**", "***", "a*", "*b", "[ab]", "[!a]", "[^l]*", "*.bin", "[[:alpha:]]*", "\\[x]", "a\\*", "l*s"),
    *("?*", "[]x]", "."),
)


class Route(NamedTuple):
    """Where a tree and its copy are; the name of another machine before their paths."""

    source_is_on_mount: bool
    copy_is_on_mount: bool
    source: str = ""
    copy: str = ""


ROUTES = {
    "to a mount": Route(False, True),
    "from a mount": Route(True, False),
    "within a mount": Route(True, True),
    "to a machine": Route(False, True, copy="node:"),
    "from a machine": Route(True, False, source="node:"),
    "between machines": Route(True, True, "first:", "second:"),
}


class Gardener:
    """Makes random trees, and changes them. Some changes keep a file's size and time, so --checksum alone sees them."""

    def __init__(self, seed: int, *, special: bool) -> None:
        self.random = random.Random(seed)
        self._count = 0
        kinds = ["file"] * 12 + ["directory"] * 6 + ["link"] * 3
        self._kinds = [*kinds, *SPECIAL] if special else kinds

    def change(self, top: Path) -> None:
        """Make a tree, or a few changes in one."""
        if not top.exists():
            self._make(top, "directory", 0)
        paths = [top, *sorted(top.rglob("*"))]
        for path in self.random.choices(paths, k=self.random.randint(1, 12)):
            if os.path.lexists(path) and os.path.realpath(path.parent) == str(path.parent):  # not through a link
                self._change(path, top)

    def _change(self, path: Path, top: Path) -> None:
        what = self.random.choice(
            ["attribute", "attribute", "content", "content", "gone", "other", "new", "moved", "linked"]
        )
        status = path.lstat()
        folder = path if stat.S_ISDIR(status.st_mode) else path.parent
        other = folder / self.random.choice(NAMES)
        if what == "attribute":
            self.random.choice([self._set_mode, self._set_owner, self._set_time])(path)
        elif what == "content" and stat.S_ISREG(status.st_mode):
            self._write(path, self.random.choice([status.st_size, self.random.choice(SIZES)]))
            if path.stat().st_size == status.st_size and self.random.random() < 0.2:
                os.utime(path, ns=(status.st_mtime_ns,) * 2)
        elif what == "new" and not os.path.lexists(other):
            self._make(other, self.random.choice(self._kinds), len(other.relative_to(top).parts))
        elif path != top and what in ("gone", "other"):
            _remove(path)
            if what == "other":
                self._make(path, self.random.choice(self._kinds), len(path.relative_to(top).parts))
        elif path != top and what == "moved" and not os.path.lexists(other) and other != path / other.name:
            path.rename(other)
        elif what == "linked" and stat.S_ISREG(status.st_mode) and not os.path.lexists(other):
            os.link(path, other)

    def _make(self, path: Path, kind: str, depth: int) -> None:
        if kind == "file":
            self._write(path, self.random.choice(SIZES))
        elif kind == "link":
            path.symlink_to(self.random.choice([*NAMES, "..", "no/where", "/etc/hostname"]))
        elif kind in SPECIAL:
            os.mknod(path, SPECIAL[kind] | 0o644, os.makedev(1, 3))
        else:
            path.mkdir()
            count = self.random.choice([0, 1, 3, 5]) if depth else 8
            for name in self.random.sample(NAMES, count):
                self._make(path / name, self.random.choice(self._kinds) if depth < 3 else "file", depth + 1)
            if self.random.random() < 0.02:
                deep = path.joinpath(*["deep"] * 40)
                deep.mkdir(parents=True, exist_ok=True)
                self._write(deep / "a", 5)
        for change in (self._set_owner, self._set_mode, self._set_time):
            change(path)

    def _write(self, path: Path, size: int) -> None:
        with open(path, "wb") as file:
            if size > GRANULE:
                file.seek(GRANULE)  # behind a hole
            file.write(self.random.randbytes(size - file.tell()))
        self._set_time(path)

    def _set_owner(self, path: Path) -> None:
        os.chown(path, self.random.choice(OWNERS), self.random.choice(OWNERS), follow_symlinks=False)

    def _set_mode(self, path: Path) -> None:
        if not path.is_symlink():
            path.chmod(self.random.choice(MODES))

    def _set_time(self, path: Path) -> None:
        self._count += 1
        time = self.random.choice(SECONDS) * 10**9 + self.random.choice([0, 500_000_000]) + self._count
        os.utime(path, ns=(time, time), follow_symlinks=False)

    def patterns(self) -> tuple[list[str], list[str]]:
        """Patterns to leave out, and patterns to choose by; mostly none."""
        counts = self.random.choice([(0, 0), (0, 0), (1, 0), (2, 0), (1, 1), (0, 2)])
        excluded, included = ([self._pattern() for _ in range(count)] for count in counts)
        return excluded, included

    def _pattern(self) -> str:
        text = "/".join(self.random.choices(PARTS, k=self.random.choice([1, 1, 1, 2, 2, 3])))
        start, end = self.random.choice(["", "", "", "/", "**/"]), self.random.choice(["", "", "", "/", "/**", "/***"])
        return f"{start}{text}{end}"

    def fill(self, top: Path) -> None:
        """Write many files, new or other than before, so that a copy takes a while."""
        _remove(top)
        for number in range(6):
            (top / str(number)).mkdir(parents=True)
            for name in map(str, range(40)):
                self._write(top / str(number) / name, self.random.choice([0, 5, 5000, 50_000]))
            self._write(top / str(number) / "large", 2 * GRANULE + 5)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove(path: Path) -> None:
    if _is_directory(path):
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def rsync(source: Path, copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `rsync -a`, to which times are equal to the nanosecond."""
    return run("rsync", "-a", "--modify-window=-1", *words, f"{source}/", f"{copy}/", check=False)


@dataclass
class Trees:
    """A tree, its copy by gpufs, and its copy by rsync, through rounds of changes."""

    route: str
    seed: int
    root: Path  # on a mount
    host: Path  # on another file system

    def __post_init__(self) -> None:
        way = ROUTES[self.route]
        self._gardener = Gardener(self.seed, special=not (way.source or way.copy))
        self.random = self._gardener.random
        self.source, self.ours = (
            (self.root if is_on_mount else self.host) / f"{name}{self.seed}"
            for name, is_on_mount in (("source", way.source_is_on_mount), ("copy", way.copy_is_on_mount))
        )
        self.theirs = self.host / f"theirs{self.seed}"
        shell = script(self.host / "rsh", '#!/bin/sh\nshift\nexec "$@"\n')
        remote = ["-e", str(shell), "--remote-gpufs", GPUFS[0]] if way.source or way.copy else []
        self._words = [*remote, f"{way.source}{self.source}", f"{way.copy}{self.ours}"]
        self.is_local = not remote

    def round(self) -> None:
        """Change both sides, and copy by both programs, as an option and patterns say."""
        self._gardener.change(self.source)
        if self.ours.exists() and self.random.random() < 0.5:
            self._gardener.change(self.ours)
            self._adopt()
        excluded, included = self._gardener.patterns()
        in_the_way = self._has_directory_for_file()
        if in_the_way:  # gpufs keeps such a directory if a pattern leaves it out
            excluded, included = [], []
        ours = [f"--exclude={text}" for text in excluded]
        theirs = list(ours)
        if included:  # which chooses files in all directories; rsync needs three rules for that
            theirs += ["--include=*/", *(f"--include={text}" for text in included), "--exclude=*"]
            ours += [f"--include={text}" for text in included]
        options = [option for option, share in (("--delete", 0.7), ("--checksum", 0.1)) if self.random.random() < share]
        if in_the_way and "--delete" not in options:
            options.append("--delete")  # without it gpufs keeps one that is empty, too
        if any(path.lstat().st_nlink > 1 and not _is_directory(path) for path in self.ours.rglob("*")):
            options = [option for option in options if option != "--checksum"]  # the last of its names says what it has
        self.copy([*options, *ours], [*options, *theirs])

    def _has_directory_for_file(self) -> bool:
        found = (
            self.ours / path.relative_to(self.source) for path in self.source.rglob("*") if not _is_directory(path)
        )
        return any(map(_is_directory, found))

    def copy(self, ours: list[str], theirs: list[str]) -> None:
        """Copy by both programs. AssertionError if the copies differ, or one of them alone fails."""
        by_rsync = rsync(self.source, self.theirs, *theirs)
        by_gpufs = gpufs_here("sync", "-q", *ours, *self._words, check=False)
        # Each directory from which both have removed something has a time of its own.
        found = rsync(self.theirs, self.ours, "-nicO", "--delete").stdout
        # It would go on to delete directories in which it has left excluded files.
        if not found and (left := rsync(self.source, self.ours, "-ni", *theirs).stdout):
            found = "" if left == rsync(self.source, self.theirs, "-ni", *theirs).stdout else left
        shown = (self.route, self.seed, ours, by_rsync, by_gpufs)
        assert not found, (found, *shown)
        assert (by_gpufs.returncode == 0) == (by_rsync.returncode == 0), shown

    def _adopt(self) -> None:
        assert rsync(self.ours, self.theirs, "-H", "--delete", "--checksum").returncode == 0

    # ---- copies that end early ----

    def killed(self) -> str:
        """End a copy at a random moment, and check what it leaves. Return what became of it."""
        self._gardener.fill(self.source / "bulk")
        bulk, before = self.ours / "bulk", _digests(self.ours)
        how = self.random.choice(["INT", "TERM", "KILL", "KILL", "cancel" if self.is_local else "peer"])
        if how == "cancel":
            return self._cancelled()
        command = [*GPUFS, "sync", "-q", "--delete", *self._words]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
            # In the middle of the copies. A Python that is about to start shows a traceback after SIGINT.
            if how == "INT" or self.random.random() < 0.8:
                wait_until(lambda: bulk.exists() or child.poll() is not None, PATIENCE, "the copy")
            with suppress(subprocess.TimeoutExpired):
                child.wait(self.random.uniform(0, 0.2))
            victims = children_of(child.pid) if how == "peer" and child.returncode is None else [child.pid]
            peers = set(children_of(child.pid)) if child.returncode is None else set()
            for pid in victims:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if how == "peer" else signal.Signals[f"SIG{how}"])
            _, errors = child.communicate(timeout=PATIENCE)
        assert "Traceback" not in errors, errors
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in peers), PATIENCE, "the end of the peers")
        # Each file is the old one or the new one, and nothing else is there.
        source, after = _digests(self.source), _digests(self.ours)
        for name, digest in after.items():
            assert digest in (before.get(name), source.get(name)), (self.route, self.seed, how, name)
        if child.returncode == 0:
            assert after.keys() == source.keys(), (self.route, self.seed)
            assert all(after[name] == source[name] for name in source if name.startswith("bulk/"))
            return "complete"
        return "untouched" if after == before else f"ended by {how}"

    def _cancelled(self) -> str:
        """The same in this process, which must not keep what the copy has opened."""
        stop = gpufs.Cancellation()
        timer = threading.Timer(self.random.uniform(0, 0.2), stop.cancel)
        timer.start()
        try:
            gpufs.copy_tree(self.source, self.ours, update=True, preserve=True, symlinks=True, cancel=stop)
        except (gpufs.CopyError, ExceptionGroup):
            return "cancelled"
        finally:
            timer.cancel()
            timer.join()
        return "complete"

    def after_kill(self) -> None:
        """The next copy makes up for it, in equal trees."""
        if self.ours.exists():
            self._adopt()
        self.copy(["--delete"], ["--delete"])
        shutil.rmtree(self.source / "bulk")

    def remove(self) -> None:
        for path in (self.source, self.ours, self.theirs):
            _remove(path)


def _digests(top: Path) -> dict[str, str]:
    """The files below a directory."""
    found = {}
    for path in top.rglob("*"):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            found[str(path.relative_to(top))] = sha256(path)
    return found


def play(root: Path, host: Path, seed: int, rounds: int, *, kill: bool = True) -> str:
    """Go through so many rounds with one tree, then kill a copy of it. Return what became of that."""
    trees = Trees(list(ROUTES)[seed % len(ROUTES)], seed, root, host)
    try:
        for _ in range(rounds):
            trees.round()
        if not kill:
            return ""
        outcome = trees.killed()
        trees.after_kill()
        return outcome
    finally:
        trees.remove()


def synced(place: Place) -> str:
    """2,000 trees and changes, 200 kills. This process and the daemon hold afterwards what they held before."""
    need("rsync")
    if os.geteuid() != 0:
        raise Missing("sets owners")
    first, count = (random.SystemRandom().randrange(1 << 30), 12 if place.quick else 200)
    for seed in range(first - 12, first):  # what the first copies load and start stays
        play(place.root, place.host, seed, 1)
    gc.collect()
    before = Snapshot.of(os.getpid())
    outcomes: Counter[str] = Counter()
    failures = 0
    for seed in range(first, first + count):
        try:
            outcomes[play(place.root, place.host, seed, 10)] += 1
        except AssertionError as error:
            failures += 1
            print(f"campaign copies: {error}", flush=True)

    def is_settled() -> bool:
        gc.collect()  # the cancellation of a copy has a descriptor, and is in a circle
        now = Snapshot.of(os.getpid())
        return now.descriptors <= before.descriptors and now.threads <= before.threads

    ended = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    if failures:
        raise AssertionError(f"{failures} of {count} trees differ, seeds from {first}; {ended}")
    wait_until(is_settled, 20, f"this process to have what it had: {before}")
    return f"{10 * count} trees and changes, seeds from {first}; {count} kills and cancels: {ended}"
