"""Acting as the caller of a system call: threads of root's daemon take over the caller's user and groups."""

import contextlib
import ctypes
import errno
import os
import platform
from collections.abc import Iterator, Sequence
from typing import Final

import pyfuse3

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


@contextlib.contextmanager
def acting_as(uid: int, gid: int, pid: int) -> Iterator[None]:
    """The calling thread has a user's rights over files. Only root's daemon can do that; a user's acts as itself."""
    if os.geteuid() != 0 or uid == 0:
        yield
        return
    try:
        groups = sorted(pyfuse3.get_sup_groups(pid)) if pid else []
    except (OSError, RuntimeError) as failure:
        if isinstance(failure, OSError) and failure.errno == errno.EMFILE:
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
