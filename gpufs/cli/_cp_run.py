"""One run of `gpufs cp` or `gpufs sync`: its options, signals, the progress line, and what it prints."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from gpufs.cli._copy_report import CopyReport
from gpufs.cli._files import raise_descriptor_limit
from gpufs.cli._output import Failure, complain
from gpufs.client import Copier, CopyError
from gpufs.copying.entries import Entry, find_targets, kind_of
from gpufs.copying.loop import TreeCopy
from gpufs.copying.types import STREAM, CopyOptions, Fastpath, TreeOptions, check_options
from gpufs.exceptions import text_of


@dataclass(frozen=True, kw_only=True)
class CpOptions(TreeOptions):
    """The options of the command. ``archive`` implies recursive and preserve. ``progress`` None: on a terminal.

    ``shell`` and ``remote_gpufs``: of the other machine, None for ssh and gpufs. ``command``: its name, for messages.
    """

    archive: bool = False
    verify: bool = False
    fsync: bool = False
    jobs: int = 4
    fastpath: Fastpath = "auto"
    verbose: bool = False
    json: bool = False
    progress: bool | None = None
    quiet: bool = False
    shell: str | None = None
    remote_gpufs: str | None = None
    command: str = "cp"

    @property
    def of_each_copy(self) -> CopyOptions:
        """The options that concern single files."""
        return CopyOptions(
            *(self.fastpath, self.fsync, self.verify, self.preserve, self.partial, self.update, self.replace)
        )


def run(names: list[str], directories: list[str], options: CpOptions) -> int:
    """Run the command and return its exit code. Raise Failure if no copy can start.

    ``directories``: where all names are copied to; without any, the last name is the destination.
    """
    try:
        return _run(names, directories, options)
    except Failure as failure:
        raise Failure(str(failure), failure.code, command=options.command) from None


def _run(names: list[str], directories: list[str], options: CpOptions) -> int:
    if options.archive:
        options = replace(options, recursive=True, preserve=True)
    if options.checksum and not options.update:
        raise Failure("--checksum needs -u", 2)
    kind = kind_of([*names, *directories])
    if kind != "host" and (options.shell is not None or options.remote_gpufs is not None):
        raise Failure("-e and --remote-gpufs need a name like HOST:PATH", 2)
    if STREAM in names and kind == "file":
        _check_stream(names, directories, options)
    if options.exact and (directories or len(names) > 2):
        raise Failure("-T takes one SOURCE and its DEST, and no -t", 2)
    if len(directories) > 1 and kind != "host":
        _check_several(directories)
    sources, ends = (names, directories) if directories else (names[:-1], names[-1:])
    with ExitStack() as opened:
        copier = opened.enter_context(Copier(**options.of_each_copy._asdict(), notice=partial(_complain, options)))
        run = Run(copier, options)
        if kind == "url":
            run.copy_urls(sources, ends, in_directory=bool(directories))
        elif kind == "host":
            run.copy_hosts(sources, ends, in_directory=bool(directories))
        elif STREAM in names:
            run.copy_stream(*names)
        else:
            run.copy_files(sources, ends, in_directory=bool(directories))
    return run.end()


@contextmanager
def _misuse(prefix: str = "") -> Iterator[None]:
    """Raise Failure for names and options that cannot be used."""
    try:
        yield
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        raise Failure(f"{named}{prefix}{error.strerror}", 2) from None


@contextmanager
def _targets(
    sources: Sequence[str], ends: Sequence[str], *, follow: bool, in_directory: bool, exact: bool
) -> Iterator[list[list[tuple[str, Entry]]]]:
    """Find the copies of the sources at each destination, by the rules of cp(1). Failure if they allow none.

    Destination directories stay open until the context ends. ``follow``: write through a symbolic link.
    """
    if not all(sources) or not all(ends):
        raise Failure("an empty name is given where a file belongs", 2)
    with ExitStack() as opened:
        named = []
        for end in ends:
            try:
                found = find_targets(sources, end, follow=follow, directory=in_directory, exact=exact)
                named.append(opened.enter_context(found))
            except OSError as error:
                raise Failure(f"{end}: {text_of(error)}") from None
        yield named


def _check_stream(names: list[str], directories: list[str], options: CpOptions) -> None:
    """Raise Failure for names and options that a pipe does not allow."""
    if len(names) != 2 or names == [STREAM, STREAM] or directories:
        raise Failure("- is standard input or output, and takes one other name (a file of that name is ./-)", 2)
    unfit = ["recursive", "archive", "dereference", "preserve", "no_clobber", "verify"]
    unfit += ["include", "exclude", "update", "checksum", "dry_run"]
    unfit += ["json"] if names[1] == STREAM else []
    for name in unfit:
        if getattr(options, name):
            raise Failure(f"--{name.replace('_', '-')} cannot be used with a pipe", 2)
    if options.fastpath == "require":
        raise Failure("--fastpath require cannot be used with a pipe, whose bytes pass through this process", 2)


def _check_several(directories: list[str]) -> None:
    """Raise Failure for directories that are one."""
    paths = [os.path.realpath(directory) for directory in directories]
    twice = [directory for place, directory in enumerate(directories) if paths[place] in paths[:place]]
    if twice:
        raise Failure(f"{twice[0]}: is given more than once with -t", 2)


def _complain(options: CpOptions, text: str) -> None:
    if not options.quiet:
        complain(text, options.command)


class Run(CopyReport):
    """One run of the command, and what copies report to."""

    def __init__(self, copier: Copier, options: CpOptions) -> None:
        shown = {name: getattr(options, name) for name in ("json", "verbose", "progress", "dry_run", "quiet")}
        super().__init__(options.command, **shown)
        self._copier = copier
        self._options = options
        self._loop = TreeCopy(copier, options, self.cancel, self)

    def copy_files(self, sources: Sequence[str], ends: Sequence[str], *, in_directory: bool) -> None:
        """Copy files of this machine. Errors are printed and collected."""
        options, exact = self._options, self._options.exact
        if options.recursive:
            raise_descriptor_limit()
        with _targets(sources, ends, follow=not options.recursive, in_directory=in_directory, exact=exact) as named:
            self._run(partial(self._loop.find_files, named), many=options.recursive or len(sources) > 1)
        links = [] if self.cancel.cancelled else self._loop.state.links_without_files()
        if links:
            others = f" and {len(links) - 1} others" if len(links) > 1 else ""
            verb = "are links whose files were" if others else "is a link whose file was"
            self.warned(f"{links[0]}{others} {verb} not copied: -L copies files instead of links")

    def copy_urls(self, sources: Sequence[str], ends: Sequence[str], *, in_directory: bool) -> None:
        """Copy from or to URLs. Errors are printed and collected."""
        from gpufs.copying import store_copy  # other copies need none of it

        self.has_limit = True
        options, exact = self._options, self._options.exact
        with _misuse("--"):
            check_options(options.of_each_copy, "a URL")
        with _misuse():
            if STREAM in (*sources, *ends):
                text = "- is standard input or output, and the other name must be a file, not a URL"
                raise OSError(errno.EINVAL, text)
            urls, target = store_copy.plan(sources, ends)
        pattern = any(url.is_pattern for url in urls)
        if exact and pattern:
            raise Failure("-T takes one SOURCE, and a pattern may name several ([*] stands for the character *)", 2)
        many = options.recursive or len(sources) > 1 or pattern
        if target is not None:
            into = not exact and (in_directory or target.is_directory or len(sources) > 1)
            self._run(partial(self._loop.find_uploads, sources, target, into=into), many=many)
            return
        names = [url.name for url in urls]
        with _targets(names, ends, follow=False, in_directory=in_directory or pattern, exact=exact) as named:
            bases = [[entry for _, entry in copies] for copies in named]
            self._run(partial(self._loop.find_urls, urls, bases), many=many)

    def copy_hosts(self, sources: Sequence[str], ends: Sequence[str], *, in_directory: bool) -> None:
        """Copy from or to another machine. Errors are printed and collected."""
        from gpufs.copying import host_copy

        self.has_limit = True
        options = self._options
        with _misuse("--"):
            check_options(options.of_each_copy, "HOST:PATH")
            if options.dry_run:
                raise OSError(errno.EINVAL, "dry-run cannot be used with HOST:PATH: the other machine decides")
        with _misuse():
            route = host_copy.Route(sources, ends, shell=options.shell or "", program=options.remote_gpufs or "")
        request = host_copy.new_request(options.of_each_copy, options, in_directory=in_directory)
        try:
            # Before the progress line, which would overwrite a question of ssh.
            with route.connected(self.cancel, complain) as copy:
                with self.running():
                    self._loop.run_one(partial(copy, self._copier.context, request, self))
        except OSError as error:
            if self.signal is not None:
                text = "interrupted: nothing is left of the incomplete file"
                self.failed("", None, OSError(errno.ECANCELED, text))
            else:
                named = f"{error.filename}: " if error.filename else ""
                self.failed("", None, OSError(error.errno, f"{named}{text_of(error)}"))
        except Exception as error:  # noqa: BLE001 - reported as of other copies
            self.failed("", None, OSError(errno.EIO, f"{type(error).__name__}: {error}"))

    def copy_stream(self, source: str, destination: str) -> None:
        """Copy standard input to a file, or a file to standard output, on this thread."""
        self._streaming = True
        if source == STREAM:
            copy = partial(self._copier.copy_from_stream, 0, Entry.of(destination))
        else:
            self._lines = sys.stderr
            copy = partial(self._copier.copy_to_stream, Entry.of(source), 1)
        with self.running():
            try:
                self.finished(source, [destination], [copy(progress=self.reporter(source), cancel=self.cancel)])
            except CopyError as error:
                self.finished(source, [destination], [error])
            except Exception as error:  # noqa: BLE001 - reported as of other copies
                self.failed(source, destination, OSError(errno.EIO, f"{type(error).__name__}: {error}"))

    def _run(self, find: Callable[[], None], *, many: bool) -> None:
        with self.running():
            try:
                self._loop.run(find, self._options.jobs if many else 1)
            except OSError as error:
                raise Failure(f"{error.strerror}") from None
