"""Attributes of files that `gpufs save` keeps beside mode, owner and times: extended attributes and access lists."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

_ACCESS_LISTS: Final = ("system.posix_acl_access", "system.posix_acl_default")
_KEPT: Final = ("user.", "security.", "trusted.", *_ACCESS_LISTS)
# A file has 64 KiB of names at most, and each of these may have a value of 64 KiB.
MOST_BYTES: Final = 8 << 20


def read_xattrs(target: int | str) -> dict[str, bytes]:
    """Return those that the caller may see. ``target``: a descriptor, or path_of() an O_PATH one.

    OSError E2BIG for more than MOST_BYTES.
    """
    try:
        names = os.listxattr(target)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return {}
        raise
    values, total = {}, 0
    for name in names:
        if not name.startswith(_KEPT):
            continue
        try:
            values[name] = os.getxattr(target, name)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP):
                raise
            continue
        total += len(name) + len(values[name])
        if total > MOST_BYTES:
            raise OSError(errno.E2BIG, f"has more than {MOST_BYTES >> 20} MiB of extended attributes")
    return values


def may_set(name: str, *, trusted: bool) -> bool:
    """Return whether this user may set one. ``trusted``: also if it gives rights to programs."""
    return name.startswith(_KEPT if trusted and os.geteuid() == 0 else ("user.", *_ACCESS_LISTS))


def write_xattrs(target: int | str, xattrs: Mapping[str, bytes]) -> None:
    """Set these, and remove access lists that the file has inherited. ``target``: as of read_xattrs()."""
    inherited: list[str] = []
    with suppress(OSError):
        inherited = [name for name in os.listxattr(target) if name in _ACCESS_LISTS and name not in xattrs]
    for name in inherited:
        os.removexattr(target, name)
    for name, value in xattrs.items():
        os.setxattr(target, name, value)
