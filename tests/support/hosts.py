"""Scripts that replace ssh in copies between hosts."""

from __future__ import annotations

import sys
from pathlib import Path

from support.mounting import Session

THROTTLE = """
import os, sys, time
while block := os.read(0, 1 << 18):
    time.sleep(len(block) / float(sys.argv[1]))
    while block:
        block = block[os.write(1, block) :]
"""


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def throttled_shell(session: Session) -> Path:
    """A shell whose pipe moves 15 MB/s at most, so that NIXL is the faster way."""
    throttle = f"{sys.executable} {script(session.scratch / 'throttle.py', THROTTLE)} 15e6"
    return script(session.scratch / "slow-rsh", f'#!/bin/sh\nshift\n{throttle} | "$@" | {throttle}\n')
