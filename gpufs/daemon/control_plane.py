"""Joins the parts of the control plane: the tree of names, the files below .gpufs, and the answers to requests."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from gpufs import engine
from gpufs.daemon.serving import Serving
from gpufs.daemon.startup import MountRequest, StartFailure
from gpufs.fs.backing import BackingHandler, Share
from gpufs.fs.control import MountActivity, MountStatistics, MountStatus, leases_text, readme_text, version_text
from gpufs.fs.control_files import Content
from gpufs.fs.dispatch import Operations
from gpufs.fs.handles import Handles
from gpufs.fs.nodes import Directory, Node
from gpufs.fs.quotas import Quotas
from gpufs.fs.replies import Replies
from gpufs.fs.tree import Tree


def build(request: MountRequest, mount: engine.Mount, serving: Serving) -> tuple[Operations, Tree]:
    """Return the control plane's answers to requests, and the tree of names that they are about."""
    values, opened, entry = request.config, mount.engine, serving.entry

    def leases(uid: int) -> list[dict[str, Any]]:
        listed = serving.service.leases(uid) if serving.service is not None else []
        return _with_present_names(listed, tree, request.mountpoint)

    status = MountStatus(
        mountpoint=request.mountpoint,
        driver=opened.driver,
        devices=opened.devices,
        knobs=values,
        statistics=mount.statistics,
        files=lambda index: tree.files[index],
        transfers=lambda: serving.service.statistics() if serving.service is not None else {},
        leases=leases,
        io=opened.io_statistics,
        quotas=lambda uid: Quotas(tree, mount).as_list(uid),
    )
    activity = MountActivity(
        status,
        mount,
        paths=lambda inos: tree.paths(inos),
        copies=lambda uid: serving.service.copies(uid) if serving.service is not None else [],
    )
    counted = MountStatistics(opened, request.mountpoint)
    contents: dict[str, Callable[[int], Content]] = {  # by the user that opens the file
        "version": lambda _: version_text(),
        "status": status.as_bytes,
        "stats": lambda _: counted.as_bytes(),
        "metrics": lambda _: counted.as_metrics(),
        "activity": activity.as_bytes,
        "socket": lambda _: os.fsencode(serving.socket_path) + b"\n",
        "leases": lambda uid: leases_text(leases(uid)),
        "trace": lambda _: engine.Trace(),
    }
    tree = Tree(
        mount,
        [device.info.uuid for device in opened.devices],
        uid=os.geteuid(),
        gid=os.getegid(),
        # As on tmpfs: every user with access to the mount may create files.
        device_mode=0o1777 if values["allow_other"] and os.geteuid() == 0 else 0o755,
        readme=readme_text(request.mountpoint, opened.devices, [share[0] for share in values["backing"] or ()]),
        control_files=contents,
    )
    handles = Handles()
    replies = Replies(values["entry_timeout"], values["attribute_timeout"])
    if not values["backing"]:
        return Operations(mount, handles, tree, replies), tree
    shares = [Share(*fields) for fields in values["backing"]]
    ids = {"uid": os.geteuid(), "gid": os.getegid()}
    try:
        backing = BackingHandler(tree, mount, handles, replies, shares, device=entry.st_dev, **ids)
    except OSError as failure:
        path = os.fsdecode(failure.filename) if failure.filename else "backing"
        raise StartFailure.of(failure, f"backing: {path}: ") from None
    return Operations(mount, handles, tree, replies, backing), tree


def _with_present_names(leases: Sequence[dict[str, Any]], tree: Tree, mountpoint: str) -> list[dict[str, Any]]:
    """Return leases with the paths that their files have now, and "state".

    "present": a name leads to the file; "removed": none does, "path" is the former one; "replaced": that is another
    file's now.
    """
    prefix = mountpoint.rstrip("/") + "/"
    paths = {lease["path"] for lease in leases}
    former = {path: _at(tree, path.removeprefix(prefix)) for path in paths if path.startswith(prefix)}
    moved = set()
    for lease in leases:
        node = former.get(lease["path"])
        if node is None or node.ino != lease["inode"]:
            moved.add(lease["inode"])
    names = tree.paths(moved)
    named = []
    for lease in leases:
        ino = lease["inode"]
        if ino not in moved:
            named.append({**lease, "state": "present"})
        elif ino in names:
            named.append({**lease, "path": prefix + os.fsdecode(names[ino]), "state": "present"})
        else:
            named.append({**lease, "state": "replaced" if former.get(lease["path"]) else "removed"})
    return named


def _at(tree: Tree, path: str) -> Node | None:
    """Return the node at a path below the root, without following symbolic links."""
    node: Node | None = tree.root
    for name in os.fsencode(path).split(b"/"):
        node = node.entries.get(name) if isinstance(node, Directory) else None
    return node
