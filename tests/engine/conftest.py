"""Fixtures of the engine's tests."""

from collections.abc import Iterator

import pytest
from support.data import MIB

from gpufs import engine


@pytest.fixture
def host() -> Iterator[engine.Engine]:
    """An engine whose devices' memory programs can give: NumPy's arrays."""
    with engine.Engine("host", devices=1, memory_bytes=512 * MIB) as opened:
        yield opened
