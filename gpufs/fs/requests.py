"""What requests have in common: who makes them, and what one changes about an inode."""

from dataclasses import dataclass


@dataclass(slots=True)
class Caller:
    """The process that made a request. ``umask``: only where something is made."""

    uid: int
    gid: int
    pid: int
    umask: int = 0


@dataclass(slots=True)
class Changes:
    """The attributes that SETATTR sets. None: stays as it is. Times are in nanoseconds."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime: int | None = None
    mtime: int | None = None
