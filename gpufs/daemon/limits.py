"""What the kernel lets the daemon use, and what it takes from the daemon when memory is short."""

import logging
import os
import resource
from pathlib import Path
from typing import Final

from gpufs import config

log = logging.getLogger("gpufs.daemon")

# Descriptors that root's daemon raises its limit to, if the kernel allows that many.
_DESCRIPTORS: Final = 1 << 20
# Of -1000 (never killed) to 1000: everything else that takes memory is killed first.
_OOM_SCORE: Final = -900


def set_limits(*, core_dumps: bool) -> None:
    """Raise the limits on descriptors and file sizes, and forbid core files unless they are wanted.

    The host driver's devices are files, and the kernel applies each client's own limit on file sizes. Core files never
    contain device memory or pinned memory: those mappings are excluded.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        largest = max(most, min(int(Path("/proc/sys/fs/nr_open").read_text()), _DESCRIPTORS))
        resource.setrlimit(resource.RLIMIT_NOFILE, (largest, largest))
    except (OSError, ValueError):  # without CAP_SYS_RESOURCE
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, PermissionError):  # without CAP_SYS_RESOURCE
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most if core_dumps else 0, most))


def spare_from_oom_killer(root: Path = Path("/")) -> None:
    """Make the kernel kill other processes first when memory is short, and so for processes that are started later.

    For root's mounts alone: many programs depend on them. In a cgroup with a limit the order of its processes is left
    to whoever has set the limit. ``root`` contains /proc and /sys.
    """
    if os.geteuid() != 0 or config.is_memory_limited(root):
        return
    score = root / "proc/self/oom_score_adj"
    try:
        if int(score.read_text()) > _OOM_SCORE:
            score.write_text(str(_OOM_SCORE))
    except OSError as failure:  # without CAP_SYS_RESOURCE
        log.info("oom_score_adj stays as it is: %s", failure.strerror)
