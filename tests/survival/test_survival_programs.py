"""Programs at work notice nothing of a daemon that is killed or restarted, or of a keeper that is killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.killing import kill_at_random

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="one program has a mount namespace of its own")


def test_programs_notice_nothing(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 4, seed=1, hold=True)
