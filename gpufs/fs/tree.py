"""The rules by which names come and go.

The tree keeps names and link counts, and updates the engine's table. That has a copy of the names: the engine answers
LOOKUP. The tree raises :class:`OSError` with the errno that the caller of the system call gets. A function that raises
has changed nothing.

Policy: the root and ``.gpufs`` belong to the mount. Nothing can be created, renamed or removed there, not even by root
(EPERM; for other users the mode 0555 forbids it). Below ``gpuN`` everything is as on tmpfs; names do not move or link
between devices, nor into a directory with a limit of its own or out of one (EXDEV).
"""

import errno
import stat
import time
from collections.abc import Callable, Iterable, Sequence

from gpufs.engine import NO_LIMIT, Attributes, Mount
from gpufs.fs.control_files import Content, ControlFile
from gpufs.fs.errors import error
from gpufs.fs.nodes import BufferFile, Directory, Node, Symlink
from gpufs.fs.requests import Caller

ROOT_INODE = 1
UNNAMED = b"/"  # the name that the data plane gives for O_TMPFILE
NAME_MAX = 255
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
RENAME_WHITEOUT = 4
BUFFER_BLOCK_SIZE = 1 << 20  # what programs read at once: larger only makes small reads slow
BLOCK_SIZE = 4096

_OWNERS_FILES = ("trace",)  # control files for the mount's owner alone
_SECOND = 1_000_000_000
_RENAME_FLAGS = RENAME_NOREPLACE | RENAME_EXCHANGE | RENAME_WHITEOUT
_SPECIAL_KINDS = (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK)


def check_name(name: bytes) -> None:
    """ENAMETOOLONG for a name of more than 255 bytes."""
    if len(name) > NAME_MAX:
        raise error(errno.ENAMETOOLONG)


def _check_new_name(name: bytes) -> None:
    check_name(name)
    if name in (b".", b"..", b""):
        raise error(errno.EEXIST)


class Tree:
    """The namespace of one mount.

    ``uuids``: of the devices, which have the directories gpu0, gpu1, ...; "" if a device has none. The directories
    belong to ``uid`` and ``gid`` with the permission bits ``device_mode``. ``.gpufs/by-uuid`` has a symbolic link to
    each, for a name that stays the same whatever the order of the devices. ``readme``: the text of ``README`` in the
    root. ``control_files``: name below ``.gpufs`` to the function that makes the content.
    """

    def __init__(
        self,
        table: Mount,
        uuids: Sequence[str],
        *,
        uid: int,
        gid: int,
        device_mode: int = 0o755,
        readme: bytes,
        control_files: dict[str, Callable[[int], Content]],
    ) -> None:
        self._table = table
        self._next_ino = ROOT_INODE + 1
        self.nodes: dict[int, Node] = {}
        self.files = [0] * len(uuids)  # buffers of each device
        self.root = Directory(ROOT_INODE, -1)
        self.root.parent = self.root
        control = Directory(self._take_ino(), -1)
        gpus = [Directory(self._take_ino(), index) for index in range(len(uuids))]
        by_uuid = Directory(self._take_ino(), -1)
        for directory in (self.root, control, by_uuid):
            directory.fixed = True
        self._add(self.root, 0o555, uid, gid, nlink=3 + len(uuids))
        self.root.names = 1
        self.place(self.root, b".gpufs", control, 0o555, uid, gid)
        for name, produce in control_files.items():
            mode = 0o400 if name in _OWNERS_FILES else 0o444
            self.place(control, name.encode(), ControlFile(self._take_ino(), produce), mode, uid, gid)
        text = ControlFile(self._take_ino(), lambda _: readme)
        self.place(self.root, b"README", text, 0o444, uid, gid, size=len(readme))
        self.place(control, b"by-uuid", by_uuid, 0o555, uid, gid)
        self._update_links(control)
        for index, gpu in enumerate(gpus):
            self.place(self.root, b"gpu%d" % index, gpu, device_mode, uid, gid)
            uuid = uuids[index].encode()
            if uuid and uuid not in by_uuid.entries:
                link = Symlink(self._take_ino(), -1, b"../../gpu%d" % index)
                link.fixed = True
                self.place(by_uuid, uuid, link, 0o777, uid, gid)

    # ---- finding ----

    def node(self, ino: int) -> Node:
        """The node of an inode number. ESTALE for one that is gone."""
        node = self.nodes.get(ino)
        if node is None:
            raise error(errno.ESTALE)
        return node

    def directory(self, ino: int) -> Directory:
        """The directory of an inode number. ENOTDIR if it is something else."""
        node = self.node(ino)
        if not isinstance(node, Directory):
            raise error(errno.ENOTDIR)
        return node

    def lookup(self, parent: int, name: bytes) -> Node:
        """The node behind a name; "." and ".." as well. ENOENT if there is none."""
        directory = self.nodes.get(parent)
        if isinstance(directory, Directory):
            node = directory.entries.get(name)
            if node is not None:
                return node
        if name == b".":  # also for other nodes: file handles of an NFS export are resolved in this way
            return self.node(parent)
        directory = self.directory(parent)
        if name == b"..":
            return directory.parent or self.root
        check_name(name)
        raise error(errno.ENOENT)

    def hold(self, ino: int) -> None:
        """Keeps a node until :meth:`forget`, as a reference of the kernel does. ESTALE for one that is gone."""
        self._table.inode_hold(self.node(ino).ino)

    def forget(self, ino: int, count: int) -> None:
        """Drops ``count`` references; a node without names goes with the last one."""
        node = self.nodes.get(ino)
        if node is None:
            return
        self._table.inode_drop(ino, count)
        self._drop_if_unused(node)

    def paths(self, inos: Iterable[int]) -> dict[int, bytes]:
        """A path of each file that has one, below the root."""
        found = {}
        for ino in inos:
            node = self.nodes.get(ino)
            if node is not None and node.name is not None and node.parent is not None:
                found[ino] = b"/".join([self.path(node.parent), node.name])
        return found

    def path(self, directory: Directory) -> bytes:
        """A directory's path below the root."""
        parts: list[bytes] = []
        while directory is not self.root and directory.parent is not None:
            parts.append(b"(removed)" if directory.name is None else directory.name)
            directory = directory.parent
        return b"/".join(reversed(parts))

    # ---- making ----

    def create(self, parent: int, name: bytes, mode: int, caller: Caller) -> BufferFile:
        """A new empty file. UNNAMED: without a name, which :meth:`link` may give it once."""
        if name == UNNAMED:
            directory = self.directory(parent)
            if directory.fixed:
                raise error(errno.EPERM)
            node = BufferFile(self._take_ino(), directory.device, unnamed=True)
            self._add(node, mode, caller.uid, caller.gid, nlink=0, parent=directory.ino, umask=caller.umask)
            node.parent = directory
            return node
        directory = self._open_for_new(parent, name)
        node = BufferFile(self._take_ino(), directory.device)
        self._make(directory, name, node, mode, caller)
        return node

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Directory:
        """A new directory."""
        directory = self._open_for_new(parent, name)
        node = Directory(self._take_ino(), directory.device)
        self._make(directory, name, node, mode, caller)
        return node

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Symlink:
        """A new symbolic link."""
        directory = self._open_for_new(parent, name)
        node = Symlink(self._take_ino(), directory.device, target)
        self._make(directory, name, node, 0o777, caller, size=len(target))
        return node

    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Node:
        """A new regular file, FIFO, socket or device node, by the type in ``mode``."""
        kind = stat.S_IFMT(mode) or stat.S_IFREG
        if kind == stat.S_IFREG:
            return self.create(parent, name, mode, caller)
        if kind not in _SPECIAL_KINDS:
            raise error(errno.EINVAL)
        directory = self._open_for_new(parent, name)
        node = Node(self._take_ino(), kind, directory.device)
        if kind not in (stat.S_IFCHR, stat.S_IFBLK):
            rdev = 0
        self._make(directory, name, node, mode, caller, rdev=rdev)
        return node

    def link(self, ino: int, parent: int, name: bytes, caller: Caller) -> Node:
        """One more name for a node."""
        node = self.node(ino)
        if isinstance(node, Directory) or node.fixed:
            raise error(errno.EPERM)
        directory = self._open_for_new(parent, name)
        if node.device != directory.device or node.limiting is not directory.limiting:
            raise error(errno.EXDEV)
        if node.names == 0 and not (isinstance(node, BufferFile) and node.unnamed):
            raise error(errno.ENOENT)
        node.names += 1
        try:
            self._update_links(node)  # first: the metadata limit may be reached
        except OSError:
            node.names -= 1
            raise
        self._attach(directory, name, node)
        if isinstance(node, BufferFile):
            node.unnamed = False
        return node

    # ---- unmaking ----

    def unlink(self, parent: int, name: bytes, caller: Caller | None = None) -> None:
        """Removes a name of anything but a directory."""
        directory = self._open_for_removal(parent)
        node = self._existing(directory, name)
        if isinstance(node, Directory):
            raise error(errno.EISDIR)
        self._detach(directory, name)
        node.names -= 1
        self._update_links(node)
        self._drop_if_unused(node)

    def remove_names(self, ino: int, most: int) -> list[tuple[int, bytes]]:
        """Removes the names of a file, so many at most; the directories and the names that it had there."""
        node = self.nodes.get(ino)
        removed: list[tuple[int, bytes]] = []
        if node is None or isinstance(node, Directory):
            return removed
        while len(removed) < most and node.name is not None and node.parent is not None:
            removed.append((node.parent.ino, node.name))
            self.unlink(*removed[-1])
        return removed

    def rmdir(self, parent: int, name: bytes, caller: Caller) -> None:
        """Removes an empty directory."""
        directory = self._open_for_removal(parent)
        if name == b".":
            raise error(errno.EINVAL)
        if name == b"..":
            raise error(errno.ENOTEMPTY)
        node = self._existing(directory, name)
        if not isinstance(node, Directory):
            raise error(errno.ENOTDIR)
        if node.entries:
            raise error(errno.ENOTEMPTY)
        self._detach(directory, name)
        self._close_directory(node)
        self._update_links(directory)
        self._drop_if_unused(node)

    def rename(
        self,
        old_parent: int,
        old_name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int,
        caller: Caller,
    ) -> None:
        """Moves a name, over what is there.

        ``flags``: RENAME_NOREPLACE (EEXIST if the new name is taken), RENAME_WHITEOUT (the old name becomes a device
        node 0:0 of the caller, by which overlays mark removed names), or RENAME_EXCHANGE alone (both must exist). The
        replaced name keeps its place in listings, so a program that lists the directory at the same time sees it
        exactly once.
        """
        if flags & ~_RENAME_FLAGS or (flags & RENAME_EXCHANGE and flags != RENAME_EXCHANGE):
            raise error(errno.EINVAL)
        source_directory = self._open_for_removal(old_parent)
        target_directory = self._open_for_removal(new_parent)
        if target_directory.closed:
            raise error(errno.ENOENT)
        check_name(new_name)
        if {old_name, new_name} & {b".", b"..", b""}:
            raise error(errno.EBUSY)
        node = self._existing(source_directory, old_name)
        target = target_directory.entries.get(new_name)
        if flags & RENAME_NOREPLACE and target is not None:
            raise error(errno.EEXIST)
        if flags == RENAME_EXCHANGE and target is None:
            raise error(errno.ENOENT)
        if source_directory.device != target_directory.device:
            raise error(errno.EXDEV)
        if source_directory.limiting is not target_directory.limiting:
            raise error(errno.EXDEV)
        if isinstance(node, Directory) and node.contains(target_directory):
            raise error(errno.EINVAL)
        if flags == RENAME_EXCHANGE and target is not None:
            if isinstance(target, Directory) and target.contains(source_directory):
                raise error(errno.EINVAL)
            self._exchange(source_directory, old_name, node, target_directory, new_name, target)
            return
        if node is target:
            return
        if target is not None:
            self._check_replaceable(node, target)

        whiteout = None
        if flags & RENAME_WHITEOUT:  # made first: without memory for it nothing changes
            whiteout = Node(self._take_ino(), stat.S_IFCHR, source_directory.device)
            self._add(whiteout, 0, caller.uid, caller.gid, nlink=1, parent=source_directory.ino)
        self._attach(target_directory, new_name, node)
        if whiteout is not None:
            self._attach(source_directory, old_name, whiteout)
            whiteout.names = 1
        else:
            self._detach(source_directory, old_name)
        if isinstance(target, Directory):
            self._close_directory(target)
        elif target is not None:
            target.names -= 1
            self._update_links(target)
        self._update_links(node)
        if isinstance(node, Directory):
            self._update_links(source_directory)
            self._update_links(target_directory)
        if target is not None:
            self._drop_if_unused(target)

    # ---- limits ----

    def limit(self, directory: Directory, limit: int) -> None:
        """Limits the memory of all that is and will be below a directory, in bytes; NO_LIMIT: not any more.

        EBUSY if a directory above or below it has a limit.
        """
        others = {node.limiting for node in self.nodes.values() if directory.contains(node)} - {None, directory}
        if others:
            raise error(errno.EBUSY)
        known = directory.limiting is directory
        if known and limit == NO_LIMIT:
            for node in [node for node in self.nodes.values() if node.limiting is directory]:
                self._table.charge_to(node.ino, 0)
                node.limiting = None
        self._table.limit_directory(directory.ino, limit)
        if not known and limit != NO_LIMIT:
            for node in [node for node in self.nodes.values() if directory.contains(node)]:
                self._table.charge_to(node.ino, directory.ino)
                node.limiting = directory

    # ---- inside ----

    def _take_ino(self) -> int:
        ino = self._next_ino
        self._next_ino += 1
        return ino

    def _open_for_new(self, parent: int, name: bytes) -> Directory:
        directory = self.directory(parent)
        _check_new_name(name)
        if name in directory.entries:
            raise error(errno.EEXIST)
        if directory.fixed:
            raise error(errno.EPERM)
        if directory.closed:
            raise error(errno.ENOENT)
        return directory

    def _open_for_removal(self, parent: int) -> Directory:
        directory = self.directory(parent)
        if directory.fixed:
            raise error(errno.EPERM)
        return directory

    def _existing(self, directory: Directory, name: bytes) -> Node:
        check_name(name)
        node = directory.entries.get(name)
        if node is None:
            raise error(errno.ENOENT)
        return node

    def _check_replaceable(self, node: Node, target: Node) -> None:
        if isinstance(target, Directory):
            if not isinstance(node, Directory):
                raise error(errno.EISDIR)
            if target.entries:
                raise error(errno.ENOTEMPTY)
        elif isinstance(node, Directory):
            raise error(errno.ENOTDIR)

    def _exchange(
        self,
        one_directory: Directory,
        one_name: bytes,
        one: Node,
        other_directory: Directory,
        other_name: bytes,
        other: Node,
    ) -> None:
        if one is other:
            return
        self._attach(one_directory, one_name, other)
        self._attach(other_directory, other_name, one)
        self._update_links(one)
        self._update_links(other)
        if isinstance(one, Directory) != isinstance(other, Directory):
            self._update_links(one_directory)
            self._update_links(other_directory)

    def _make(
        self,
        directory: Directory,
        name: bytes,
        node: Node,
        mode: int,
        caller: Caller,
        *,
        size: int = 0,
        rdev: int = 0,
    ) -> None:
        """Adds a new node as a user asked for it."""
        nlink = 2 if isinstance(node, Directory) else 1
        ids, above = (caller.uid, caller.gid), directory.ino
        self._add(node, mode, *ids, nlink=nlink, size=size, rdev=rdev, parent=above, umask=caller.umask)
        self._attach(directory, name, node)
        node.names = 1
        if isinstance(node, Directory):
            self._update_links(directory)

    def place(
        self, directory: Directory, name: bytes, node: Node, mode: int, uid: int, gid: int, size: int = 0
    ) -> None:
        """Adds a node of the mount's own."""
        if isinstance(node, Symlink):
            size = len(node.target)
        self._add(node, mode, uid, gid, nlink=2 if isinstance(node, Directory) else 1, size=size)
        self._attach(directory, name, node)
        node.names = 1

    def _add(
        self,
        node: Node,
        mode: int,
        uid: int,
        gid: int,
        *,
        nlink: int,
        size: int = 0,
        rdev: int = 0,
        parent: int = 0,
        umask: int = 0,
    ) -> None:
        seconds, nanoseconds = divmod(time.time_ns(), _SECOND)
        self.nodes[node.ino] = node
        try:
            self._table.inode_add(
                Attributes(
                    ino=node.ino,
                    size=size,
                    atime=seconds,
                    mtime=seconds,
                    ctime=seconds,
                    atime_ns=nanoseconds,
                    mtime_ns=nanoseconds,
                    ctime_ns=nanoseconds,
                    mode=node.kind | stat.S_IMODE(mode),
                    nlink=nlink,
                    uid=uid,
                    gid=gid,
                    rdev=rdev,
                    blksize=BUFFER_BLOCK_SIZE if isinstance(node, BufferFile) else BLOCK_SIZE,
                    device=node.device,
                ),
                parent,
                umask,
            )
        except BaseException:
            del self.nodes[node.ino]
            raise
        if isinstance(node, BufferFile):
            self.files[node.device] += 1
        if parent:
            node.limiting = self.directory(parent).limiting

    def _attach(self, directory: Directory, name: bytes, node: Node) -> None:
        self._table.name_set(directory.ino, name, node.ino)
        directory.attach(name, node)

    def _detach(self, directory: Directory, name: bytes) -> None:
        directory.detach(name)
        self._table.name_remove(directory.ino, name)

    def _update_links(self, node: Node) -> None:
        """Sets the link count, and the change time to now."""
        self._table.inode_links(node.ino, 2 + node.subdirectories if isinstance(node, Directory) else node.names)

    def _close_directory(self, directory: Directory) -> None:
        directory.names = 0
        directory.closed = True
        if directory.limiting is directory:
            self._table.limit_directory(directory.ino, NO_LIMIT)
        self._table.inode_links(directory.ino, 0)

    def _drop_if_unused(self, node: Node) -> None:
        if node.names == 0 and node.ino in self.nodes and self._table.inode_remove(node.ino):
            del self.nodes[node.ino]
            if isinstance(node, BufferFile):
                self.files[node.device] -= 1
