"""Acting as the caller of a system call: threads of root's daemon take over the caller's user and groups."""

import contextlib
import errno
import os
from collections.abc import Iterator

from gpufs.syscalls import set_thread_groups, setfsgid, setfsuid


def _groups_of(pid: int) -> list[int]:
    """The supplementary groups of a process. OSError if it has gone."""
    with open(f"/proc/{pid}/status", "rb") as file:
        groups = next((line for line in file if line.startswith(b"Groups:")), b"")
    return sorted({int(group) for group in groups.split()[1:]})


@contextlib.contextmanager
def acting_as(uid: int, gid: int, pid: int) -> Iterator[None]:
    """The calling thread has a user's rights over files. Only root's daemon can do that; a user's acts as itself."""
    if os.geteuid() != 0 or uid == 0:
        yield
        return
    try:
        groups = _groups_of(pid) if pid else []
    except OSError as failure:
        if failure.errno == errno.EMFILE:
            raise
        groups = []  # the caller has gone or is in another PID namespace: it gets only its group
    before = os.getgroups()
    set_thread_groups(groups)
    try:
        setfsgid(gid)
        setfsuid(uid)  # drops the capabilities over files too
        yield
    finally:
        setfsuid(0)
        setfsgid(os.getegid())
        set_thread_groups(before)


@contextlib.contextmanager
def with_daemons_rights() -> Iterator[None]:
    """Inside of acting_as(): the daemon's own rights over files."""
    if os.geteuid() != 0:
        yield
        return
    caller = setfsuid(0)
    try:
        yield
    finally:
        setfsuid(caller)
