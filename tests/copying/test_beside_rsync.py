"""`gpufs sync` beside rsync, for random trees, changes and patterns; the long form is the campaign "copies"."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from campaigns import copies

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="sets owners"),
    pytest.mark.skipif(shutil.which("rsync") is None, reason="compares with rsync"),
]


@pytest.mark.parametrize("seed", range(6))
def test_both_make_equal_trees(root: Path, reference: Path, seed: int) -> None:
    copies.play(root, reference, seed, 4, kill=seed == 0)
