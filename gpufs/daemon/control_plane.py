"""Joins the parts of the control plane: a mount's own names, the host's files, and the answers to requests."""

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gpufs import engine
from gpufs.daemon.serving import Serving
from gpufs.daemon.startup import MountRequest, StartFailure
from gpufs.fs.backing import BackingHandler, Share
from gpufs.fs.connection import Operations
from gpufs.fs.control_files import (
    ActivityReport,
    Content,
    ControlFile,
    StatisticsReport,
    StatusReport,
    leases_text,
    readme_text,
    version_text,
)
from gpufs.fs.quotas import Quotas
from gpufs.fs.requests import Handles

_OWNERS_FILES: Final = ("trace",)  # control files for the mount's owner alone


def build(request: MountRequest, mount: engine.Mount, serving: Serving) -> Operations:
    """Create the names that every mount has, and what answers for control files and the host's files."""
    values, opened, entry = request.config, mount.engine, serving.entry

    def leases(uid: int) -> list[dict[str, Any]]:
        listed = serving.service.leases(uid) if serving.service is not None else []
        return _with_present_names(listed, mount, request.mountpoint)

    status = StatusReport(
        mountpoint=request.mountpoint,
        driver=opened.driver,
        devices=opened.devices,
        knobs=values,
        files=mount.files,
        transfers=lambda: serving.service.statistics() if serving.service is not None else {},
        leases=leases,
        quotas=Quotas(mount).as_list,
        obstacle=serving.obstacle,
        began=serving.history.began,
        deaths={
            "count": serving.history.deaths,
            "last": serving.history.last_death,
            "cause": serving.history.cause or None,
        },
    )
    activity = ActivityReport(
        status,
        mount,
        copies=lambda uid: serving.service.copies(uid) if serving.service is not None else [],
    )
    counted = StatisticsReport(opened, request.mountpoint, serving.history.deaths)
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
    control_files = _place_names(
        mount,
        [device.info for device in opened.devices],
        uid=os.geteuid(),
        gid=os.getegid(),
        # Every user with access to the mount may create files, as on tmpfs.
        device_mode=0o1777 if values["allow_other"] and os.geteuid() == 0 else 0o755,
        readme=readme_text(request.mountpoint, opened.devices, [share[0] for share in values["backing"] or ()]),
        control_files=contents,
    )
    handles = Handles()
    if not values["backing"]:
        return Operations(handles, control_files)
    shares = [Share(*fields) for fields in values["backing"]]
    ids = {"uid": os.geteuid(), "gid": os.getegid()}
    try:
        backing = BackingHandler(mount, handles, shares, st_dev=entry.st_dev, **ids)
    except OSError as failure:
        path = os.fsdecode(failure.filename) if failure.filename else "backing"
        raise StartFailure.of(failure, f"backing: {path}: ") from None
    return Operations(handles, control_files, backing)


def _place_names(
    mount: engine.Mount,
    devices: Sequence[engine.DeviceInfo],
    *,
    uid: int,
    gid: int,
    device_mode: int,
    readme: bytes,
    control_files: Mapping[str, Callable[[int], Content]],
) -> dict[int, ControlFile]:
    """Create the names that every mount has, and return its control files by inode number.

    Each device gets its directory, gpu0, gpu1, ..., host0. ``.gpufs/by-uuid`` has a symbolic link to each that has a
    UUID, for a name that stays the same whatever the order of the devices. ``control_files``: by the name below
    ``.gpufs`` the function that makes the content.
    """

    def place(directory: int, name: bytes, mode: int, *, device: int = -1, size: int = 0, target: bytes = b"") -> int:
        attributes = engine.Attributes(mode=mode, uid=uid, gid=gid, size=size, device=device)
        return mount.place(directory, name, attributes, target or None)

    directory = stat.S_IFDIR | 0o555
    root = place(0, b"", directory)
    control = place(root, b".gpufs", directory)
    placed = {}
    for name, produce in control_files.items():
        mode = 0o400 if name in _OWNERS_FILES else 0o444
        placed[place(control, name.encode(), stat.S_IFREG | mode)] = ControlFile(produce)
    text = place(root, b"README", stat.S_IFREG | 0o444, size=len(readme))
    placed[text] = ControlFile(lambda _: readme)
    by_uuid = place(control, b"by-uuid", directory)
    linked = set()
    for index, info in enumerate(devices):
        place(root, info.directory.encode(), stat.S_IFDIR | device_mode, device=index)
        if info.uuid and info.uuid not in linked:
            linked.add(info.uuid)
            place(by_uuid, info.uuid.encode(), stat.S_IFLNK | 0o777, target=b"../../" + info.directory.encode())
    return placed


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
