"""A campaign of versions: one program publishes a file again and again, and another one follows it."""

from __future__ import annotations

import json
import statistics
import time

import numpy
from support.attaching import program
from support.cli import gpufs as command
from support.data import MIB
from support.processes import PATIENCE

import gpufs
from campaigns.harness import Place

# Publishes versions 2 to argv[3] of the file argv[1], which has argv[2] bytes, all of them the version's number.
PUBLISH = """
import errno, os, sys, time
import numpy, gpufs
path, size, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
for number in range(2, last + 1):
    content = numpy.full(size // 4, number, "u4")
    while True:
        try:
            with open(path + ".new", "wb", 0) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                for start in range(0, size, 64 << 20):
                    file.write(content.view("u1")[start : start + (64 << 20)])
            break
        except OSError as error:  # the limit of two versions: the follower still has the one before the last
            assert error.errno in (errno.EDQUOT, errno.ENOSPC), error
            time.sleep(0.005)
    gpufs.replace(path + ".new", path)
"""


def followed(place: Place) -> str:
    """No version is torn, and memory never holds more than two."""
    size, versions = (8 * MIB, 20) if place.quick else (256 * MIB, 1000)
    command("quota", "set", place.root, 2 * size + 4 * MIB)
    path = place.root / "weights"
    path.write_bytes(numpy.full(size // 4, 1, "u4").tobytes())
    array = gpufs.attach(path)
    weights = numpy.asarray(array).view("u4")
    pauses, peak, last = [], 0, 1
    status = place.root.parents[1] / ".gpufs/status"
    with gpufs.follow(array) as follower, program(PUBLISH, path, size, versions) as publisher:
        changed = time.monotonic()
        while last < versions:
            begin = time.perf_counter()
            if not follower.update():
                if time.monotonic() > changed + PATIENCE:
                    raise AssertionError(f"no version after {last} within {PATIENCE} s")
                time.sleep(0.001)
                continue
            pauses.append(time.perf_counter() - begin)
            number = int(weights.min())
            if number != weights.max() or number <= last:
                raise AssertionError(f"a mixture of versions {number} and {weights.max()}, after {last}")
            last, changed = number, time.monotonic()
            peak = max(peak, json.loads(status.read_bytes())["devices"][0]["held_bytes"])
        if publisher.wait(PATIENCE):
            raise AssertionError("the publisher has failed")
    del weights
    array.close()
    del array
    if peak > 2 * size + 8 * MIB:
        raise AssertionError(f"{peak >> 20} MiB of memory for two versions of {size >> 20} MiB")
    command("quota", "remove", place.root)
    median, worst = 1000 * statistics.median(pauses), 1000 * max(pauses)
    return (
        f"{versions} versions of {size >> 20} MiB, {len(pauses)} taken over, pause median {median:.1f} ms, worst "
        f"{worst:.1f} ms, memory at most {peak >> 20} MiB"
    )
