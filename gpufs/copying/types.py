"""Types for the caller of a copy: its options, progress and result, and the error if it fails; sums of progress."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from gpufs._naming import named_in
from gpufs.exceptions import DaemonDied, DeviceFull, NotOnMount, QuotaExceeded, class_of, text_of
from gpufs.syscalls import resident_bytes
from gpufs.units import bytes_text

Fastpath: TypeAlias = Literal["auto", "off", "require"]

# That a report keeps: a server can cause any number.
MOST_FAILURES: Final = 10_000
_MOST_RUNNING: Final = 10_000  # files in a sum of progress
_MOST_MEMORY: Final = 4 << 30

# The name of a pipe, in messages.
STREAM: Final = "-"


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    """Which files are copied, and how; :func:`gpufs.copy` and docs/cp.md describe the options.

    ``exact``: --no-target-directory. ``delete``: first remove what the source does not have. ``update``: skip what is
    the same, and give the other copies the times of their sources. ``replace``: a new file takes an existing name when
    it is complete. ValueError for a value that is not allowed.
    """

    fastpath: Fastpath = "auto"
    fsync: bool = False
    verify: bool = False
    preserve: bool = False
    partial: bool = False
    recursive: bool = False
    dereference: bool = False
    no_clobber: bool = False
    exact: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    update: bool = False
    dry_run: bool = False
    checksum: bool = False
    delete: bool = False
    replace: bool = False

    def __post_init__(self) -> None:
        if self.fastpath not in get_args(Fastpath):
            raise ValueError(f"fastpath: {self.fastpath!r} is not one of {', '.join(get_args(Fastpath))}")


_UNFIT: Final = {
    "a URL": {
        "preserve": "stores keep no modes, owners and times",
        "fastpath require": "its bytes pass through this process",
    },
    "HOST:PATH": {
        "partial": "a file comes whole or not at all",
        "fastpath require": "its bytes come from a network",
        "dry-run": "the other machine decides",
    },
}


def check_options(options: CopyOptions, where: Literal["a URL", "HOST:PATH"]) -> None:
    """Raise OSError EINVAL for options that a copy from or to such a name does not have."""
    for name, reason in _UNFIT[where].items():
        is_given = options.fastpath == "require" if " " in name else getattr(options, name.replace("-", "_"))
        if is_given:
            raise OSError(errno.EINVAL, f"--{name} cannot be used with {where}: {reason}")


def check_memory() -> None:
    """Raise OSError ENOMEM if the other side of a copy makes this process, which does nothing else, too large."""
    if resident_bytes() > _MOST_MEMORY:
        text = f"the copy takes {bytes_text(_MOST_MEMORY)} of memory: the other side sends too much at once"
        raise OSError(errno.ENOMEM, text)


@named_in("gpufs")
class CopyError(OSError):
    """A copy that failed or was cancelled (ECANCELED).

    It is also a :class:`NotOnMount`, :class:`DeviceFull`, :class:`QuotaExceeded` or :class:`DaemonDied` if that is the
    reason.

    Attributes
    ----------
    errno, strerror
        As of any OSError.
    filename, filename2
        The source and the destination, or the one of them that failed and None.
    bytes_done : int
        How many bytes of the source, from its start, the destination now holds; its size is no more than that. 0 if it
        was new and has been removed.
    bytes_total : int
        How many were to be copied, 0 if that is not known.
    left : str
        The state of the destination in words, "" if it is unchanged or removed.
    device_code : int
        The vendor runtime's own code, 0 if the failure is not the device's.
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
        return partial(type(self), **counts), (self.errno, self.strerror, self.filename, self.filename2)

    def __str__(self) -> str:
        where = str(self.filename) if self.filename2 is None else f"{self.filename} -> {self.filename2}"
        code = f" (device code {self.device_code})" if self.device_code else ""
        left = f" ({self.left})" if self.left else ""
        return f"{where}: {self.strerror}{code}{left}"


class NotOnMountCopyError(CopyError, NotOnMount):
    """A copy of which neither end is on a mount."""


class DeviceFullCopyError(CopyError, DeviceFull):
    """A copy that does not fit on its device."""


class QuotaExceededCopyError(CopyError, QuotaExceeded):
    """A copy that does not fit into its user's or directory's limit."""


class DaemonDiedCopyError(CopyError, DaemonDied):
    """A copy whose mount is dead."""


_CLASSES: Final[dict[type[OSError], type[CopyError]]] = {
    DeviceFull: DeviceFullCopyError,
    QuotaExceeded: QuotaExceededCopyError,
    DaemonDied: DaemonDiedCopyError,
}


def error_class(number: int) -> type[CopyError]:
    """The class of the error when a mount has failed a copy with this errno."""
    return _CLASSES.get(class_of(number), CopyError)


def as_os_error(error: Exception) -> OSError:
    """Return an exception that nobody expects as one for the user; an OSError stays what it is."""
    return error if isinstance(error, OSError) else OSError(errno.EIO, f"{type(error).__name__}: {error}")


def copy_error(error: OSError, source: str, destination: str | None = None) -> CopyError:
    """The error for the user; one that is for the user already stays what it is."""
    if isinstance(error, CopyError):
        return error
    number = error.errno or errno.EIO
    kind = NotOnMountCopyError if isinstance(error, NotOnMount) else error_class(number)
    return kind(number, text_of(error), source, destination)


@named_in("gpufs")
class CopyProgress(NamedTuple):
    """How far a copy is.

    Attributes
    ----------
    moved, total : int
        Bytes moved, and in all.
    paths : dict of str to int
        The bytes moved by each path, see :class:`CopyResult`.
    phase : str
        "copy", and then "verify" where that was asked for; the counts start again then.
    """

    moved: int
    total: int
    paths: dict[str, int]
    phase: str = "copy"


@named_in("gpufs")
class CopyResult(NamedTuple):
    """A copy that succeeded.

    Attributes
    ----------
    source, destination : str
        The files.
    bytes : int
        The bytes copied.
    seconds : float
        How long it took.
    method : str
        "transfer" (by the mount's daemon), "kernel" (copy_file_range inside the mount), "mount" (read and written
        through the mount), "remote" (from or to a URL) or "node" (from or to another machine).
    paths : dict of str to int
        Bytes by "fastpath", "fallback", "kernel", "mount", "remote", "pipe", "nixl", and "direct" (NIXL without
        buffers); "kept" counts what an earlier copy of a URL had stored, and "hole" holes, which stay holes: neither is
        moved.
    refusals : tuple of str
        Why the fastpath did not move all bytes.
    sha256 : str or None
        The hexadecimal checksum of both files, if verified.
    """

    source: str
    destination: str
    bytes: int
    seconds: float
    method: str
    paths: dict[str, int]
    refusals: tuple[str, ...] = ()
    sha256: str | None = None


# Takes the progress of copies; None: nobody sees it.
Progress: TypeAlias = Callable[[CopyProgress], None] | None
# The result of one copy of several.
Outcome: TypeAlias = CopyResult | CopyError


# The progress of a copy is reported about ten times a second.
PROGRESS_SECONDS: Final = 0.1


class Pace:
    """Lets only so many reports of one copy through."""

    def __init__(self) -> None:
        self._last = 0.0

    def is_due(self) -> bool:
        """Return whether to report now; it counts as reported then."""
        now = time.monotonic()
        if now - self._last < PROGRESS_SECONDS:
            return False
        self._last = now
        return True


class Report:
    """Receives the reports of copies, from any thread. This one ignores them."""

    def planned(self, size: int) -> None:
        """``size`` more bytes are to be copied."""

    def reporter(self, source: str) -> Progress:
        """Return what takes the progress of one copy."""
        return None

    def finished(self, source: str, destinations: Sequence[str], outcomes: Sequence[Outcome], hop: int = 0) -> None:
        """Take what became of the copies of a file. ``hop``: the machine of a chain that has them."""

    def failed(self, source: str, destination: str | None, error: OSError) -> None:
        """Take a failure other than that of a copy. ``destination``: None if it does not matter."""

    def skipped(self) -> None:
        """Count a file that exists already."""

    def deleted(self, path: str) -> None:
        """Take what has been removed, since the source does not have it."""

    def noticed(self, text: str) -> None:
        """Take a line for the user."""

    def tick(self) -> None:
        """Called about ten times a second, by the thread that waits for the others."""

    def host_lost(self, hop: int, error: CopyError) -> None:
        """The machine ``hop`` of a chain has failed, and those after it get nothing more."""


class CountingReport(Report):
    """Counts the bytes of files that are copied at the same time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0
        self._ended = 0  # bytes of the files that have ended
        self._ended_paths: Counter[str] = Counter()  # the same, by path
        self._running: dict[str, CopyProgress] = {}  # by source

    def planned(self, size: int) -> None:
        with self._lock:
            self._total += size

    def progressed(self, source: str, progress: CopyProgress) -> None:
        """Take the progress of one copy. While it is verified, it stays at what it has moved."""
        if progress.phase == "copy":
            with self._lock:
                if len(self._running) < _MOST_RUNNING or source in self._running:
                    self._running[source] = progress

    def count(self, source: str, outcomes: Sequence[Outcome]) -> None:
        """Count what became of the copies of a file."""
        with self._lock:
            self._running.pop(source, None)
            for outcome in outcomes:
                if isinstance(outcome, CopyError):
                    self._ended += outcome.bytes_done
                else:
                    self._ended += outcome.bytes
                    self._ended_paths.update(outcome.paths)

    def progress(self) -> CopyProgress:
        """Return the sums."""
        with self._lock:
            paths = self._ended_paths.copy()
            for running in self._running.values():
                paths.update(running.paths)
            moved = self._ended + sum(running.moved for running in self._running.values())
            return CopyProgress(moved, max(self._total, moved), dict(paths))
