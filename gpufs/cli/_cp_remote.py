"""The part of `gpufs cp` for URLs: which files are copied where, by the rules of cp(1)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from gpufs.cli._cp_options import CpOptions
from gpufs.cli._cp_walk import targets
from gpufs.client import Cancellation, Copier, CopyError
from gpufs.copying.entries import Entry
from gpufs.copying.store_copy import check_uploads
from gpufs.copying.types import STREAM, Outcome
from gpufs.exceptions import text_of
from gpufs.stores import finding, urls

if TYPE_CHECKING:
    from gpufs.cli._cp_walk import Report
    from gpufs.stores.files import StoreFile
    from gpufs.stores.urls import Url

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Outcomes: TypeAlias = list[Outcome]


class Task(NamedTuple):
    """One file to copy. ``copy`` takes ``progress`` and ``cancel``."""

    source: str
    destinations: list[str]
    size: int
    copy: Callable[..., Outcomes]


class RemoteNames:
    """The names and options of one command that has URLs.

    ``directories``: where all names are copied to; without any, the last name is the destination. OSError EINVAL for
    what is not possible.
    """

    def __init__(self, names: list[str], directories: list[str], options: CpOptions) -> None:
        self._options = options
        self._in_directory = bool(directories)
        self.sources, self.ends = (names, directories) if directories else (names[:-1], names[-1:])
        if STREAM in names:
            raise OSError(errno.EINVAL, "- is standard input or output, and the other name must be a file, not a URL")
        remote = [name for name in self.sources if urls.is_url(name)]
        if remote and len(remote) < len(self.sources):
            raise OSError(errno.EINVAL, "files and URLs cannot be copied by one command: use one for each")
        self._urls = [urls.parse(name) for name in remote]
        uploads = [urls.parse(name) for name in self.ends if urls.is_url(name)]
        check_uploads(self.sources[0], uploads, len(self.ends))
        self._upload = uploads[0] if uploads else None

    @property
    def many(self) -> bool:
        """Whether more than one file may be copied."""
        return self._options.recursive or len(self.sources) > 1 or any(url.is_pattern for url in self._urls)

    @contextmanager
    def planned(self, copier: Copier) -> Iterator[Callable[[Cancellation, Report, Callable[[], None]], list[Task]]]:
        """Open the destinations, and return what finds the files; it calls its arguments with failures, and skips."""
        if self._upload is not None:
            yield partial(self._uploads, copier, self._upload)
            return
        patterns = any(url.is_pattern for url in self._urls)
        with ExitStack() as opened:
            names = [url.name for url in self._urls]
            found = [
                opened.enter_context(
                    targets(names, self._directory(end), follow=False, directory=self._in_directory or patterns)
                )
                for end in self.ends
            ]
            yield partial(self._downloads, copier, [[entry for _, entry in entries] for entries in found])

    def _directory(self, end: str) -> str:
        """Return a destination under the name by which -r can create it."""
        return end.rstrip("/") or end if self._options.recursive else end

    # ---- from URLs ----

    def _downloads(
        self,
        copier: Copier,
        ends: list[list[Entry]],
        cancel: Cancellation,
        report: Report,
        skip: Callable[[], None],
    ) -> list[Task]:
        """Find the files. ``ends``: for each destination the entries of all sources."""
        tasks: list[Task] = []
        used: set[str] = set()
        for url, bases in zip(self._urls, zip(*ends, strict=True), strict=True):
            try:
                files = finding.find(url, recursive=self._options.recursive)
            except OSError as error:
                report(url.shown, None, error.errno or errno.EIO, text_of(error))
                continue
            for file in files:
                task = self._download(copier, url, file, bases, used, report, skip)
                if task is not None:
                    tasks.append(task)
        if not self._options.partial and (self.many or len(ends) > 1):
            size = sum(task.size for task in tasks)
            for entries in ends:
                try:
                    with entries[0].located() as located:
                        assert located.directory is not None
                        copier.context.check_space(located.directory, size, cancel)
                except OSError as error:
                    place = os.path.dirname(entries[0].path) or "."
                    report("", place, error.errno or errno.EIO, text_of(error))
                    return []
        return tasks

    def _download(
        self,
        copier: Copier,
        url: Url,
        file: StoreFile,
        bases: Sequence[Entry],
        used: set[str],
        report: Report,
        skip: Callable[[], None],
    ) -> Task | None:
        """Return the task of one file, None if nothing is to be copied."""
        ends: list[tuple[Entry, str]] = []  # the entry of a directory and the path below it, or of the file and ""
        names: list[str] = []
        for base, end in zip(bases, self.ends, strict=True):
            path = ""
            if url.is_pattern:  # then the entry is in the destination, but has the pattern's name
                base = base._replace(path=os.path.join(os.path.dirname(base.path), file.path), name=file.path)
            elif file.url.key != url.key:
                path = file.path
            name = os.path.join(base.path, path) if path else base.path
            if not path and base.directory is None and end.endswith("/"):  # the directory does not exist
                text = "is not a directory, as the slash at its end demands: create it first"
                report(file.url.shown, end, errno.ENOTDIR, text)
            elif name in used:
                text = "another source of this command is copied there"
                report(file.url.shown, name, errno.EEXIST, text)
            elif self._options.no_clobber and os.path.lexists(name):
                skip()
            else:
                ends.append((base, path))
                names.append(name)
            used.add(name)
        return Task(file.url.shown, names, file.size, partial(_load, copier, file, ends)) if ends else None

    # ---- to a URL ----

    def _uploads(
        self, copier: Copier, url: Url, cancel: Cancellation, report: Report, skip: Callable[[], None]
    ) -> list[Task]:
        into = self._in_directory or url.is_directory or len(self.sources) > 1
        tasks: list[Task] = []
        for source in self.sources:
            name = os.path.basename(os.path.normpath(source))
            target = url.below(name) if into else url
            for path, size in self._files(source, report):
                to = target.below(path) if path else target
                try:
                    if self._options.no_clobber and finding.exists(to):
                        skip()
                        continue
                except OSError as error:
                    report(source, to.shown, error.errno or errno.EIO, text_of(error))
                    continue
                shown = os.path.join(source, path) if path else source
                copy = partial(_store, copier, Entry.of(source), path, to, follow=self._options.dereference or not path)
                tasks.append(Task(shown, [to.shown], size, copy))
        return tasks

    def _files(self, source: str, report: Report) -> Iterator[tuple[str, int]]:
        """Yield the path below a source, "" for itself, and the size of each file."""
        follow = self._options.dereference

        def fail(error: OSError) -> None:
            report(str(error.filename or source), None, error.errno or errno.EIO, text_of(error))

        try:
            status = os.stat(source)
        except OSError as error:
            fail(error)
            return
        if not stat.S_ISDIR(status.st_mode):
            yield "", status.st_size
        elif not self._options.recursive:
            report(source, None, errno.EISDIR, "is a directory (-r copies it)")
        else:
            for folder, directories, names in os.walk(source, onerror=fail, followlinks=follow):
                directories.sort()
                links = [] if follow else [name for name in directories if os.path.islink(os.path.join(folder, name))]
                for name in sorted([*names, *links]):
                    path = os.path.join(folder, name)
                    try:
                        status = os.stat(path, follow_symlinks=follow)
                    except OSError as error:
                        fail(error)
                        continue
                    if stat.S_ISREG(status.st_mode):
                        yield os.path.relpath(path, source), status.st_size
                    else:
                        what = "a symbolic link (-L copies its file)" if stat.S_ISLNK(status.st_mode) else "not a file"
                        report(path, None, errno.EINVAL, f"is {what}")


def _load(copier: Copier, file: StoreFile, ends: Sequence[tuple[Entry, str]], **options: Any) -> Outcomes:
    """Copy a file of a store to its destinations."""
    with ExitStack() as opened:
        try:
            entries = [opened.enter_context(_below(base, path, create=True)) for base, path in ends]
        except OSError as error:
            number, text = error.errno or errno.EIO, text_of(error)
            return [CopyError(number, text, os.path.join(base.path, path)) for base, path in ends]
        return copier.download(file, entries, **options)


def _store(copier: Copier, base: Entry, path: str, url: Url, *, follow: bool, **options: Any) -> Outcomes:
    """Copy a file to an object store."""
    try:
        with _below(base, path, create=False, follow=follow) as entry:
            return [copier.upload(entry, url, **options)]
    except CopyError as error:
        return [error]
    except OSError as error:
        return [CopyError(error.errno or errno.EIO, text_of(error), os.path.join(base.path, path))]


@contextmanager
def _below(base: Entry, path: str, *, create: bool, follow: bool = False) -> Iterator[Entry]:
    """Open the directory of a file below another one; "" is that entry itself.

    ``create``: the directories on the way. ``follow``: symbolic links on the way.
    """
    if not path:
        yield base
        return
    flags = _DIRECTORY & ~os.O_NOFOLLOW if follow else _DIRECTORY
    with ExitStack() as opened:
        entry = opened.enter_context(base.located())
        for name in path.split("/"):
            if create:
                with suppress(FileExistsError):
                    os.mkdir(entry.name, 0o777, dir_fd=entry.directory)
            # The name that the user has given may be a link.
            fd = os.open(
                entry.name, flags if entry.path != base.path else flags & ~os.O_NOFOLLOW, dir_fd=entry.directory
            )
            opened.callback(os.close, fd)
            entry = entry.child(name, fd)._replace(follow=follow)
        yield entry
