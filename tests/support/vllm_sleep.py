"""vLLM's sleep mode with gpufs as its backend, in the environment of vLLM: which contents are there after each level.

vLLM's allocator, which needs a GPU, has a stand-in. Usage: vllm_sleep.py FILE, a file of a mount. Prints a line of
JSON: by what was asked for, whether the file was parked, what the allocator had after it, and the error's text.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import numpy
from vllm import device_allocator
from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

import gpufs
import gpufs.integrations.vllm

TAGS = ("weights", "kv_cache", "runtime", "cudagraph", "workspace")


class Allocator:
    """Drops what it shall not keep. full: keeping the last kind fails. usage: in bytes."""

    full = False
    usage = 1 << 20

    def __init__(self) -> None:
        self.contents = dict.fromkeys(TAGS, "kept")
        self._asleep: dict[str, str] = {}

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        for tag in TAGS:
            if self.full and tag == TAGS[-1]:
                raise MemoryError("no pinned memory")
            value = self.contents.pop(tag)
            self._asleep[tag] = value if tag in offload_tags else ""

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.contents |= self._asleep
        self._asleep.clear()

    def get_current_usage(self) -> int:
        return self.usage


def main() -> None:
    path = sys.argv[1]
    array = gpufs.attach(path, "r+")
    gpufs.integrations.vllm.register()
    backend = SleepModeBackendFactory.create_backend(SimpleNamespace(sleep_mode_backend="gpufs"))

    def attempt(level: int, **settings: object) -> tuple[bool, list[str], str]:
        allocator = Allocator()
        vars(allocator).update(settings)
        device_allocator.get_mem_allocator_instance = lambda: allocator
        error = ""
        try:
            backend.suspend(level)
        except (MemoryError, OSError) as failed:
            error = str(failed)
        parked = int(os.getxattr(path, "user.gpufs.parked_bytes")) > 0
        if not error:
            backend.resume()
        assert numpy.asarray(array)[:4].tobytes() == b"good"
        return parked, [tag for tag in TAGS if allocator.contents[tag]], error

    found = {f"level {level}": attempt(level) for level in range(3)}
    found["full"] = attempt(0, full=True)
    found["too large"] = attempt(0, usage=1 << 50)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
