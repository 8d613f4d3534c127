"""Places at which an engine of a model server waits for its test."""

from __future__ import annotations

import os
import time
from pathlib import Path


def stop(folder: str | None, name: str) -> None:
    """Creates a file of that name in the folder, and waits for "NAME-go". No folder: does nothing."""
    if folder is None:
        return
    Path(folder, name).touch()
    for _ in range(6000):
        if os.path.exists(f"{folder}/{name}-go"):
            return
        time.sleep(0.1)
    raise TimeoutError(f"nothing created {folder}/{name}-go")
