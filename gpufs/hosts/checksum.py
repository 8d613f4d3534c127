"""The checksum of a file on its way between machines."""

from __future__ import annotations

import hashlib
from typing import Final

_ZEROS: Final = bytes(1 << 20)


class Checksum:
    """SHA-256 of the bytes of a file, if it is verified.

    Otherwise the bytes are as safe as ssh and the network make them: a checksum halves the rate of a fast network.
    """

    def __init__(self, *, verify: bool) -> None:
        self._sha256 = hashlib.sha256() if verify else None

    def update(self, data: memoryview) -> None:
        """Add bytes."""
        if self._sha256 is not None:
            self._sha256.update(data)

    def skip(self, count: int) -> None:
        """Add a hole."""
        while self._sha256 is not None and count:
            step = min(count, len(_ZEROS))
            self._sha256.update(_ZEROS[:step])
            count -= step

    @property
    def text(self) -> str:
        """In hexadecimal; "" if the file is not verified."""
        return "" if self._sha256 is None else self._sha256.hexdigest()
