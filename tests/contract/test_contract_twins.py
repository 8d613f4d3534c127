"""The same random system calls on the mount and on a tmpfs; the long form is the campaign of that name.

They cover what other tests of the contract do not repeat: permissions, owners, modes and set-id bits, hard and
symbolic links, renames, limits of names, open flags, attributes and their flags, access control lists, times,
and positions.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from campaigns import twins
from support.mounting import Mounter

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("seed", range(1, 9))
def test_a_mount_and_a_tmpfs_agree(root: Path, seed: int, pytestconfig: pytest.Config) -> None:
    with twins.like_a_mount() as other:
        root.chmod(0o755)  # as the tmpfs's own root
        pair = (root / "ours", other / "theirs")
        for path in pair:
            path.mkdir()
            path.chmod(0o777)
        masked = any("mask-flags" in option for option in pytestconfig.getoption("mount_option"))
        twins.play(*pair, seed, 600, cached=masked)


def test_backing_directories_and_a_tmpfs_agree(
    mount: Mounter, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's file system answers below backing/, and gets what programs change there.

    Without links, which may not lead out, and set-id bits, which an open for writing clears (docs/contract.md).
    """
    monkeypatch.setattr(twins, "MODES", tuple(mode for mode in twins.MODES if mode < 0o2000))
    reference.chmod(0o755)
    mounted = mount("--backing", f"data={reference}", allow_other=True)
    with twins.like_a_mount() as other:
        for seed in range(1, 4):
            ours, theirs = reference / f"ours{seed}", other / "theirs"
            for path in (ours, theirs):
                path.mkdir()
                path.chmod(0o777)
            twins.play(mounted.path / "backing/data" / ours.name, theirs, seed, 300, without=["symlink"])
            assert twins.tree(os.fsencode(ours)) == twins.tree(os.fsencode(theirs))
            shutil.rmtree(theirs)
    mounted.unmount()
