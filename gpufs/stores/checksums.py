"""The checksums that stores have of their files, and comparing a copy with them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

_MIB: Final = 1 << 20
# The sizes of parts that programs upload with.
_PART_SIZES: Final = tuple(
    count * _MIB for count in (5, 8, 10, 15, 16, 20, 25, 32, 50, 64, 100, 128, 200, 250, 256, 512, 1024)
)


@dataclass(frozen=True, slots=True)
class Checksum:
    # "git": SHA-1 of a header and the content. "parts": the MD5 of the MD5s of parts, as an ETag of S3.
    kind: Literal["sha256", "git", "md5", "parts"]
    value: str  # hexadecimal
    part_sizes: tuple[int, ...] = ()  # of "parts": the sizes that the parts may have had


def of_etag(etag: str | None, size: int) -> Checksum | None:
    """Return the checksum in an ETag of S3, None if it has none.

    An ETag with a dash and the number N belongs to an object of N parts. It does not contain their size.
    """
    found = re.fullmatch(r'"([0-9a-f]{32})(?:-(\d{1,5}))?"', etag or "")
    if found is None:
        return None
    if found[2] is None:
        return Checksum("md5", found[1])
    count = int(found[2])
    sizes = tuple(part for part in _PART_SIZES if max(-(-size // part), 1) == count)
    return Checksum("parts", found[1], sizes) if sizes else None


class Verification:
    """Takes a copy's bytes in order, and compares them with the store's checksum."""

    def __init__(self, expected: Checksum | None, size: int) -> None:
        self._expected = expected
        self._whole = hashlib.sha256()
        self._others: list[Any] = []  # of which one must have the expected value, unless that is a SHA-256
        if expected is not None and expected.kind == "git":
            self._others = [hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)]
        elif expected is not None and expected.kind == "md5":
            self._others = [hashlib.md5(usedforsecurity=False)]
        elif expected is not None:
            self._others = [_Md5OfParts(part) for part in expected.part_sizes]

    def update(self, data: memoryview) -> None:
        for checksum in (self._whole, *self._others):
            checksum.update(data)

    @property
    def sha256(self) -> str:
        """The SHA-256 of the bytes so far, hexadecimal."""
        return self._whole.hexdigest()

    def matches(self) -> bool:
        """Return whether the bytes are those that the store has, as far as it has a checksum."""
        expected = self._expected
        if expected is None:
            return True
        values = [other.hexdigest() for other in self._others] if expected.kind != "sha256" else [self.sha256]
        return expected.value in values


class _Md5OfParts:
    """The MD5 of the MD5s of parts of one size."""

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._left = part_bytes
        self._part = hashlib.md5(usedforsecurity=False)
        self._digests: list[bytes] = []

    def update(self, data: memoryview) -> None:
        while data:
            step = data[: self._left]
            self._part.update(step)
            self._left -= len(step)
            data = data[len(step) :]
            if not self._left:
                self._end_part()

    def _end_part(self) -> None:
        self._digests.append(self._part.digest())
        self._part = hashlib.md5(usedforsecurity=False)
        self._left = self._part_bytes

    def hexdigest(self) -> str:
        digests = list(self._digests)
        if self._left < self._part_bytes:
            digests.append(self._part.digest())
        return hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()


def verify(
    blocks: Iterator[memoryview], expected: Checksum | None, size: int, report: Callable[[int], None]
) -> Verification:
    """Return the verification of a copy, whose content ``blocks`` yields."""
    verification, done = Verification(expected, size), 0
    for block in blocks:
        verification.update(block)
        done += len(block)
        report(done)
    return verification
