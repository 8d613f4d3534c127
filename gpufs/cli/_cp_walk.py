"""What `gpufs cp` has to copy: the names that sources get, and the trees below them, by the rules of cp(1).

Directories, symbolic links and special files are made here; regular files are handed on to be copied.
"""

from __future__ import annotations

import errno
import os
import stat

from gpufs.cli._errors import Failure
from gpufs.client._ends import preserve
from gpufs.client._outcome import text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any, Protocol, TypeAlias

    from gpufs.client import Cancellation, Copier

    # A directory's device and inode numbers, and those of the ones above it.
    _Chain: TypeAlias = "tuple[tuple[int, int], _Chain] | None"

    class Report(Protocol):
        """Takes down what could not be copied: source, destination where that matters, errno and text."""

        def __call__(self, source: str, destination: str | None, number: int, text: str) -> None: ...


def targets(
    sources: Sequence[str], destination: str, *, no_target_directory: bool, target_directory: bool
) -> Iterator[tuple[str, str]]:
    """The name that each source gets, by the rules of cp(1). Failure where they allow none.

    ``target_directory``: the destination was given as a directory, and must be one.
    """
    if not destination or not all(sources):
        raise Failure("cp: an empty name is given where a file belongs", 2)
    if no_target_directory and target_directory:
        raise Failure("cp: --target-directory and --no-target-directory contradict each other: leave one out", 2)
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
    if target_directory and not is_directory:
        raise Failure(f"cp: {destination}: is not a directory, as --target-directory says (mkdir makes one)")
    if len(sources) > 1 and not is_directory:
        raise Failure(f"cp: {destination}: is not a directory, and there are {len(sources)} sources for it")
    for source in sources:
        name = os.path.basename(source.rstrip("/")) or "."
        yield source, os.path.join(destination, "." if name == ".." else name) if is_directory else destination


class Walk:
    """One walk over the sources, by the command's options. ``found`` is told of each file to copy, with its size in
    bytes, and may wait. ``ask``: whether a file that exists may be overwritten.
    """

    def __init__(
        self,
        copier: Copier,
        cancel: Cancellation,
        options: Mapping[str, Any],
        *,
        found: Callable[[str, str, int], None],
        ask: Callable[[str], bool],
        warn: Callable[[str], None],
        report: Report,
    ) -> None:
        self._copier = copier
        self._cancel = cancel
        self._recursive: bool = options["recursive"]
        self._preserve: bool = options["preserve"]
        self._update: bool = options["update"]
        self._existing: str | None = options["existing"]
        self._remove: bool = options["remove_destination"]
        self._one_file_system: bool = options["one_file_system"]
        links = options["links"] or ("keep" if self._recursive else "follow")
        self._look_at_named = os.lstat if links == "keep" else os.stat
        self._look_below = os.stat if links == "follow" else os.lstat
        self._found = found
        self._ask = ask
        self._warn = warn
        self._report = report
        self._made: dict[str, str] = {}  # destination: what it was made from
        self._directories: list[tuple[str, os.stat_result, bool]] = []  # what they were made from, and whether by us
        self.skipped = 0  # files left alone because they exist

    def find(self, source: str, destination: str) -> None:
        """Looks at one source, and at all that is below it."""
        if self._cancel.cancelled:
            return
        try:
            status = self._look_at_named(source)
        except OSError as error:
            self._fail(source, None, error)
            return
        copied = stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode)  # the copier looks at its ends itself
        if stat.S_ISDIR(status.st_mode) and not self._recursive:
            self._report(source, None, errno.EISDIR, "is a directory (-r copies it)")
        elif not copied and not self._on_a_mount(status.st_dev, destination):
            self._report(source, destination, errno.EXDEV, "neither of them is on a gpufs mount: use cp")
        elif stat.S_ISDIR(status.st_mode):
            self._find_in_directory(source, destination, status)
        else:
            self._find_file(source, destination, status, below=False)

    def finish(self) -> None:
        """Modes and times of directories, once nothing more is written into them."""
        for path, status, new in reversed(self._directories):
            mode = stat.S_IMODE(status.st_mode)
            try:
                if self._preserve:
                    preserve(path, status)
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
        if not self._wanted(destination, status):
            self.skipped += 1
            return
        if stat.S_ISLNK(status.st_mode):
            self._copy_link(source, destination, status)
        elif below and not stat.S_ISREG(status.st_mode):
            self._copy_special(source, destination, status)
        else:
            self._found(source, destination, status.st_size if stat.S_ISREG(status.st_mode) else 0)

    def _wanted(self, destination: str, status: os.stat_result) -> bool:
        """Whether a file is to be made, by what is there already."""
        if not self._update and self._existing is None:
            return True
        follow = stat.S_ISREG(status.st_mode) and not self._remove
        try:
            there = os.stat(destination) if follow else os.lstat(destination)
        except OSError:
            return True  # making it will tell what is wrong
        if self._existing != "skip" and os.path.samestat(there, status):
            return True  # which is told
        if self._update and there.st_mtime_ns >= status.st_mtime_ns:
            return False
        return self._existing is None or (self._existing == "ask" and self._ask(destination))

    def _find_in_directory(self, source: str, destination: str, status: os.stat_result) -> None:
        """Makes the directory and looks at everything in it."""
        inside = os.path.realpath(destination) + "/"
        if inside.startswith(os.path.realpath(source).rstrip("/") + "/"):
            self._report(source, destination, errno.EINVAL, "a directory cannot be copied into itself")
            return
        device = status.st_dev
        made: set[tuple[int, int]] = set()  # by us; links can lead into them
        pending: list[tuple[str, str, os.stat_result, _Chain]] = [(source, destination, status, None)]
        while pending:
            source, destination, status, above = pending.pop()
            here = (status.st_dev, status.st_ino)
            try:
                if here in made:
                    raise OSError(errno.EINVAL, "a directory cannot be copied into itself", source)
                if self._look_below is os.stat and _is_in(here, above):
                    raise OSError(errno.ELOOP, "is a link to a directory that it lies in", source)
                self._make_directory(destination, status)
                if self._look_below is os.stat:
                    copy = os.stat(destination)
                    made.add((copy.st_dev, copy.st_ino))
                if self._one_file_system and status.st_dev != device:
                    continue
                entries = sorted(os.listdir(source))
            except OSError as error:
                self._fail(str(error.filename or source), None, error)
                continue
            for name in entries:
                if self._cancel.cancelled:
                    return
                path, target = os.path.join(source, name), os.path.join(destination, name)
                try:
                    found = self._look_below(path)
                except OSError as error:
                    self._fail(path, None, error)
                    continue
                if stat.S_ISDIR(found.st_mode):
                    pending.append((path, target, found, (here, above)))
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
                self._make_room(destination, status)
                os.symlink(target, destination)
            if self._preserve:
                preserve(destination, status, link=True)
        except OSError as error:
            self._fail(source, destination, error)

    def _copy_special(self, source: str, destination: str, status: os.stat_result) -> None:
        """A FIFO, socket or device: what it is, and nothing that is in it."""
        try:
            mode = status.st_mode & ~0o7000
            try:
                os.mknod(destination, mode, status.st_rdev)
            except FileExistsError:
                self._make_room(destination, status)
                os.mknod(destination, mode, status.st_rdev)
            if self._preserve:
                preserve(destination, status)
        except OSError as error:
            self._fail(source, destination, error)

    def _make_room(self, destination: str, source: os.stat_result) -> None:
        """What is there goes, as with cp(1), unless it is the source itself."""
        there = os.lstat(destination)
        if os.path.samestat(there, source):
            raise OSError(errno.EINVAL, "is the same file as the source", destination)
        os.unlink(destination)


def _is_in(directory: tuple[int, int], chain: _Chain) -> bool:
    """Whether it is one of those in a chain of directories."""
    while chain is not None:
        one, chain = chain
        if one == directory:
            return True
    return False
