"""The file system gpufs:// of fsspec: its own contract tests on a mount."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import fsspec.tests.abstract
import pytest
from support.data import MIB, noise

import gpufs


class Fixtures(fsspec.tests.abstract.AbstractFixtures):  # type: ignore[misc]  # fsspec has no types
    @pytest.fixture
    def fs(self) -> Any:
        return fsspec.filesystem("gpufs")

    @pytest.fixture
    def fs_path(self, root: Path) -> str:
        return str(root)

    @pytest.fixture
    def local_path(self, host: Path) -> str:
        return str(host)


class TestCopy(fsspec.tests.abstract.AbstractCopyTests, Fixtures):  # type: ignore[misc]
    test_copy_glob_edge_cases = pytest.mark.slow(fsspec.tests.abstract.AbstractCopyTests.test_copy_glob_edge_cases)


class TestGet(fsspec.tests.abstract.AbstractGetTests, Fixtures):  # type: ignore[misc]
    test_get_glob_edge_cases = pytest.mark.slow(fsspec.tests.abstract.AbstractGetTests.test_get_glob_edge_cases)


class TestPut(fsspec.tests.abstract.AbstractPutTests, Fixtures):  # type: ignore[misc]
    test_put_glob_edge_cases = pytest.mark.slow(fsspec.tests.abstract.AbstractPutTests.test_put_glob_edge_cases)


class TestOpen(fsspec.tests.abstract.AbstractOpenTests, Fixtures):  # type: ignore[misc]
    pass


class TestPipe(fsspec.tests.abstract.AbstractPipeTests, Fixtures):  # type: ignore[misc]
    pass


@pytest.fixture
def url(root: Path) -> str:
    return f"gpufs://{root}"


def test_files_by_url(root: Path, url: str) -> None:
    with fsspec.open(f"{url}/new/file", "wb") as file:
        file.write(b"content")
    assert (root / "new" / "file").read_bytes() == b"content"
    fs, path = fsspec.url_to_fs(url)
    assert fs.ls(f"{path}/new", detail=False) == fs.glob(f"{url}/**/fi*") == [f"{root}/new/file"]
    assert (fs.info(f"{url}/new/file")["size"], fs.cat(f"{url}/new/file")) == (7, b"content")
    fs.mv(f"{url}/new", f"{url}/moved")
    assert [name for name, _, _ in fs.walk(url)] == [f"{root}", f"{root}/moved"]
    fs.rm(url + "/moved", recursive=True)
    assert not [*root.iterdir()]


def test_a_move_to_another_device(root: Path, url: str) -> None:
    (root / "tree").mkdir()
    (root / "tree" / "file").write_bytes(noise(3 * MIB))
    os.utime(root / "tree" / "file", (5, 5))
    other = root.parents[0].with_name("gpu1") / root.name
    fsspec.filesystem("gpufs").mv(f"{url}/tree", f"gpufs://{other}/tree")
    try:
        assert (other / "tree" / "file").read_bytes() == noise(3 * MIB)
        assert (other / "tree" / "file").stat().st_mtime == 5
        assert not [*root.iterdir()]
    finally:
        fsspec.filesystem("gpufs").rm(str(other), recursive=True)


def test_copies_report_their_progress(root: Path, host: Path, url: str) -> None:
    size = 64 * MIB + 5
    (host / "source").write_bytes(noise(size))
    callback = fsspec.callbacks.Callback()
    fs = fsspec.filesystem("gpufs")
    fs.put_file(str(host / "source"), f"{url}/file", callback=callback)
    assert (callback.size, callback.value) == (size, size)
    fs.get_file(f"{url}/file", str(host / "back"), callback=callback)
    assert (host / "back").read_bytes() == noise(size)


def test_nothing_is_created_outside_of_a_mount(host: Path) -> None:
    fs, url = fsspec.filesystem("gpufs"), f"gpufs://{host}/gpu0"
    (host / "source").write_bytes(b"content")
    creations: tuple[Callable[[], object], ...] = (
        lambda: fs.mkdir(url),
        lambda: fs.makedirs(f"{url}/a"),
        lambda: fs.touch(f"{url}/a"),
        lambda: fs.pipe(f"{url}/a", b"content"),
        lambda: fs.put(str(host / "source"), f"{url}/a"),
        lambda: fs.mv(str(host / "source"), f"{url}/a"),
    )
    for create in creations:
        with pytest.raises(gpufs.NotOnMount):
            create()
    with pytest.raises(FileNotFoundError):
        fs.get(f"{url}/a", str(host / "b"))
    assert os.listdir(host) == ["source"]
