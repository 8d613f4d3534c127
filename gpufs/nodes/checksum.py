"""The checksum of a file on its way between machines."""

from __future__ import annotations

import hashlib
import zlib
from typing import Final

_ZEROS: Final = bytes(1 << 20)


class Checksum:
    """The checksum of a file that is sent: SHA-256 of all bytes, or CRC-32 of the bytes outside holes."""

    def __init__(self, *, verify: bool) -> None:
        self._sha256 = hashlib.sha256() if verify else None
        self._crc32 = 0

    def update(self, data: memoryview) -> None:
        """Add bytes."""
        if self._sha256 is not None:
            self._sha256.update(data)
        else:
            self._crc32 = zlib.crc32(data, self._crc32)

    def skip(self, count: int) -> None:
        """Add a hole."""
        while self._sha256 is not None and count:
            step = min(count, len(_ZEROS))
            self._sha256.update(_ZEROS[:step])
            count -= step

    @property
    def text(self) -> str:
        """The checksum."""
        return f"{self._crc32:08x}" if self._sha256 is None else self._sha256.hexdigest()
