"""The part of `gpufs cp` for files of another machine, HOST:PATH."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from gpufs.cli._cp_options import CpOptions
from gpufs.cli._output import complain
from gpufs.client import Cancellation, Copier
from gpufs.copying.host_copy import Route
from gpufs.hosts.messages import Request

if TYPE_CHECKING:
    from gpufs.copying.reports import Sink

Copy: TypeAlias = "Callable[[Sink], None]"


class NodeNames:
    """The names and options of one command that has HOST:PATH.

    ``directories``: where all names are copied to; without any, the last name is the destination. OSError EINVAL for
    what is not possible.
    """

    def __init__(self, given: list[str], directories: list[str], options: CpOptions) -> None:
        self._options = options
        self._in_directory = bool(directories)
        sources, ends = (given, directories) if directories else (given[:-1], given[-1:])
        shell, program = options.shell or "", options.remote_gpufs or ""
        self._route = Route(sources, ends, shell=shell, program=program)

    @contextmanager
    def connected(self, copier: Copier, cancel: Cancellation) -> Iterator[Copy]:
        """Connect, which may ask for a password, and return what copies and reports to its argument."""
        options = self._options
        request = Request(
            sends=False,
            sources=[],
            in_directory=self._in_directory,
            recursive=options.recursive,
            dereference=options.dereference,
            preserve=options.preserve,
            no_clobber=options.no_clobber,
            verify=options.verify,
            fsync=options.fsync,
        )
        with self._route.connected(cancel, complain) as copy:
            yield lambda sink: copy(copier.context, request, sink)
