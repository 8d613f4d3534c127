"""The failures that programs distinguish by class: each is an OSError, with the errno of the call that failed."""

from __future__ import annotations

import errno

from gpufs._naming import named_in

# What the kernel answers for a mount whose connection has ended.
_DEAD = (errno.ENOTCONN, errno.ECONNABORTED)


@named_in("gpufs")
class NotOnMount(OSError):
    """A file or directory is not on a gpufs mount (EXDEV)."""


@named_in("gpufs")
class DeviceFull(OSError):
    """A device has no memory left for a file, for the holes of one, or for a private copy (ENOSPC)."""


@named_in("gpufs")
class QuotaExceeded(OSError):
    """The memory would exceed the limit of a user or a directory (EDQUOT); `gpufs quota` sets these."""


@named_in("gpufs")
class DaemonDied(OSError):
    """The daemon of the mount has died (ENOTCONN); `gpufs umount` cleans up."""


_CLASSES: dict[int, type[OSError]] = {
    errno.ENOSPC: DeviceFull,
    errno.EDQUOT: QuotaExceeded,
    errno.ENOTCONN: DaemonDied,
}


def text_of(error: OSError) -> str:
    """A failure in words."""
    if error.errno in _DEAD:
        return "the daemon of the gpufs mount has died (gpufs umount cleans up)"
    return error.strerror or str(error)


def failure_of_mount(error: OSError, path: str) -> OSError:
    """The error for the user when a call about a file of a mount fails."""
    number = error.errno or errno.EIO
    return _CLASSES.get(number, OSError)(number, text_of(error), path)
