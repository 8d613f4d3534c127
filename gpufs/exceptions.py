"""The failures that programs distinguish by class: each is an OSError, with the errno of the call that failed."""

from __future__ import annotations

import errno
import os
import pwd
import re
from collections.abc import Iterator
from contextlib import contextmanager

from gpufs._naming import named_in

DEAD = (errno.ENOTCONN, errno.ECONNABORTED)  # what the kernel answers for a mount whose daemon has died
_CONNECTION_ENDED = (errno.ECONNRESET, errno.EPIPE)  # of a client to its daemon, and no other daemon has taken over


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


def class_of(number: int) -> type[OSError]:
    """The class of the error when a call about a file of a mount fails with this errno."""
    if number in DEAD:
        return DaemonDied
    return {errno.ENOSPC: DeviceFull, errno.EDQUOT: QuotaExceeded}.get(number, OSError)


def text_of(error: OSError) -> str:
    if error.errno in DEAD:
        return "the daemon of the gpufs mount has died (gpufs umount cleans up)"
    return error.strerror or str(error)


def failure_of_mount(error: OSError, path: str) -> OSError:
    """The error for the user when a call about a file of a mount, or a request to its daemon, fails."""
    number = error.errno or errno.EIO
    if number in (*DEAD, *_CONNECTION_ENDED):
        error = OSError(number := errno.ENOTCONN, os.strerror(errno.ENOTCONN))
    text = text_of(error)
    return class_of(number)(number, text, path)


@contextmanager
def as_failure_of_mount(path: str) -> Iterator[None]:
    """Raise failure_of_mount() for what fails in this block."""
    try:
        yield
    except NotOnMount:
        raise
    except OSError as error:
        raise failure_of_mount(error, path) from None


def with_user_names(text: str) -> str:
    """Return what a daemon says about users, in which it has their numbers: looking up a name may take it long."""

    def name(found: re.Match[str]) -> str:
        try:
            return pwd.getpwuid(int(found[1])).pw_name
        except (KeyError, OverflowError):
            return found[1]

    return re.sub(r"(?<=\buser )(\d+)(?= on (?:gpu|host)| may | has |[,)])", name, text)
