"""The part of `gpufs cp` for files of another machine, HOST:PATH."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from gpufs.cli._cp_options import CpOptions
from gpufs.cli._output import Failure, complain
from gpufs.client import Cancellation, Copier
from gpufs.client import _node_copy as node_copy
from gpufs.client._copy import STREAM
from gpufs.nodes import names
from gpufs.nodes.messages import Request

if TYPE_CHECKING:
    from gpufs.client._node_receive import Sink

Copy: TypeAlias = "Callable[[Sink], None]"


def has_node(given: Sequence[str]) -> bool:
    """Return whether any of the names is HOST:PATH."""
    return any(map(names.is_node_name, given))


class NodeNames:
    """The names and options of one command that has HOST:PATH.

    ``directories``: where all names are copied to; without any, the last name is the destination. Raises Failure for
    what is not possible.
    """

    def __init__(self, given: list[str], directories: list[str], options: CpOptions) -> None:
        self._options = options
        sources, ends = (given, directories) if directories else (given[:-1], given[-1:])
        if STREAM in given:
            raise Failure("cp: - is standard input or output, and the other name must be on this machine", 2)
        if options.partial:
            raise Failure("cp: --partial cannot be used with HOST:PATH, where a file comes whole or not at all", 2)
        if options.fastpath == "require":
            raise Failure("cp: --fastpath require cannot be used with HOST:PATH, whose bytes come from a network", 2)
        if len(ends) > 1:
            raise Failure("cp: copies between machines have one destination: repeat the command for others", 2)
        if not all(sources) or not ends[0]:
            raise Failure("cp: an empty name is given where a file belongs", 2)
        remote = [name for name in sources if names.is_node_name(name)]
        try:
            self._from = [names.parse(name) for name in remote]
            self._to = names.parse(ends[0]) if names.is_node_name(ends[0]) else None
        except OSError as error:
            raise Failure(f"cp: {error.filename}: {error.strerror}", 2) from None
        if remote and self._to is not None:
            raise Failure(f"cp: {ends[0]}: {node_copy.BOTH_REMOTE}", 2)
        if remote and len(remote) < len(sources):
            raise Failure("cp: files of this machine and of another cannot be sources of one command: use two", 2)
        if len({name.host for name in self._from}) > 1:
            raise Failure("cp: the sources are on several machines: use one command for each", 2)
        self._sources, self._end, self._in_directory = sources, ends[0], bool(directories)

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
        host = self._to.host if self._to is not None else self._from[0].host
        with node_copy.connected(
            host,
            shell=options.shell or node_copy.SHELL,
            program=options.remote_gpufs or node_copy.PROGRAM,
            cancel=cancel,
            notice=complain,
        ) as peer:

            def copy(sink: Sink) -> None:
                if self._to is not None:
                    node_copy.upload(copier, peer, self._sources, self._to, request, sink)
                else:
                    paths = [name.path for name in self._from]
                    node_copy.download(copier, peer, paths, self._end, request, sink, cancel)

            yield copy
