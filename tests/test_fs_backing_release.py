"""Calls below backing/: their limits, and that everything open is closed whatever fails on the way."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pyfuse3
import pytest
import trio
import trio.testing
from support.control_plane import control_plane
from support.fake_table import FakeTable
from support.processes import PATIENCE

from gpufs.fs.backing import Share, calls
from gpufs.fs.backing.inodes import HostInodes
from gpufs.fs.backing.open_files import OpenDirectory, OpenFile
from gpufs.fs.errors import error
from gpufs.fs.tree import Tree


class Table(FakeTable):
    """Opens files of the host, too, by numbers of its own."""

    def backing_file_open(self, fd: int) -> int:
        handle = 1000 + len(self.open_files)
        self.open_files[handle] = fd
        return handle


class World:
    """A mount that shows a directory with one file, which a program has open for writing, and lists."""

    def __init__(self, shown: Path) -> None:
        (shown / "file").touch()
        self.table = Table()
        tree = Tree(self.table, 1, uid=0, gid=0, control_files={})
        self.operations = control_plane(tree, self.table, [Share("data", str(shown), read_only=False)])
        self.directory = tree.lookup(1, b"backing").ino

    async def open(self) -> None:
        context: Any = pyfuse3.RequestContext.__new__(pyfuse3.RequestContext)
        share = await self.operations.lookup(self.directory, b"data", context)
        found = await self.operations.lookup(share.st_ino, b"file", context)
        self.file = (await self.operations.open(found.st_ino, os.O_RDWR, context)).fh
        self.listing = await self.operations.opendir(share.st_ino, context)
        handles = self.operations._handles
        file, listing = handles.get(self.file), handles.get(self.listing)
        assert isinstance(file, OpenFile)
        assert isinstance(listing, OpenDirectory)
        assert file.fd is not None
        self.descriptors = {file.fd, listing.fd}

    async def close(self, planned: pytest.MonkeyPatch, failure: OSError | None = None) -> None:
        """What the kernel asks for in the end; both descriptors are closed then, which may tell of a failure."""
        close = os.close

        def noted(fd: int) -> None:
            close(fd)
            if fd in self.descriptors:
                self.descriptors.remove(fd)
                if failure is not None:
                    raise failure

        planned.setattr(os, "close", noted)
        await self.operations.release(self.file)
        await self.operations.releasedir(self.listing)
        with trio.fail_after(PATIENCE):
            while self.descriptors or self.table.open_files:  # noqa: ASYNC110 - no event says so
                await trio.sleep(0.01)


@pytest.fixture
async def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    await made.open()
    return made


async def test_a_closing_that_fails_releases_all_the_same(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """close(2) tells of writes that have failed; what it closed is closed."""
    with monkeypatch.context() as planned:
        await world.close(planned, error(errno.EIO))


async def test_without_a_thread_it_is_released_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run_sync, refused = trio.to_thread.run_sync, [None, None]

    async def refuse(*args: Any, **options: Any) -> Any:
        if refused:
            refused.pop()
            raise RuntimeError("can't start new thread")
        return await run_sync(*args, **options)

    with monkeypatch.context() as planned:
        planned.setattr(trio.to_thread, "run_sync", refuse)
        await world.close(planned)


async def test_other_users_leave_calls_for_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_CALLS_OF_A_USER", 2), ("_CALLS", 5), ("_RESERVED_CALLS", 1)):
        monkeypatch.setattr(calls, name, value)
    inodes = HostInodes({}, 0, lambda parent, name: None)
    found = os.open(tmp_path, os.O_PATH), os.stat(tmp_path)
    node = inodes.meet(found, Share("data", str(tmp_path), read_only=False), None)
    host_calls, answered = calls.HostCalls(inodes), threading.Event()

    async def call(uid: int) -> None:
        await host_calls.run(uid, node, lambda: answered.wait(PATIENCE))

    async with trio.open_nursery() as nursery:
        for uid in (1001, 1001, 1002, 1002):
            nursery.start_soon(call, uid)
        await trio.testing.wait_all_tasks_blocked()
        for uid in (1001, 1003):
            with pytest.raises(OSError) as refused:
                await call(uid)
            assert refused.value.errno == errno.EBUSY
        nursery.start_soon(call, 0)
        await trio.testing.wait_all_tasks_blocked()
        answered.set()
    inodes.close()
