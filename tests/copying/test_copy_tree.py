"""gpufs.copy_tree(): what becomes of a directory, and of a copy that fails or is ended."""

from __future__ import annotations

import errno
import os
import shlex
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.data import MIB, contents, noise
from support.hanging import HangingMount
from support.hosts import script
from support.mounting import GPUFS, Mounter
from support.processes import run
from support.stores import Model, web_server

import gpufs

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a slow server")
BIG = 3 * MIB + 5


@pytest.fixture
def tree(host: Path) -> Path:
    (host / "blob").write_bytes(noise(BIG))
    tree = host / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "config.json").write_bytes(b"{}")
    (tree / "deep" / "weights").write_bytes(noise(MIB))
    (tree / "model.safetensors").symlink_to("../blob")  # as in the cache of a hub
    return tree


def test_a_directory_becomes_the_copy_itself(root: Path, tree: Path) -> None:
    seen: list[gpufs.CopyProgress] = []
    for _ in range(2):
        results = gpufs.copy_tree(tree, root / "copy", progress=seen.append)
        assert contents(root / "copy") == contents(tree)
        assert sum(result.bytes for result in results) == BIG + MIB + 2
        assert (seen[-1].moved, seen[-1].total) == (BIG + MIB + 2, BIG + MIB + 2)
        assert sum(seen[-1].paths.values()) == seen[-1].moved
    assert gpufs.copy_tree(root / "copy", tree.parent / "back", update=True, preserve=True)
    assert not gpufs.copy_tree(root / "copy", tree.parent / "back", update=True)
    chosen = gpufs.copy_tree(tree, root / "chosen", include=["*.json", "weights"], exclude=["deep"])
    assert [result.destination for result in chosen] == [f"{root}/chosen/config.json"]
    (one,) = gpufs.copy_tree(tree, root / "one", include="*.json", exclude="deep")
    assert one.destination == f"{root}/one/config.json"
    with pytest.raises(TypeError, match="pattern"):
        gpufs.copy_tree(tree, root / "one", include=[3])  # type: ignore[list-item]
    with pytest.raises(gpufs.CopyError, match="empty pattern"):
        gpufs.copy_tree(tree, root / "one", exclude="")
    with pytest.raises(ValueError, match="update=True"):
        gpufs.copy_tree(tree, root / "one", inplace=True)
    with pytest.raises(TypeError, match="None"):
        gpufs.copy_tree(None, root / "one")  # type: ignore[arg-type]


def test_links_may_stay_links(root: Path, tree: Path) -> None:
    gpufs.copy_tree(tree, root / "copy", symlinks=True)
    assert os.readlink(root / "copy" / "model.safetensors") == "../blob"


def test_failures_are_collected_and_the_rest_is_copied(root: Path, tree: Path) -> None:
    (tree / "deep" / "gone").symlink_to("nowhere")
    with pytest.raises(ExceptionGroup) as failed:
        gpufs.copy_tree(tree, root / "copy")
    (error,) = failed.value.exceptions
    assert isinstance(error, gpufs.CopyError)
    assert (error.errno, error.filename) == (errno.ENOENT, f"{tree}/deep/gone")
    assert len(contents(root / "copy")) == 3
    with pytest.raises(ExceptionGroup) as failed:
        gpufs.copy_tree(tree, tree.parent / "elsewhere")
    assert failed.group_contains(gpufs.NotOnMount)


@pytest.mark.parametrize("names", [("", "copy"), ("tree", ""), ("ftp://server/tree", "copy")])
def test_names_that_cannot_be_used(root: Path, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(gpufs.CopyError):
        gpufs.copy_tree(*names)
    assert not [*root.iterdir()]


HUB = """
import sys, gpufs
for _ in range(2):
    gpufs.copy_tree("hf://org/model", sys.argv[1])
try:
    gpufs.copy_tree("hf://org/model", sys.argv[1], preserve=True)
except gpufs.CopyError as error:
    print(error.errno)
"""


def test_a_model_of_the_hub(root: Path, tmp_path: Path) -> None:
    """In a program of its own: the Hub's library reads its variables once."""
    files = {"config.json": b"{}", "deep/weights": noise(MIB)}
    with web_server() as server:
        server.models["org/model"] = Model(dict(files))
        environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path)}
        done = run(sys.executable, "-c", HUB, root / "copy", env=environment)
    assert contents(root / "copy") == files
    assert int(done.stdout) == errno.EINVAL


def test_a_directory_of_another_machine(
    root: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways, with `ssh` and `gpufs` from PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    script(programs / "ssh", '#!/bin/sh\nwhile [ "$1" != node2 ]; do shift; done\nshift\nexec sh -c "$*"\n')
    script(programs / "gpufs", f'#!/bin/sh\nexec {shlex.join(GPUFS)} "$@"\n')
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    seen: list[gpufs.CopyProgress] = []
    for _ in range(2):
        results = gpufs.copy_tree(f"node2:{tree}", root / "copy", progress=seen.append)
        assert contents(root / "copy") == contents(tree)
        assert {result.source for result in results} == {f"node2:{tree}/{name}" for name in contents(tree)}
    assert seen[-1].moved == seen[-1].total == sum(result.bytes for result in results) == BIG + MIB + 2
    assert not gpufs.copy_tree(root / "copy", f"node2:{root}/copy", update=True, exclude=["weights"])
    (copied,) = gpufs.copy_tree(root / "copy", f"node2:{root}/back", include=["*.json"])
    assert copied.destination == f"node2:{root}/back/config.json"
    (tree / "gone").symlink_to("nowhere")
    with pytest.raises(ExceptionGroup) as failed:
        gpufs.copy_tree(f"node2:{tree}", root / "second")
    (error,) = failed.value.exceptions
    assert isinstance(error, gpufs.CopyError)
    assert (error.errno, error.filename) == (errno.ENOENT, f"node2:{tree}/gone")
    assert contents(root / "second") == contents(root / "copy")
    stop = gpufs.Cancellation()
    with pytest.raises(gpufs.CopyError) as cancelled:
        gpufs.copy_tree(f"node2:{tree}", root / "third", progress=lambda _: stop.cancel(), cancel=stop)
    assert cancelled.value.errno == errno.ECANCELED
    (programs / "ssh").write_text("#!/bin/sh\nexit 255\n")
    with pytest.raises(gpufs.CopyError):
        gpufs.copy_tree(f"node2:{tree}", root / "fourth")


def copies(source: Path, target: Path) -> list[Callable[..., object]]:
    return [
        lambda **options: gpufs.copy_tree(source, target / "copy", **options),
        lambda **options: gpufs.copy_files(source.iterdir(), target, **options),
    ]


@as_root
@pytest.mark.parametrize("which", [0, 1], ids=["copy_tree", "copy_files"])
def test_a_copy_that_is_ended_leaves_nothing(mount: Mounter, tree: Path, slow: HangingMount, which: int) -> None:
    """By cancel, by an exception of the callback, and by one of those that a signal handler raises in it."""
    own = mount("--io-workers", "1", "--io-chunk-bytes", "64K", memory=2048 * MIB)
    (tree / "slow").symlink_to(slow.file)
    (tree / "config.json").unlink()
    copy = copies(tree, own.device)[which]
    threads = threading.active_count()
    for error in (None, ValueError("the window is closed"), KeyboardInterrupt()):
        stop = gpufs.Cancellation()

        def end(
            progress: gpufs.CopyProgress, stop: gpufs.Cancellation = stop, error: BaseException | None = error
        ) -> None:
            if progress.moved > BIG:
                stop.cancel()
                if error is not None:
                    raise error

        cancelled = (gpufs.CopyError, ExceptionGroup)
        with pytest.raises(cancelled if error is None else type(error)):
            copy(progress=end, cancel=stop if error is None else None)
        assert not [*own.device.rglob("slow")]
        assert threading.active_count() == threads
