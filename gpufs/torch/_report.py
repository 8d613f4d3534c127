"""Counts what a program gets in place and what is copied while it loads, and shows it as a table.

A tensor is in place as long as a storage over the file's memory exists. Copies that gpufs makes, or that it sees a
library make, are counted with their reason. What is gone without a reason the program has copied into memory of its
own, converted, merged, quantised or dropped.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from gpufs._naming import named_in
from gpufs.units import bytes_text

Reason = Literal["dtype", "device", "alignment", "buffer", "not mapped", "program"]
# A loading is over when nothing has been opened or taken for so long; longer while files are open, since a library may
# convert one tensor after the other.
_QUIET_SECONDS: Final = 2.0
_QUIET_WITH_OPEN_FILES: Final = 60.0
_MOST_FILES: Final = 1000  # in one report; the rest is one row
_OTHER_FILES: Final = "other files"
_TEXTS: Final[dict[str, str]] = {
    "dtype": "copied: another dtype was asked for",
    "device": "copied: another device was asked for",
    "alignment": "copied: misaligned",
    "buffer": "copied: buffers of modules, which write to them",
    "not mapped": "read by safetensors, because they cannot be in place",
    "program": "copied, converted or dropped by the program",
}


@named_in("gpufs.torch")
@dataclass(frozen=True, slots=True)
class Amount:
    """Some tensors.

    Attributes
    ----------
    tensors : int
        How many; 0 if that is not known.
    nbytes : int
        Their bytes in the file.
    """

    tensors: int
    nbytes: int


@named_in("gpufs.torch")
@dataclass(frozen=True, slots=True)
class FileReport:
    """The tensors of one file: those in place, and those that were copied.

    Attributes
    ----------
    path : str
        The file.
    in_place : Amount
        Tensors that are the file's memory.
    copied : dict of str to Amount
        The others by reason: "dtype" and "device" (the program asked for another one), "alignment", "buffer" (of a
        module), "not mapped" (the file has holes, for example), "program" (it has copied, converted or dropped them).
    """

    path: str
    in_place: Amount
    copied: dict[str, Amount]


@named_in("gpufs.torch")
@dataclass(frozen=True, slots=True)
class LoadReport:
    """The files that a program has loaded. ``str()`` makes a table of them.

    Attributes
    ----------
    files : tuple of FileReport
        In the order in which they were opened.
    """

    files: tuple[FileReport, ...]

    @property
    def in_place(self) -> Amount:
        """The tensors of all files that are in place."""
        return _sum(file.in_place for file in self.files)

    @property
    def copied(self) -> dict[str, Amount]:
        """The other tensors of all files, by reason."""
        reasons = dict.fromkeys(reason for file in self.files for reason in file.copied)
        return {reason: _sum(file.copied[reason] for file in self.files if reason in file.copied) for reason in reasons}

    def __str__(self) -> str:
        width = max(map(len, _TEXTS.values()))
        lines = []
        for file in (*self.files, *([FileReport("all files", self.in_place, self.copied)] if self.files[1:] else [])):
            lines.append(file.path)
            for text, amount in (("in place", file.in_place), *((_TEXTS[why], n) for why, n in file.copied.items())):
                count = f"{amount.tensors} tensors" if amount.tensors != 1 else "1 tensor"
                counted = count if amount.tensors or not amount.nbytes else ""
                lines.append(f"  {text:<{width}}  {counted:>14}  {bytes_text(amount.nbytes):>10}")
        return "\n".join(lines)


def _sum(amounts: Iterable[Amount]) -> Amount:
    listed = list(amounts)
    return Amount(sum(amount.tensors for amount in listed), sum(amount.nbytes for amount in listed))


class Counts:
    """Counts what is taken from one file. Thread-safe."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.changes: dict[str, tuple[object, object]] = {}  # of each reason what the first copy is, and of what
        self._lock = threading.Lock()
        self._tensors = 0  # taken
        self._nbytes = 0
        self._copied: dict[str, Counter[str]] = {}
        # The bytes of the tensors that are in place. Whoever takes one out needs no lock, as a finalizer may not wait.
        self._alive: dict[int, int] = {}

    def take(self, nbytes: int) -> int:
        """Count a tensor in place, and return its number for drop()."""
        number = next(_numbers)
        self._alive[number] = nbytes
        with self._lock:
            self._tensors += 1
            self._nbytes += nbytes
        loading.touch()
        return number

    def drop(self, number: int) -> None:
        """Note that a tensor in place is gone."""
        self._alive.pop(number, None)

    def copied(self, reason: Reason, nbytes: int, *, tensors: int = 1) -> None:
        """Count a copy of a tensor that was taken."""
        with self._lock:
            self._copied.setdefault(reason, Counter()).update(tensors=tensors, nbytes=nbytes)

    def became(self, dtype: Any, device: Any, result: Any) -> None:
        """Count what has become of a tensor of this dtype and device, if that is a copy: torch's tensor."""
        if result.dtype != dtype:
            self.copied("dtype", result.numel() * dtype.itemsize)
            self.changes.setdefault("dtype", (result.dtype, dtype))
        elif result.device != device:
            self.copied("device", result.nbytes)
            self.changes.setdefault("device", (result.device, device))

    def report(self) -> FileReport:
        with self._lock:
            alive = list(self._alive.values())
            amounts = {reason: Amount(n["tensors"], n["nbytes"]) for reason, n in self._copied.items()}
            known = _sum(amount for reason, amount in amounts.items() if reason != "not mapped")
            tensors = self._tensors - len(alive) - known.tensors
            nbytes = self._nbytes - sum(alive) - known.nbytes
            if tensors > 0 and nbytes >= 0:
                amounts["program"] = Amount(tensors, nbytes)
            return FileReport(self.path, Amount(len(alive), sum(alive)), amounts)


_numbers = itertools.count()


@dataclass(eq=False)
class Loading:
    """The files that are loaded together. Thread-safe."""

    _lock: Any = field(default_factory=threading.Lock)
    _files: dict[str, Counts] = field(default_factory=dict)
    _last: float = 0.0
    # The open files of programs that know nothing of gpufs. A program may drop one without closing it.
    open_files: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    _ended: bool = True
    warned: bool = False  # the program has been told that most is copied

    def touch(self) -> None:
        self._last = time.monotonic()

    def opened(self, path: str) -> Counts:
        """Return the counts of a file that is opened now."""
        with self._lock:
            if self._ended or self.seconds_left() <= 0:
                self._files = {}
                self._ended = self.warned = False
            self.touch()
            name = path if path in self._files or len(self._files) < _MOST_FILES else _OTHER_FILES
            return self._files.setdefault(name, Counts(name))

    def seconds_left(self) -> float:
        """Return when the loading is over if nothing else is loaded; 0 or less if it is."""
        quiet = _QUIET_WITH_OPEN_FILES if self.open_files else _QUIET_SECONDS
        return self._last + quiet - time.monotonic()

    def end(self) -> None:
        """Let the next file begin another loading."""
        self._ended = True

    def counts(self) -> list[Counts]:
        with self._lock:
            return list(self._files.values())

    def report(self) -> LoadReport | None:
        """Return the state; None if nothing was loaded."""
        files = tuple(counts.report() for counts in self.counts())
        return LoadReport(files) if files else None


loading: Final = Loading()


@named_in("gpufs.torch")
def last_report() -> LoadReport | None:
    """Return what this program has got in place when it last loaded something, and what was copied.

    It covers all files that were opened together, without a pause of two seconds between them: by the functions of
    ``gpufs.torch``, and by any library after :func:`use_in_place` or under ``gpufs run``. Call it while the model
    exists: a tensor that is gone counts as dropped by the program. The next file that is opened begins another report.

    Returns
    -------
    LoadReport or None
        None if nothing was loaded.

    Examples
    --------
    >>> model = AutoModelForCausalLM.from_pretrained("/mnt/gpufs/gpu0/Qwen3-8B")  # doctest: +SKIP
    >>> print(gpufs.torch.last_report())  # doctest: +SKIP
    """
    loading.end()
    return loading.report()
