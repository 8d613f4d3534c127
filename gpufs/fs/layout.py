"""The names that every mount has: README, ``.gpufs`` and the directories of the devices."""

import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gpufs.engine import Attributes, Mount
from gpufs.fs.control_files import Content, ControlFile

ROOT_INODE: Final = 1
_OWNERS_FILES: Final = ("trace",)  # control files for the mount's owner alone


def place_names(
    mount: Mount,
    uuids: Sequence[str],
    *,
    uid: int,
    gid: int,
    device_mode: int = 0o755,
    readme: bytes,
    control_files: Mapping[str, Callable[[int], Content]],
) -> dict[int, ControlFile]:
    """Create the names that every mount has.

    Parameters
    ----------
    mount
        A mount without names.
    uuids
        Of the devices, which have the directories gpu0, gpu1, ...; "" if a device has none. ``.gpufs/by-uuid`` has a
        symbolic link to each, for a name that stays the same whatever the order of the devices.
    uid, gid, device_mode
        Owner of all names, and the permission bits of the devices' directories.
    readme
        The text of ``README``.
    control_files
        Name below ``.gpufs`` to the function that makes the content.

    Returns
    -------
    dict
        The control files by inode number.
    """

    def place(directory: int, name: bytes, mode: int, *, device: int = -1, size: int = 0, target: bytes = b"") -> int:
        attributes = Attributes(mode=mode, uid=uid, gid=gid, size=size, device=device)
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
    for index, uuid in enumerate(uuids):
        place(root, b"gpu%d" % index, stat.S_IFDIR | device_mode, device=index)
        if uuid and uuid not in uuids[:index]:
            place(by_uuid, uuid.encode(), stat.S_IFLNK | 0o777, target=b"../../gpu%d" % index)
    return placed
