"""One run of `gpufs cp` or `gpufs sync`: its options, signals, the progress line, and what it prints."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass, replace
from functools import partial

from gpufs.cli._copy_report import CommandOptions, CopyReport
from gpufs.cli._files import raise_descriptor_limit
from gpufs.cli._output import Failure
from gpufs.copying.copier import FileCopier
from gpufs.copying.entries import Entry, kind_of
from gpufs.copying.loop import TreeCopy
from gpufs.copying.types import STREAM, Outcome, as_os_error, copy_error
from gpufs.exceptions import text_of


@dataclass(frozen=True, kw_only=True)
class CpOptions(CommandOptions):
    """The options of `gpufs cp` and `gpufs sync`. ``archive`` implies recursive and preserve.

    ``shell`` and ``remote_gpufs``: of the other machine, None for ssh and gpufs.
    """

    archive: bool = False
    shell: str | None = None
    remote_gpufs: str | None = None
    command: str = "cp"


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
    if not all((*names, *directories)):
        raise Failure("an empty name is given where a file belongs", 2)
    sources, ends = (names, directories) if directories else (names[:-1], names[-1:])
    report = CopyReport(options)
    with FileCopier(options, report.noticed) as copier:
        if STREAM in names and kind == "file":
            _copy_stream(copier, report, *names)
        else:
            _copy(copier, report, options, sources, ends, to_directory=bool(directories))
    return report.end()


def _check_stream(names: list[str], directories: list[str], options: CpOptions) -> None:
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


def _copy(
    copier: FileCopier,
    report: CopyReport,
    options: CpOptions,
    sources: list[str],
    ends: list[str],
    *,
    to_directory: bool,
) -> None:
    kind = kind_of((*sources, *ends))
    report.has_limit = kind != "file"
    if options.recursive:
        raise_descriptor_limit()
    loop = TreeCopy(copier, report.cancel, report)
    if "" in (options.shell, options.remote_gpufs):
        raise Failure("-e, --remote-gpufs: an empty command: leave out the option for the default", 2)
    shell, program = options.shell or "", options.remote_gpufs or ""
    opened = loop.opened(sources, ends, in_directory=to_directory, shell=shell, program=program)
    try:
        with opened as find, report.running():
            loop.run(find, options.jobs)
    except Exception as error:  # noqa: BLE001 - reported as of other copies
        failure = as_os_error(error)
        if report.signal is not None:
            text = "interrupted: nothing is left of the incomplete file"
            failure = OSError(errno.ECANCELED, text)
        elif failure.errno == errno.EINVAL and (kind != "host" or not failure.filename):  # else of the other machine
            named = f"{failure.filename}: " if failure.filename else ""
            raise Failure(f"{named}{text_of(failure)}", 2) from None
        report.failed(failure.filename or "", None, failure)
    links = [] if report.cancel.cancelled else loop.state.links_without_files()
    if links:
        others = f" and {len(links) - 1} others" if len(links) > 1 else ""
        verb = "are links whose files were" if others else "is a link whose file was"
        report.noticed(f"warning: {links[0]}{others} {verb} not copied: -L copies files instead of links")


def _copy_stream(copier: FileCopier, report: CopyReport, source: str, destination: str) -> None:
    """Copy standard input to a file, or a file to standard output, on this thread."""
    report.is_streaming = True
    if source == STREAM:
        copy = partial(copier.copy_from_stream, 0, Entry.of(destination))
    else:
        report.lines = sys.stderr
        copy = partial(copier.copy_to_stream, Entry.of(source), 1)
    with report.running():
        try:
            outcome: Outcome = copy(progress=report.reporter(source), cancel=report.cancel)
        except Exception as error:  # noqa: BLE001 - reported as of other copies
            outcome = copy_error(as_os_error(error), source, destination)
        report.finished(source, [destination], [outcome])
