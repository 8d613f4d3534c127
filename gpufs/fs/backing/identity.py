"""Acting as the caller of a system call: threads of root's daemon take over the caller's user and groups."""

import contextlib
import ctypes
import errno
import os
import platform
from collections.abc import Iterator, Sequence
from typing import Final

from gpufs.fs.errors import error

_SYS_SETGROUPS: Final = {"x86_64": 116, "aarch64": 159}.get(platform.machine(), -1)

_libc = ctypes.CDLL(None, use_errno=True)


def _set_groups(groups: Sequence[int]) -> None:
    """Sets those of the calling thread; the C library's function would set those of the whole process."""
    if _SYS_SETGROUPS < 0:
        raise error(errno.ENOSYS)
    array = (ctypes.c_uint32 * len(groups))(*groups)
    if _libc.syscall(_SYS_SETGROUPS, len(groups), array):
        raise error(ctypes.get_errno())


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
    _set_groups(groups)
    try:
        _libc.setfsgid(gid)
        _libc.setfsuid(uid)  # drops the capabilities over files too
        yield
    finally:
        _libc.setfsuid(0)
        _libc.setfsgid(os.getegid())
        _set_groups(before)


@contextlib.contextmanager
def with_daemons_rights() -> Iterator[None]:
    """Inside of acting_as(): the daemon's own rights over files."""
    if os.geteuid() != 0:
        yield
        return
    caller = _libc.setfsuid(0)
    try:
        yield
    finally:
        _libc.setfsuid(caller)
