"""What `gpufs cp` has to copy: the names that sources get, and the trees below them, by the rules of cp(1).

Directories, symbolic links and special files are made here; regular files are handed on to be copied.
"""

from __future__ import annotations

import errno
import os
import stat

from gpufs.cli._errors import Failure
from gpufs.client._outcome import text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Protocol

    from gpufs.client import Cancellation, Copier

    class Report(Protocol):
        """Takes down what could not be copied: source, destination where that matters, errno and text."""

        def __call__(self, source: str, destination: str | None, number: int, text: str) -> None: ...


def targets(sources: Sequence[str], destination: str, *, no_target_directory: bool) -> Iterator[tuple[str, str]]:
    """The name that each source gets, by the rules of cp(1). Failure where they allow none."""
    if not destination or not all(sources):
        raise Failure("cp: an empty name is given where a file belongs", 2)
    try:
        is_directory = stat.S_ISDIR(os.stat(destination).st_mode)
    except FileNotFoundError:
        is_directory = False
    except OSError as error:
        raise Failure(f"cp: {destination}: {text_of(error)}") from None
    if no_target_directory:
        if len(sources) > 1:
            raise Failure(f"cp: --no-target-directory: more than one source: {sources[1]}", 2)
        yield sources[0], destination
        return
    if len(sources) > 1 and not is_directory:
        raise Failure(f"cp: {destination}: is not a directory, and there are {len(sources)} sources for it")
    for source in sources:
        name = os.path.basename(source.rstrip("/")) or "."
        yield source, os.path.join(destination, "." if name == ".." else name) if is_directory else destination


class Walk:
    """One walk over the sources. ``found`` is told of each file to copy, with its size in bytes, and may wait."""

    def __init__(
        self,
        copier: Copier,
        cancel: Cancellation,
        *,
        recursive: bool,
        preserve: bool,
        no_clobber: bool,
        found: Callable[[str, str, int], None],
        warn: Callable[[str], None],
        report: Report,
    ) -> None:
        self._copier = copier
        self._cancel = cancel
        self._recursive = recursive
        self._preserve = preserve
        self._no_clobber = no_clobber
        self._found = found
        self._warn = warn
        self._report = report
        self._made: dict[str, str] = {}  # destination: what it was made from
        self._directories: list[tuple[str, os.stat_result, bool]] = []  # what they were made from, and whether by us

    def find(self, source: str, destination: str) -> None:
        """Looks at one source, and at all that is below it."""
        if self._cancel.cancelled:
            return
        try:
            status = os.lstat(source) if self._recursive else os.stat(source)
        except OSError as error:
            self._fail(source, None, error)
            return
        if not stat.S_ISDIR(status.st_mode):
            self._find_file(source, destination, status, below=False)
        elif not self._recursive:
            self._report(source, None, errno.EISDIR, "is a directory (-r copies it)")
        elif not self._on_a_mount(status.st_dev, destination):
            self._report(source, destination, errno.EXDEV, "neither of them is on a gpufs mount: use cp")
        else:
            self._find_in_directory(source, destination, status)

    def finish(self) -> None:
        """Modes and times of directories, once nothing more is written into them."""
        for path, status, new in reversed(self._directories):
            mode = stat.S_IMODE(status.st_mode)
            try:
                if self._preserve:
                    try:
                        os.chown(path, status.st_uid, status.st_gid)
                    except PermissionError:
                        mode &= 0o777
                    os.chmod(path, mode)
                    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
                elif new and mode & stat.S_IRWXU != stat.S_IRWXU:
                    os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & (mode | ~stat.S_IRWXU))
            except OSError as error:
                self._fail(path, None, error)

    def _fail(self, source: str, destination: str | None, error: OSError) -> None:
        self._report(source, destination, error.errno or errno.EIO, text_of(error))

    def _on_a_mount(self, device: int, destination: str) -> bool:
        if self._copier.mount_of(device) is not None:
            return True
        for path in (destination, os.path.dirname(destination.rstrip("/")) or "."):
            try:
                return self._copier.mount_of(os.stat(path).st_dev) is not None
            except OSError:
                continue
        return True  # making it will tell what is wrong

    def _find_file(self, source: str, destination: str, status: os.stat_result, *, below: bool) -> None:
        name = os.path.normpath(destination)
        if name in self._made:
            before = self._made[name]
            if os.path.normpath(before) == os.path.normpath(source):
                self._warn(f"{source}: is given more than once")
            else:
                text = "another source of this command has been copied there"
                self._report(source, destination, errno.EEXIST, text)
            return
        self._made[name] = source
        if self._no_clobber and os.path.lexists(destination):
            return
        if stat.S_ISLNK(status.st_mode):
            self._copy_link(source, destination, status)
        elif below and not stat.S_ISREG(status.st_mode):
            self._copy_special(source, destination, status)
        else:
            self._found(source, destination, status.st_size if stat.S_ISREG(status.st_mode) else 0)

    def _find_in_directory(self, source: str, destination: str, status: os.stat_result) -> None:
        """Makes the directory and looks at everything in it."""
        inside = os.path.realpath(destination) + "/"
        if inside.startswith(os.path.realpath(source).rstrip("/") + "/"):
            self._report(source, destination, errno.EINVAL, "a directory cannot be copied into itself")
            return
        pending = [(source, destination, status)]
        while pending:
            source, destination, status = pending.pop()
            try:
                self._make_directory(destination, status)
                entries = sorted(os.listdir(source))
            except OSError as error:
                self._fail(str(error.filename or source), None, error)
                continue
            for name in entries:
                if self._cancel.cancelled:
                    return
                path, target = os.path.join(source, name), os.path.join(destination, name)
                try:
                    found = os.lstat(path)
                except OSError as error:
                    self._fail(path, None, error)
                    continue
                if stat.S_ISDIR(found.st_mode):
                    pending.append((path, target, found))
                else:
                    self._find_file(path, target, found, below=True)

    def _make_directory(self, path: str, status: os.stat_result) -> None:
        mode = stat.S_IMODE(status.st_mode)
        try:
            # The copy must be able to write there, whatever the mode will be in the end.
            os.mkdir(path, mode & 0o1777 | stat.S_IRWXU)
        except FileExistsError:
            # A link that somebody has put there would lead the copy out of its tree.
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "a file cannot be overwritten with a directory", path) from None
            if self._preserve:
                self._directories.append((path, status, False))
            return
        self._directories.append((path, status, True))

    def _copy_link(self, source: str, destination: str, status: os.stat_result) -> None:
        try:
            target = os.readlink(source)
            try:
                os.symlink(target, destination)
            except FileExistsError:
                os.unlink(destination)
                os.symlink(target, destination)
            if self._preserve:
                os.utime(destination, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)
        except OSError as error:
            self._fail(source, destination, error)

    def _copy_special(self, source: str, destination: str, status: os.stat_result) -> None:
        """A FIFO, socket or device: what it is, and nothing that is in it."""
        try:
            os.mknod(destination, status.st_mode & ~0o7000, status.st_rdev)
            if self._preserve:
                os.chmod(destination, stat.S_IMODE(status.st_mode) & 0o777)
                os.utime(destination, ns=(status.st_atime_ns, status.st_mtime_ns))
        except OSError as error:
            self._fail(source, destination, error)
