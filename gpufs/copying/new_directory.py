"""A directory that gets its name when it is complete and on its disk, or never."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import ExitStack, suppress
from typing import Final

from gpufs import safe_path, syscalls
from gpufs.copying.entries import sync_directory
from gpufs.copying.manifest import is_save
from gpufs.new_file import has_name, part_name
from gpufs.syscalls import closed_after
from gpufs.trees import remove_below, remove_tree

_RENAME_EXCHANGE: Final = 2
_LOCK_SECONDS: Final = 2.0  # for a process that has just been killed to end
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NewDirectory:
    """A new directory of a save, as part_name() beside the one that it becomes.

    What a process that has died has left there is removed by the next one for the same name. OSError if it cannot have
    the name, which is absolute and without symbolic links: of what has the name only a save or an empty directory is
    replaced.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        above, self._name = os.path.split(path)
        self._part = part_name(self._name)
        with ExitStack() as opened:
            self._above = safe_path.open_path(above, os.O_PATH | os.O_DIRECTORY)
            opened.callback(os.close, self._above)
            try:
                self._old = self._find_old()
                self.fd = self._open()  # for reading
                opened.callback(os.close, self.fd)
                opened.callback(self._remove)
                if self._old is not None:
                    self._check_exchange()
            except OSError as error:
                raise OSError(error.errno, error.strerror, self._path) from None
            self._closing = opened.pop_all()

    def _find_old(self) -> os.stat_result | None:
        """Return the directory that it replaces, None if there is none, or an empty one."""
        try:
            fd = os.open(self._name or "/", _OPEN, dir_fd=self._above)
        except FileNotFoundError:
            return None
        with closed_after(fd):
            status = os.fstat(fd)
            if not self._name or status.st_dev != os.fstat(self._above).st_dev:
                raise OSError(errno.EBUSY, "a file system is mounted there: give the name of a directory in it")
            if not os.listdir(fd):
                return None
            if not is_save(fd):
                text = "exists and is not a save, nor empty: give another name, or a new one below it"
                raise OSError(errno.EEXIST, text)
            return status

    def _open(self) -> int:
        """Create the directory, or take over and empty that of a process that has died. Returns it, locked."""
        with suppress(FileExistsError):
            os.mkdir(self._part, 0o700, dir_fd=self._above)
        fd = os.open(self._part, _OPEN, dir_fd=self._above)
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                raise OSError(errno.EEXIST, f"{self._part} beside it belongs to another user: remove it")
            deadline = time.monotonic() + _LOCK_SECONDS
            while not _is_locked(fd):
                if time.monotonic() > deadline:
                    raise OSError(errno.EBUSY, "another save to this name is in progress")
                time.sleep(0.02)
            if not has_name(fd, self._part, self._above):
                raise OSError(errno.EBUSY, "another save to this name has just ended")
            os.fchmod(fd, 0o700)
            remove_below(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_exchange(self) -> None:
        """Raise OSError now rather than in the end if the file system cannot exchange two names."""
        for name in ("a", "b"):
            os.mkdir(name, dir_fd=self.fd)
        try:
            syscalls.renameat2(self.fd, b"a", self.fd, b"b", _RENAME_EXCHANGE)
        except OSError as error:
            text = "its file system cannot replace a directory in one step: give a name that does not exist"
            raise OSError(error.errno, text) from None
        for name in ("a", "b"):
            os.rmdir(name, dir_fd=self.fd)

    def complete(self) -> None:
        """Give it its name in one step, and remove what had the name. What it has is on its disk already."""
        part, name = os.fsencode(self._part), os.fsencode(self._name)
        if not has_name(self.fd, self._part, self._above):
            raise OSError(errno.EBUSY, f"another process has renamed {self._part} beside it", self._path)
        if self._old is None:
            os.rename(part, name, src_dir_fd=self._above, dst_dir_fd=self._above)
        else:
            syscalls.renameat2(self._above, part, self._above, name, _RENAME_EXCHANGE)
            replaced = os.stat(part, dir_fd=self._above, follow_symlinks=False)
            if not os.path.samestat(replaced, self._old):
                syscalls.renameat2(self._above, part, self._above, name, _RENAME_EXCHANGE)
                raise OSError(errno.EBUSY, "another process has put something else there", self._path)
        sync_directory(self._above)
        if self._old is not None:
            with suppress(OSError):  # the next save removes it
                remove_tree(self._above, self._part)

    def _remove(self) -> None:
        if has_name(self.fd, self._part, self._above):
            with suppress(OSError):  # the next save removes it
                remove_tree(self._above, self._part)

    def close(self) -> None:
        """Close it, and remove it if it is not complete."""
        self._closing.close()


def _is_locked(fd: int) -> bool:
    """Return whether nobody else has a directory, which is then locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # not all file systems have locks
    return True
