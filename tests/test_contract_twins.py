"""The same random system calls on the mount and on a tmpfs; the long form is the campaign of that name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from campaigns import twins

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 6])
def test_a_mount_and_a_tmpfs_agree(root: Path, seed: int) -> None:
    with twins.like_a_mount() as other:
        root.chmod(0o755)  # as the tmpfs's own root
        pair = (root / "ours", other / "theirs")
        for path in pair:
            path.mkdir()
            path.chmod(0o777)
        twins.play(*pair, seed, 250)
