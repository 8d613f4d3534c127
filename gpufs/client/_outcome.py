"""What a copy reports: its progress, its result, and why it failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

# What the kernel answers for a mount whose connection has ended.
_DEAD = (errno.ENOTCONN, errno.ECONNABORTED)


def text_of(error: OSError) -> str:
    """A failure in words."""
    if error.errno in _DEAD:
        return "the daemon of the gpufs mount has died (gpufs umount cleans up)"
    return error.strerror or str(error)


class CopyError(OSError):
    """A copy that failed or was cancelled (ECANCELED).

    ``errno`` and ``strerror`` as for any OSError; ``filename`` and ``filename2`` are the source and the destination, or
    the one of them that failed and None. ``bytes_done``: how many bytes of the source, from its start, the destination
    now holds; its size is no more than that. 0 if it was new and has been removed. ``left``: the state of the
    destination, in words, "" if it is unchanged or removed. ``device_code``: the vendor runtime's own code, 0 if the
    failure is not the device's.
    """

    def __init__(
        self,
        error: int,
        message: str,
        filename: str,
        filename2: str | None = None,
        *,
        bytes_done: int = 0,
        bytes_total: int = 0,
        device_code: int = 0,
        left: str = "",
    ) -> None:
        super().__init__(error, message or os.strerror(error), filename, None, filename2)
        self.bytes_done = bytes_done
        self.bytes_total = bytes_total
        self.device_code = device_code
        self.left = left

    def __reduce__(self) -> tuple[Callable[..., CopyError], tuple[object, ...]]:
        counts = {name: getattr(self, name) for name in ("bytes_done", "bytes_total", "device_code", "left")}
        return partial(CopyError, **counts), (self.errno, self.strerror, self.filename, self.filename2)

    def __str__(self) -> str:
        where = str(self.filename) if self.filename2 is None else f"{self.filename} -> {self.filename2}"
        code = f" (device code {self.device_code})" if self.device_code else ""
        left = f" ({self.left})" if self.left else ""
        return f"{where}: {self.strerror}{code}{left}"


class CopyProgress(NamedTuple):
    """How far a copy is: bytes moved, bytes in all, and the bytes moved by path.

    ``phase`` is "copy", and then "verify" where that was asked for; the counts start again then.
    """

    moved: int
    total: int
    paths: dict[str, int]
    phase: str = "copy"


class CopyResult(NamedTuple):
    """A copy that succeeded.

    ``method``: "transfer" (by the mount's daemon), "kernel" (copy_file_range inside the mount) or "mount" (read and
    written through the mount). ``paths``: bytes by "fastpath", "fallback", "kernel" and "mount"; "hole" counts holes,
    which stay holes and are not moved. ``refusals``: why the fastpath did not move all bytes. ``sha256``: the
    hexadecimal checksum of both files, if verified.
    """

    source: str
    destination: str
    bytes: int
    seconds: float
    method: str
    paths: dict[str, int]
    refusals: tuple[str, ...] = ()
    sha256: str | None = None
