"""The rules of names, without a mount: every path that changes the tree, and what it leaves behind."""

import errno
import os
import random
import stat
from collections.abc import Callable
from typing import Any

import pyfuse3
import pytest
import trio
import trio.testing
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from support.control_plane import control_plane
from support.fake_table import FakeTable

from gpufs.fs.nodes import FIRST_COOKIE, BufferFile, Directory, Node
from gpufs.fs.tree import RENAME_EXCHANGE, RENAME_NOREPLACE, RENAME_WHITEOUT, ROOT_INODE, Tree

USER, GROUP = 1000, 100


class World:
    """A tree with two devices over a fake table."""

    def __init__(self) -> None:
        self.table = FakeTable()
        self.tree = Tree(self.table, 2, uid=7, gid=8, control_files={"version": lambda uid: b"1\n"})
        self.gpu0 = self.tree.lookup(ROOT_INODE, b"gpu0").ino
        self.gpu1 = self.tree.lookup(ROOT_INODE, b"gpu1").ino
        self.control = self.tree.lookup(ROOT_INODE, b".gpufs").ino

    def file(self, name: bytes, parent: int | None = None) -> BufferFile:
        return self.tree.create(self.gpu0 if parent is None else parent, name, 0o644, USER, GROUP)

    def directory(self, name: bytes, parent: int | None = None) -> Directory:
        return self.tree.mkdir(self.gpu0 if parent is None else parent, name, 0o755, USER, GROUP)

    def names(self, ino: int | None = None) -> list[bytes]:
        directory = self.tree.directory(self.gpu0 if ino is None else ino)
        return [name for _, name, _ in directory.after(0)]

    def nlink(self, node: Node) -> int:
        return self.table.inode_get(node.ino).nlink


@pytest.fixture
def world() -> World:
    return World()


def fails(code: int, function: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(OSError) as caught:
        function(*arguments)
    assert caught.value.errno == code, os.strerror(caught.value.errno or 0)


def test_the_mount_has_a_directory_for_each_device(world: World) -> None:
    assert world.names(ROOT_INODE) == [b".gpufs", b"gpu0", b"gpu1"]
    assert world.nlink(world.tree.root) == 5
    for ino, mode in ((ROOT_INODE, 0o555), (world.control, 0o555), (world.gpu0, 0o755)):
        attributes = world.table.inode_get(ino)
        assert (attributes.mode, attributes.uid, attributes.gid) == (stat.S_IFDIR | mode, 7, 8)
    version = world.tree.lookup(world.control, b"version")
    assert world.table.inode_get(version.ino).device == -1


def test_what_belongs_to_the_mount_cannot_be_changed(world: World) -> None:
    tree = world.tree
    kept = world.file(b"kept")
    for parent in (ROOT_INODE, world.control):
        fails(errno.EPERM, tree.create, parent, b"x", 0o644, 0, 0)
        fails(errno.EPERM, tree.mkdir, parent, b"x", 0o755, 0, 0)
        fails(errno.EPERM, tree.symlink, parent, b"x", b"y", 0, 0)
        fails(errno.EPERM, tree.mknod, parent, b"x", stat.S_IFIFO, 0, 0, 0)
        fails(errno.EPERM, tree.link, kept.ino, parent, b"x")
        fails(errno.EPERM, tree.rename, world.gpu0, b"kept", parent, b"x", 0)
    fails(errno.EPERM, tree.rmdir, ROOT_INODE, b"gpu0")
    fails(errno.EPERM, tree.unlink, world.control, b"version")
    fails(errno.EPERM, tree.rename, ROOT_INODE, b"gpu0", world.gpu1, b"x", 0)
    version = tree.lookup(world.control, b"version")
    fails(errno.EPERM, tree.link, version.ino, world.gpu0, b"x")
    assert world.names() == [b"kept"]


def test_names_end_at_255_bytes(world: World) -> None:
    longest, longer = b"n" * 255, b"n" * 256
    world.file(longest)
    assert world.tree.lookup(world.gpu0, longest).names == 1
    for function, arguments in (
        (world.tree.lookup, (world.gpu0, longer)),
        (world.tree.create, (world.gpu0, longer, 0o644, 0, 0)),
        (world.tree.mkdir, (world.gpu0, longer, 0o644, 0, 0)),
        (world.tree.rename, (world.gpu0, longest, world.gpu0, longer, 0)),
        (world.tree.unlink, (world.gpu0, longer)),
    ):
        fails(errno.ENAMETOOLONG, function, *arguments)
    assert world.names() == [longest]


def test_any_bytes_make_a_name(world: World) -> None:
    name = bytes(byte for byte in range(1, 256) if byte != ord("/"))
    node = world.file(name)
    assert world.tree.lookup(world.gpu0, name) is node


def test_dot_and_dot_dot(world: World) -> None:
    below = world.directory(b"below")
    assert world.tree.lookup(below.ino, b".") is below
    assert world.tree.lookup(below.ino, b"..").ino == world.gpu0
    assert world.tree.lookup(ROOT_INODE, b"..").ino == ROOT_INODE
    file = world.file(b"file")
    assert world.tree.lookup(file.ino, b".") is file
    fails(errno.ENOTDIR, world.tree.lookup, file.ino, b"..")


def test_a_failed_creation_leaves_nothing(world: World) -> None:
    nodes, inodes = dict(world.tree.nodes), set(world.table.inodes)
    for make in (world.file, world.directory):
        world.table.fail_next = errno.ENOMEM
        fails(errno.ENOMEM, make, b"x")
    assert world.tree.nodes == nodes
    assert set(world.table.inodes) == inodes
    assert world.names() == []
    assert world.tree.files == [0, 0]


def test_hard_links_share_an_inode(world: World) -> None:
    node = world.file(b"one")
    world.directory(b"d")
    other = world.tree.lookup(world.gpu0, b"d").ino
    assert world.tree.link(node.ino, other, b"two") is node
    assert world.nlink(node) == 2
    assert world.tree.lookup(other, b"two") is node
    fails(errno.EEXIST, world.tree.link, node.ino, other, b"two")
    fails(errno.EXDEV, world.tree.link, node.ino, world.gpu1, b"x")
    fails(errno.EPERM, world.tree.link, other, world.gpu0, b"x")
    # both names are one file: renaming one over the other does nothing
    assert world.tree.rename(world.gpu0, b"one", other, b"two", 0) is None
    assert world.nlink(node) == 2
    world.tree.unlink(world.gpu0, b"one")
    assert world.nlink(node) == 1
    world.tree.unlink(other, b"two")
    assert node.ino not in world.table.inodes


def test_an_unlinked_file_lives_until_the_kernel_forgets_it(world: World) -> None:
    node = world.file(b"f")
    node.lookups = 3
    world.tree.unlink(world.gpu0, b"f")
    assert world.table.inode_get(node.ino).nlink == 0
    fails(errno.ENOENT, world.tree.link, node.ino, world.gpu0, b"again")
    world.tree.forget(node.ino, 2)
    assert node.ino in world.table.inodes
    assert world.tree.files == [1, 0]
    world.tree.forget(node.ino, 1)
    assert node.ino not in world.table.inodes
    assert world.tree.files == [0, 0]
    fails(errno.ESTALE, world.tree.node, node.ino)
    world.tree.forget(node.ino, 1)  # what is gone is not an error


def test_forgetting_a_named_file_keeps_it(world: World) -> None:
    node = world.file(b"f")
    node.lookups = 1
    world.tree.forget(node.ino, 1)
    assert world.tree.lookup(world.gpu0, b"f") is node


def test_a_removed_directory_takes_no_names(world: World) -> None:
    gone = world.directory(b"gone")
    gone.lookups = 1
    world.tree.rmdir(world.gpu0, b"gone")
    assert world.nlink(gone) == 0
    fails(errno.ENOENT, world.tree.create, gone.ino, b"x", 0o644, 0, 0)
    kept = world.file(b"kept")
    fails(errno.ENOENT, world.tree.link, kept.ino, gone.ino, b"x")
    fails(errno.ENOENT, world.tree.rename, world.gpu0, b"kept", gone.ino, b"x", 0)


def test_removing_what_cannot_be_removed(world: World) -> None:
    full = world.directory(b"full")
    world.file(b"in", full.ino)
    fails(errno.ENOTEMPTY, world.tree.rmdir, world.gpu0, b"full")
    fails(errno.EISDIR, world.tree.unlink, world.gpu0, b"full")
    fails(errno.ENOTDIR, world.tree.rmdir, full.ino, b"in")
    fails(errno.ENOENT, world.tree.unlink, world.gpu0, b"none")
    fails(errno.ENOENT, world.tree.rmdir, world.gpu0, b"none")
    fails(errno.EINVAL, world.tree.rmdir, full.ino, b".")
    fails(errno.ENOTEMPTY, world.tree.rmdir, full.ino, b"..")


def test_link_counts_of_directories(world: World) -> None:
    top = world.directory(b"top")
    one = world.directory(b"one", top.ino)
    world.directory(b"two", top.ino)
    world.file(b"file", top.ino)
    assert world.nlink(top) == 4
    world.tree.rename(top.ino, b"two", one.ino, b"two", 0)
    assert (world.nlink(top), world.nlink(one)) == (3, 3)
    world.tree.rename(one.ino, b"two", top.ino, b"file", RENAME_EXCHANGE)
    assert (world.nlink(top), world.nlink(one)) == (4, 2)
    world.tree.rename(top.ino, b"file", top.ino, b"moved", 0)
    assert world.nlink(top) == 4
    world.tree.rmdir(top.ino, b"moved")
    assert world.nlink(top) == 3
    replaced = world.directory(b"replaced", top.ino)
    replaced.lookups = 1
    world.tree.unlink(one.ino, b"two")
    world.tree.rename(top.ino, b"one", top.ino, b"replaced", 0)
    assert (world.nlink(top), world.nlink(replaced)) == (3, 0)


def test_rename_that_leaves_a_whiteout(world: World) -> None:
    moved = world.directory(b"dir")
    links = world.nlink(world.tree.directory(world.gpu0))
    world.tree.rename(world.gpu0, b"dir", world.gpu0, b"moved", RENAME_WHITEOUT | RENAME_NOREPLACE, 3, 4)
    left = world.tree.lookup(world.gpu0, b"dir")
    found = world.table.inode_get(left.ino)
    assert (found.mode, found.rdev, found.nlink, found.uid, found.gid) == (stat.S_IFCHR, 0, 1, 3, 4)
    assert world.tree.lookup(world.gpu0, b"moved") is moved
    assert world.nlink(world.tree.directory(world.gpu0)) == links
    fails(errno.EEXIST, world.tree.rename, world.gpu0, b"moved", world.gpu0, b"dir", 5)
    fails(errno.EINVAL, world.tree.rename, world.gpu0, b"moved", world.gpu0, b"dir", RENAME_WHITEOUT | RENAME_EXCHANGE)


def test_unnamed_files_can_be_named_once(world: World) -> None:
    before = world.table.inode_get(world.gpu0).mtime
    node = world.tree.create_unnamed(world.gpu0, 0o640, USER, GROUP)
    node.lookups = 1
    assert (world.nlink(node), world.names(), world.table.inode_get(world.gpu0).mtime) == (0, [], before)
    world.tree.link(node.ino, world.gpu0, b"named")
    assert (world.nlink(node), world.names()) == (1, [b"named"])
    world.tree.unlink(world.gpu0, b"named")
    fails(errno.ENOENT, world.tree.link, node.ino, world.gpu0, b"again")
    world.tree.forget(node.ino, 1)
    fails(errno.ESTALE, world.tree.node, node.ino)
    fails(errno.EPERM, world.tree.create_unnamed, ROOT_INODE, 0o640, USER, GROUP)


def test_rename_over_what_is_there(world: World) -> None:
    old, new = world.file(b"old"), world.file(b"new")
    new.lookups = 1
    assert world.tree.rename(world.gpu0, b"old", world.gpu0, b"new", 0) is new
    assert world.names() == [b"new"]
    assert world.tree.lookup(world.gpu0, b"new") is old
    assert world.nlink(new) == 0
    full, empty = world.directory(b"full"), world.directory(b"empty")
    world.file(b"in", full.ino)
    fails(errno.ENOTEMPTY, world.tree.rename, world.gpu0, b"empty", world.gpu0, b"full", 0)
    fails(errno.EISDIR, world.tree.rename, world.gpu0, b"new", world.gpu0, b"empty", 0)
    fails(errno.ENOTDIR, world.tree.rename, world.gpu0, b"empty", world.gpu0, b"new", 0)
    world.tree.rename(world.gpu0, b"full", world.gpu0, b"empty", 0)
    assert empty.ino not in world.table.inodes
    assert world.names() == [b"new", b"empty"]


def test_rename_into_itself(world: World) -> None:
    top = world.directory(b"top")
    middle = world.directory(b"middle", top.ino)
    bottom = world.directory(b"bottom", middle.ino)
    for target in (top, middle, bottom):
        fails(errno.EINVAL, world.tree.rename, world.gpu0, b"top", target.ino, b"x", 0)
    fails(errno.EINVAL, world.tree.rename, middle.ino, b"bottom", world.gpu0, b"top", RENAME_EXCHANGE)
    fails(errno.ENOTEMPTY, world.tree.rename, middle.ino, b"bottom", world.gpu0, b"top", 0)
    assert world.names() == [b"top"]
    assert world.tree.lookup(middle.ino, b"bottom") is bottom


def test_rename_flags(world: World) -> None:
    one, two = world.file(b"one"), world.directory(b"two")
    fails(errno.EEXIST, world.tree.rename, world.gpu0, b"one", world.gpu0, b"two", RENAME_NOREPLACE)
    fails(errno.ENOENT, world.tree.rename, world.gpu0, b"one", world.gpu0, b"none", RENAME_EXCHANGE)
    fails(errno.ENOENT, world.tree.rename, world.gpu0, b"none", world.gpu0, b"one", 0)
    for flags in (6, RENAME_EXCHANGE | RENAME_NOREPLACE, 8):
        fails(errno.EINVAL, world.tree.rename, world.gpu0, b"one", world.gpu0, b"x", flags)
    world.tree.rename(world.gpu0, b"one", world.gpu0, b"two", RENAME_EXCHANGE)
    assert world.tree.lookup(world.gpu0, b"two") is one
    assert world.tree.lookup(world.gpu0, b"one") is two
    assert world.names() == [b"one", b"two"]
    world.tree.rename(world.gpu0, b"two", world.gpu0, b"free", RENAME_NOREPLACE)
    assert world.names() == [b"one", b"free"]


def test_devices_are_file_systems_of_their_own(world: World) -> None:
    world.file(b"f")
    world.directory(b"d")
    world.file(b"g", world.gpu1)
    for name in (b"f", b"d"):
        fails(errno.EXDEV, world.tree.rename, world.gpu0, name, world.gpu1, b"x", 0)
    fails(errno.EXDEV, world.tree.rename, world.gpu0, b"f", world.gpu1, b"g", RENAME_EXCHANGE)
    assert world.tree.files == [1, 1]


def test_special_files_and_links(world: World) -> None:
    for kind in (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK):
        node = world.tree.mknod(world.gpu0, b"n%d" % kind, kind | 0o600, os.makedev(1, 3), 0, 0)
        attributes = world.table.inode_get(node.ino)
        assert stat.S_IFMT(attributes.mode) == kind
        assert attributes.rdev == (os.makedev(1, 3) if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0)
    assert isinstance(world.tree.mknod(world.gpu0, b"plain", 0o600, 0, 0, 0), BufferFile)
    fails(errno.EINVAL, world.tree.mknod, world.gpu0, b"x", stat.S_IFLNK, 0, 0, 0)
    link = world.tree.symlink(world.gpu0, b"link", b"to/somewhere", USER, GROUP)
    attributes = world.table.inode_get(link.ino)
    assert (attributes.size, stat.S_IMODE(attributes.mode)) == (len(b"to/somewhere"), 0o777)


def test_times_of_directories(world: World) -> None:
    def times() -> tuple[int, int]:
        attributes = world.table.inode_get(world.gpu0)
        return attributes.mtime, attributes.ctime

    node = world.file(b"f")
    steps: list[Callable[[], object]] = [
        lambda: world.file(b"g"),
        lambda: world.tree.link(node.ino, world.gpu0, b"h"),
        lambda: world.tree.rename(world.gpu0, b"g", world.gpu0, b"i", 0),
        lambda: world.tree.unlink(world.gpu0, b"i"),
        lambda: world.directory(b"d"),
        lambda: world.tree.rmdir(world.gpu0, b"d"),
    ]
    for step in steps:
        before = times()
        step()
        after = times()
        assert after[0] > before[0]
        assert after[1] > before[1]
    before = times()
    world.tree.lookup(world.gpu0, b"f")
    assert times() == before


# ---- listings ----


def test_listing_goes_on_where_it_stopped_while_names_come_and_go() -> None:
    world = World()
    dice = random.Random(5)
    steady = [b"steady%d" % number for number in range(500)]
    for name in steady:
        world.file(name)
        world.file(b"gone" + name)
    directory = world.tree.directory(world.gpu0)
    seen: list[bytes] = []
    cookie, fresh = 0, 0
    while True:
        part = []
        for position, name, _ in directory.after(cookie):
            part.append(name)
            cookie = position
            if len(part) == 7:
                break
        if not part:
            break
        seen += part
        for name in dice.sample(steady, 3):  # a name that was replaced keeps its place
            world.file(b"tmp%d" % fresh)
            world.tree.rename(world.gpu0, b"tmp%d" % fresh, world.gpu0, name, 0)
            fresh += 1
            if directory.get(b"gone" + name) is not None:
                world.tree.unlink(world.gpu0, b"gone" + name)
    assert sorted(name for name in seen if name.startswith(b"steady")) == sorted(steady)
    assert len(seen) == len(set(seen))


def test_a_renamed_name_keeps_its_place(world: World) -> None:
    for name in (b"a", b"b", b"c"):
        world.file(name)
    directory = world.tree.directory(world.gpu0)
    places = {name: cookie for cookie, name, _ in directory.after(0)}
    last = directory.last_cookie
    world.tree.rename(world.gpu0, b"b", world.gpu0, b"z", 0)
    world.file(b"later")
    assert [name for _, name, _ in directory.after(0, last)] == [b"a", b"z", b"c"]
    assert [name for _, name, _ in directory.after(places[b"a"])] == [b"z", b"c", b"later"]
    assert directory.get(b"b") is None


def test_cookies_never_come_back(world: World) -> None:
    directory = world.tree.directory(world.gpu0)
    cookies = set()
    for _ in range(1000):
        world.file(b"f")
        ((cookie, _, _),) = directory.after(0)
        assert cookie >= FIRST_COOKIE
        cookies.add(cookie)
        world.tree.unlink(world.gpu0, b"f")
    assert len(cookies) == 1000
    assert list(directory.after(0)) == []


def test_a_hundred_thousand_names_are_listed_in_pieces(world: World) -> None:
    for number in range(100_000):
        world.file(b"%d" % number)
    directory = world.tree.directory(world.gpu0)
    cookie, count = 0, 0
    while True:
        before = count
        for position, _, _ in directory.after(cookie):
            cookie = position
            count += 1
            if count - before == 100:
                break
        if count == before:
            break
    assert count == 100_000


# ---- any order of things ----

EXPECTED = {
    errno.ENOENT,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENOTEMPTY,
    errno.EINVAL,
    errno.EXDEV,
    errno.ESTALE,
    errno.EPERM,
}


class AnyOrder(RuleBasedStateMachine):
    """After whatever steps: link counts, parents, counters and the table agree with the names."""

    directories = Bundle("directories")

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    def _attempt(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except OSError as failure:
            if failure.errno not in EXPECTED:
                raise
            return None

    @rule(target=directories, device=st.booleans())
    def device(self, device: bool) -> int:
        return self.world.gpu1 if device else self.world.gpu0

    names = st.sampled_from([b"a", b"b", b"c"])

    @rule(target=directories, parent=directories, name=names)
    def mkdir(self, parent: int, name: bytes) -> int:
        made = self._attempt(self.world.tree.mkdir, parent, name, 0o755, 0, 0)
        return parent if made is None else made.ino

    @rule(parent=directories, name=names)
    def create(self, parent: int, name: bytes) -> None:
        self._attempt(self.world.tree.create, parent, name, 0o644, 0, 0)

    @rule(source=directories, old=names, into=directories, new=names, flags=st.sampled_from([0, 0, 1, 2]))
    def rename(self, source: int, old: bytes, into: int, new: bytes, flags: int) -> None:
        self._attempt(self.world.tree.rename, source, old, into, new, flags)

    @rule(source=directories, old=names, into=directories, new=names)
    def link(self, source: int, old: bytes, into: int, new: bytes) -> None:
        node = self._attempt(self.world.tree.lookup, source, old)
        if node is not None:
            self._attempt(self.world.tree.link, node.ino, into, new)

    @rule(parent=directories, name=names)
    def unlink(self, parent: int, name: bytes) -> None:
        self._attempt(self.world.tree.unlink, parent, name)

    @rule(parent=directories, name=names)
    def rmdir(self, parent: int, name: bytes) -> None:
        self._attempt(self.world.tree.rmdir, parent, name)

    @rule(parent=consumes(directories))
    def let_go(self, parent: int) -> None:
        """Shrinks the bundle."""

    @invariant()
    def all_agrees(self) -> None:
        tree, table = self.world.tree, self.world.table
        found: dict[int, int] = {ROOT_INODE: 1}
        waiting: list[Directory] = [tree.root]
        while waiting:
            directory = waiting.pop()
            listed = list(directory.after(0))
            assert {name for _, name, _ in listed} == set(directory.entries)
            below = 0
            for _, name, node in listed:
                assert directory.get(name) is node
                found[node.ino] = found.get(node.ino, 0) + 1
                if isinstance(node, Directory):
                    assert node.parent is directory
                    assert found[node.ino] == 1
                    below += 1
                    waiting.append(node)
            assert directory.subdirectories == below
            assert table.inode_get(directory.ino).nlink == 2 + below
        assert set(found) == set(tree.nodes) == set(table.inodes)
        for ino, count in found.items():
            node = tree.nodes[ino]
            assert node.names == count
            if not isinstance(node, Directory):
                assert table.inode_get(ino).nlink == count
        buffers = [node.device for node in tree.nodes.values() if isinstance(node, BufferFile)]
        assert tree.files == [buffers.count(0), buffers.count(1)]


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase


# ---- streams of which there is one at a time ----


class OneAtATime:
    """As a trace: EBUSY while there is another."""

    taken = False

    def __init__(self) -> None:
        if OneAtATime.taken:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        OneAtATime.taken = True

    def read(self, size: int) -> bytes:
        return b""

    def close(self) -> None:
        OneAtATime.taken = False


async def test_a_stream_whose_end_comes_behind_the_next_ones_opening(autojump_clock: trio.testing.MockClock) -> None:
    """The kernel tells of both in this order, or in the other, as its threads like; of a closed descriptor before."""
    table = FakeTable()
    tree = Tree(table, 1, uid=7, gid=8, control_files={}, streams={"trace": OneAtATime})
    operations = control_plane(tree, table)
    node = tree.lookup(tree.lookup(ROOT_INODE, b".gpufs").ino, b"trace")
    context: Any = pyfuse3.RequestContext.__new__(pyfuse3.RequestContext)

    async def opened() -> int:
        return (await operations.open(node.ino, os.O_RDONLY, context)).fh

    first = await opened()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def end() -> None:
            await trio.sleep(1)  # the mount has much to do
            await operations.release(first)

        second = await opened()
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await opened()
    assert caught.value.errno == errno.EBUSY
    await operations.release(second)
    await operations.release(await opened())
