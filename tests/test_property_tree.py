"""The tree of names against a model: every operation on names, with the errno that Linux gives when it must fail.

The model is a tree of plain objects; the order of checks below is the kernel's, so the expected errno is exact.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from errno import EEXIST, EINVAL, EISDIR, ENOENT, ENOTDIR, ENOTEMPTY, EPERM
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from support import linux
from support.linux import RENAME_EXCHANGE, RENAME_NOREPLACE
from support.processes import errno_of

NAMES = ("a", "b", "c")
paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map(tuple)
Parts = tuple[str, ...]


@dataclass(eq=False)
class Node:
    kind: str  # "dir", "file", "link", "fifo"
    mode: int
    children: dict[str, Node] = field(default_factory=dict)
    links: int = 1
    text: str = ""
    attributes: dict[str, bytes] = field(default_factory=dict)

    @property
    def nlink(self) -> int:
        if self.kind == "dir":
            return 2 + sum(child.kind == "dir" for child in self.children.values())
        return self.links

    def contains(self, other: Node) -> bool:
        return self is other or any(child.contains(other) for child in self.children.values() if child.kind == "dir")


class Failed(Exception):
    """The model says that the call must fail, and how."""

    def __init__(self, code: int) -> None:
        super().__init__(os.strerror(code))
        self.code = code


@contextlib.contextmanager
def failing_with(code: int) -> Iterator[None]:
    """The model must fail inside with this errno, or not at all if it is 0."""
    expected = 0
    try:
        yield
    except Failed as failure:
        expected = failure.code
    assert code == expected


class Tree(RuleBasedStateMachine):
    root: ClassVar[Path]
    numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.base = self.root / f"example{next(self.numbers)}"
        self.base.mkdir(0o755)
        self.top = Node("dir", 0o755)

    def teardown(self) -> None:
        self._compare(self.base, self.top)
        shutil.rmtree(self.base)

    # ---- the model's path walk ----

    def _parent(self, parts: Parts) -> Node:
        node = self.top
        for name in parts[:-1]:
            if node.kind != "dir":
                raise Failed(ENOTDIR)
            if name not in node.children:
                raise Failed(ENOENT)
            node = node.children[name]
        if node.kind != "dir":
            raise Failed(ENOTDIR)  # links point nowhere and are files to the walk, see _walked
        return node

    def _walks_a_link(self, parts: Parts) -> bool:
        node = self.top
        for name in parts[:-1]:
            if name not in node.children:
                return False
            node = node.children[name]
            if node.kind == "link":
                return True
        return False

    def _find(self, parts: Parts) -> Node:
        parent = self._parent(parts)
        if parts[-1] not in parent.children:
            raise Failed(ENOENT)
        return parent.children[parts[-1]]

    def _path(self, parts: Parts) -> Path:
        return self.base.joinpath(*parts)

    def _expect(self, *walks: Parts) -> int | None:
        """ENOENT if the kernel would follow one of the dangling links on the way, before anything else."""
        return ENOENT if any(self._walks_a_link(x) for x in walks) else None

    # ---- making ----

    def _make(self, parts: Parts, node: Node, code: int) -> None:
        if (expected := self._expect(parts)) is not None:
            assert code in (expected, ENOTDIR)
            return
        with failing_with(code):
            parent = self._parent(parts)
            if parts[-1] in parent.children:
                raise Failed(EEXIST)
            if node.kind == "dir":
                node.mode |= parent.mode & stat.S_ISGID
            parent.children[parts[-1]] = node

    @rule(parts=paths, mode=st.sampled_from([0o755, 0o700, 0o1777]))
    def mkdir(self, parts: Parts, mode: int) -> None:
        self._make(parts, Node("dir", mode & ~0o022), errno_of(os.mkdir, self._path(parts), mode))

    @rule(parts=paths, mode=st.sampled_from([0o644, 0o600, 0o777]))
    def mknod(self, parts: Parts, mode: int) -> None:
        self._make(parts, Node("file", mode & ~0o022), errno_of(os.mknod, self._path(parts), mode | stat.S_IFREG))

    @rule(parts=paths)
    def mkfifo(self, parts: Parts) -> None:
        self._make(parts, Node("fifo", 0o644), errno_of(os.mkfifo, self._path(parts)))

    @rule(parts=paths, text=st.sampled_from(["nowhere", "no/where", "x" * 200]))
    def symlink(self, parts: Parts, text: str) -> None:
        self._make(parts, Node("link", 0o777, text=text), errno_of(os.symlink, text, self._path(parts)))

    @rule(old=paths, new=paths)
    def link(self, old: Parts, new: Parts) -> None:
        code = errno_of(os.link, self._path(old), self._path(new), follow_symlinks=False)
        if self._expect(old, new) is not None:
            assert code != 0
            return
        with failing_with(code):
            node = self._find(old)
            parent = self._parent(new)
            if new[-1] in parent.children:
                raise Failed(EEXIST)
            if node.kind == "dir":
                raise Failed(EPERM)
            parent.children[new[-1]] = node
            node.links += 1

    # ---- removing ----

    @rule(parts=paths)
    def unlink(self, parts: Parts) -> None:
        code = errno_of(os.unlink, self._path(parts))
        if self._expect(parts) is not None:
            assert code != 0
            return
        with failing_with(code):
            node = self._find(parts)
            if node.kind == "dir":
                raise Failed(EISDIR)
            del self._parent(parts).children[parts[-1]]
            node.links -= 1

    @rule(parts=paths)
    def rmdir(self, parts: Parts) -> None:
        code = errno_of(os.rmdir, self._path(parts))
        if self._expect(parts) is not None:
            assert code != 0
            return
        with failing_with(code):
            node = self._find(parts)
            if node.kind != "dir":
                raise Failed(ENOTDIR)
            if node.children:
                raise Failed(ENOTEMPTY)
            del self._parent(parts).children[parts[-1]]

    # ---- renaming ----

    @rule(old=paths, new=paths, flags=st.sampled_from([0, 0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE]))
    def rename(self, old: Parts, new: Parts, flags: int) -> None:
        code = errno_of(linux.rename, self._path(old), self._path(new), flags)
        if self._expect(old, new) is not None:
            assert code != 0
            return
        with failing_with(code):
            self._rename(old, new, flags)

    def _rename(self, old: Parts, new: Parts, flags: int) -> None:
        source_parent = self._parent(old)
        target_parent = self._parent(new)
        source = source_parent.children.get(old[-1])
        target = target_parent.children.get(new[-1])
        if source is None:
            raise Failed(ENOENT)
        if flags & RENAME_NOREPLACE and target is not None:
            raise Failed(EEXIST)
        if flags & RENAME_EXCHANGE and target is None:
            raise Failed(ENOENT)
        if source.kind == "dir" and source.contains(target_parent):
            raise Failed(EINVAL)
        if target is not None and target.kind == "dir" and target.contains(source_parent):
            raise Failed(EINVAL if flags & RENAME_EXCHANGE else ENOTEMPTY)
        if source is target:
            return
        if flags & RENAME_EXCHANGE:
            assert target is not None
            source_parent.children[old[-1]], target_parent.children[new[-1]] = target, source
            return
        if target is not None:
            if source.kind == "dir" and target.kind != "dir":
                raise Failed(ENOTDIR)
            if source.kind != "dir" and target.kind == "dir":
                raise Failed(EISDIR)
            if target.children:
                raise Failed(ENOTEMPTY)
            target.links -= 1
        del source_parent.children[old[-1]]
        target_parent.children[new[-1]] = source

    # ---- attributes ----

    @rule(parts=paths, mode=st.sampled_from([0o755, 0o640, 0o000, 0o2711, 0o1700]))
    def chmod(self, parts: Parts, mode: int) -> None:
        code = errno_of(os.chmod, self._path(parts), mode)
        if self._expect(parts) is not None:
            assert code != 0
            return
        with failing_with(code):
            node = self._find(parts)
            if node.kind == "link":
                raise Failed(ENOENT)
            node.mode = mode

    @rule(parts=paths, name=st.sampled_from(["user.x", "user.y"]), value=st.binary(max_size=20))
    def setxattr(self, parts: Parts, name: str, value: bytes) -> None:
        code = errno_of(os.setxattr, self._path(parts), name, value)
        if self._expect(parts) is not None:
            assert code != 0
            return
        with failing_with(code):
            node = self._find(parts)
            if node.kind == "link":
                raise Failed(ENOENT)
            if node.kind == "fifo":
                raise Failed(EPERM)
            node.attributes[name] = value

    # ---- what holds always ----

    @rule(parts=paths)
    def look(self, parts: Parts) -> None:
        code = errno_of(os.lstat, self._path(parts))
        if self._expect(parts) is not None:
            assert code != 0
            return
        with failing_with(code):
            self._check(self._path(parts), self._find(parts))

    def _check(self, path: Path, node: Node) -> None:
        found = os.lstat(path)
        assert {"dir": stat.S_ISDIR, "file": stat.S_ISREG, "link": stat.S_ISLNK, "fifo": stat.S_ISFIFO}[node.kind](
            found.st_mode
        )
        assert stat.S_IMODE(found.st_mode) == node.mode
        assert found.st_nlink == node.nlink
        if node.kind == "link":
            assert os.readlink(path) == node.text
        if node.kind in ("dir", "file"):
            names = [x for x in os.listxattr(path) if not x.startswith("user.gpufs.")]
            assert {x: os.getxattr(path, x) for x in names} == node.attributes

    def _compare(self, path: Path, node: Node) -> None:
        self._check(path, node)
        if node.kind == "dir":
            assert sorted(os.listdir(path)) == sorted(node.children)
            for name, child in node.children.items():
                self._compare(path / name, child)

    @invariant()
    def top_is_right(self) -> None:
        assert sorted(os.listdir(self.base)) == sorted(self.top.children)
        assert os.stat(self.base).st_nlink == self.top.nlink


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("examples", [60, pytest.param(450, marks=pytest.mark.slow)])
def test_names_behave_as_their_model(root: Path, examples: int) -> None:
    Tree.root = root
    run_state_machine_as_test(Tree, settings=settings(max_examples=examples, stateful_step_count=60))
