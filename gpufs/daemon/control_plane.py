"""Joins the parts of the control plane: the files below .gpufs, the host's files, and the answers to requests."""

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
from gpufs.fs.layout import place_names
from gpufs.fs.quotas import Quotas
from gpufs.fs.replies import Replies


def build(request: MountRequest, mount: engine.Mount, serving: Serving) -> Operations:
    """Create the names that every mount has, and what answers for control files and the host's files."""
    values, opened, entry = request.config, mount.engine, serving.entry

    def leases(uid: int) -> list[dict[str, Any]]:
        found = serving.service.leases(uid) if serving.service is not None else []
        return _with_present_names(found, mount, request.mountpoint)

    status = MountStatus(
        mountpoint=request.mountpoint,
        driver=opened.driver,
        devices=opened.devices,
        knobs=values,
        files=mount.files,
        transfers=lambda: serving.service.statistics() if serving.service is not None else {},
        leases=leases,
        quotas=Quotas(mount).as_list,
        obstacle=serving.obstacle,
    )
    activity = MountActivity(
        status,
        mount,
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
    control_files = place_names(
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
        return Operations(handles, control_files)
    shares = [Share(*one) for one in values["backing"]]
    ids = {"uid": os.geteuid(), "gid": os.getegid()}
    try:
        backing = BackingHandler(mount, handles, replies, shares, device=entry.st_dev, **ids)
    except OSError as failure:
        path = os.fsdecode(failure.filename) if failure.filename else "backing"
        raise StartFailure.of(failure, f"backing: {path}: ") from None
    return Operations(handles, control_files, backing)


def _with_present_names(leases: Sequence[dict[str, Any]], mount: engine.Mount, mountpoint: str) -> list[dict[str, Any]]:
    """Leases with the paths that their files have now, and "state".

    "present": a name leads to the file; "removed": none does, "path" is the former one; "replaced": that is another
    file's now.
    """
    prefix = mountpoint.rstrip("/") + "/"
    paths = {lease["path"] for lease in leases}
    former = {path: mount.find(os.fsencode(path.removeprefix(prefix))) for path in paths if path.startswith(prefix)}
    moved = {lease["inode"] for lease in leases if former.get(lease["path"]) != lease["inode"]}
    names = {ino: path for ino in moved if (path := mount.path(ino)) is not None}
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
