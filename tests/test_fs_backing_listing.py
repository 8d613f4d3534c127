"""What the kernel is told of a directory of the host while something in it fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pyfuse3
import pytest
from support.control_plane import control_plane
from support.fake_table import FakeTable

from gpufs.fs.backing import Share
from gpufs.fs.backing.inodes import look_up
from gpufs.fs.errors import error
from gpufs.fs.tree import Tree


async def test_a_listing_that_fails_midway_keeps_no_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been found goes to the kernel, which forgets it again; the failure is the next reading's answer."""
    for name in "abc":
        (tmp_path / name).touch()
    table = FakeTable()
    tree = Tree(table, 1, uid=0, gid=0, control_files={})
    operations = control_plane(tree, table, [Share("data", str(tmp_path), read_only=False)])
    context: Any = pyfuse3.RequestContext.__new__(pyfuse3.RequestContext)
    replied: list[tuple[bytes, int, int]] = []

    def reply(token: Any, name: bytes, attributes: pyfuse3.EntryAttributes, cookie: int) -> bool:
        replied.append((name, attributes.st_ino, cookie))
        return True

    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)
    shown = tree.lookup(1, b"backing")
    share = await operations.lookup(shown.ino, b"data", context)
    handle = await operations.opendir(share.st_ino, context)
    order = os.listdir(tmp_path)
    broken = order[1].encode()

    def failing(directory: int, path: bytes) -> tuple[int, os.stat_result]:
        if path == broken:
            raise error(errno.EIO)
        return look_up(directory, path)

    monkeypatch.setattr("gpufs.fs.backing.open_files.look_up", failing)
    token: Any = None
    await operations.readdir(handle, 0, token)
    assert [name for name, _, _ in replied] == [b".", b"..", order[0].encode()]
    _, ino, cookie = replied[-1]
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await operations.readdir(handle, cookie, token)
    assert caught.value.errno == errno.EIO
    await operations.forget([(ino, 1)])
    assert ino not in tree.nodes
    await operations.releasedir(handle)
