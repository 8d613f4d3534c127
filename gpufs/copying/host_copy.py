"""Copies between this machine and another one, and what the other one does for them.

host_send.py and host_receive.py are the two sides; each machine can be either. What is there is shown as HOST:PATH.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Final, TypeAlias

from gpufs.client._cancellation import Cancellation
from gpufs.copying import entries
from gpufs.copying.entries import Entry
from gpufs.copying.host_receive import Receiver
from gpufs.copying.host_send import Sender
from gpufs.copying.job import CopyContext
from gpufs.copying.types import CopyError, CopyOptions, CopyProgress, CopyResult, Pace, Report, error_class
from gpufs.exceptions import text_of
from gpufs.hosts import messages, names
from gpufs.hosts.channel import ChannelError, HostChannel, HostProtocolError
from gpufs.hosts.messages import HostRequest, plain
from gpufs.hosts.names import HostName
from gpufs.hosts.next_host import NextHost
from gpufs.hosts.peer import connected, greeting
from gpufs.syscalls import start_thread

# A command that is stopped (Ctrl-Z) sends nothing.
_SILENCE_SECONDS: Final = 60.0
_OPTIONS: Final = ("recursive", "preserve", "no_clobber", "update", "checksum")  # of a request, for what receives

_Report: TypeAlias = Callable[[messages.Plan | messages.Report], None]


def _send(
    context: CopyContext, channel: HostChannel, sources: Sequence[str], request: HostRequest, report: _Report
) -> None:
    """Copy files of this machine to the other one. OSError for what ends all copies."""
    follow = not request.recursive or request.dereference
    Sender(channel, context, [Entry.of(source, follow=follow) for source in sources], request, report).run()


def _upload(
    context: CopyContext,
    channel: HostChannel,
    sources: Sequence[str],
    targets: Sequence[HostName],
    request: HostRequest,
    report: _Report,
) -> None:
    """Copy files of this machine to a chain of others, of which ``channel`` reaches the first."""
    request.sends = False
    request.sources = [os.fsencode(os.path.basename(source.rstrip("/"))) for source in sources]  # their names count
    request.destination = os.fsencode(targets[0].path)
    request.forward = [os.fsencode(str(target)) for target in targets[1:]]
    channel.send(request)
    _send(context, channel, sources, request, report)


def _ask_for_upload(channel: HostChannel, targets: Sequence[HostName], request: HostRequest, report: _Report) -> None:
    """Let another machine copy its files to a chain of machines. ``request`` has the sources."""
    request.forward = [os.fsencode(str(target)) for target in targets]
    channel.send(request)
    answers = 0
    while not isinstance(message := channel.receive(), messages.Finished):
        if isinstance(message, (messages.FileResult, messages.Failed)):
            answers += 1
        elif isinstance(message, messages.Lost):
            answers += len(request.sources)
        elif not isinstance(message, (messages.Plan, messages.Report)) or (
            isinstance(message, messages.Deleted) and not request.delete
        ):
            raise HostProtocolError("no result")
        if isinstance(message, messages.Report) and message.hop >= len(targets):
            raise HostProtocolError("no result")
        report(message)
    if answers < len(request.sources) and not request.recursive:
        raise HostProtocolError("no result of a file")


def serve(incoming: int, outgoing: int, *, shell: str = "", program: str = "") -> bool:
    """Do what the other machine asks for; whether it was told the result.

    ``shell`` and ``program`` reach the machines that files are passed on to. The command line of this process names
    them, not the peer: a key that is restricted to this command allows no other one.
    """
    channel, cancel = HostChannel(incoming, outgoing, silence=_SILENCE_SECONDS), Cancellation()
    try:
        channel.write_line(greeting())
        channel.start_alive(cancel.cancel)
        request = channel.receive()
        if not isinstance(request, HostRequest):
            raise HostProtocolError("no request")
        options = CopyOptions(replace=request.update, **{name: getattr(request, name) for name in _OPTIONS})
        with closing(CopyContext(options, None)) as context:
            _answer(context, channel, request, shell, program, cancel)
        return True
    except ChannelError:
        return False  # the other side is gone, or wrong
    except OSError as error:
        with suppress(ChannelError):
            channel.send(messages.Refused.of(error, error.filename or ""))
        return False
    finally:
        channel.close()


def _answer(
    context: CopyContext, channel: HostChannel, request: HostRequest, shell: str, program: str, cancel: Cancellation
) -> None:
    def ignore(report: object) -> None:  # the other side shows it
        pass

    paths = [os.fsdecode(path) for path in request.sources]
    if request.sends and request.forward:
        _upload_as_asked(context, channel, [_expanded(path) for path in paths], request, shell, program)
    elif request.sends:
        _send(context, channel, [_expanded(path) for path in paths], request, ignore)
    else:
        with _bases(paths, _expanded(os.fsdecode(request.destination)), request) as bases:
            next_host = None
            if request.forward:
                next_host = NextHost(channel, request, cancel, shell=shell, program=program)
            try:
                Receiver(context, channel, bases, request, ignore, cancel, next_host=next_host).run()
            finally:
                cancel.cancel()
                if next_host is not None:
                    next_host.finish()


def _upload_as_asked(
    context: CopyContext, channel: HostChannel, sources: Sequence[str], request: HostRequest, shell: str, program: str
) -> None:
    """Copy files of this machine to a chain of others, for the machine that asks."""
    cancel, pace = Cancellation(), Pace()
    targets = [names.parse(os.fsdecode(name)) for name in request.forward]
    hosts = [target.host for target in targets]

    def report(report: messages.Plan | messages.Report) -> None:
        if not isinstance(report, messages.Moved) or pace.is_due():
            channel.send(report)

    def notice(text: str) -> None:
        report(messages.Notice(plain(text)))

    def watch() -> None:
        with suppress(OSError):
            channel.receive()
        cancel.cancel()  # the other side has ended

    start_thread(watch)
    try:
        with connected(hosts, shell=shell, program=program, cancel=cancel, notice=notice) as peer:
            _upload(context, peer.channel, sources, targets, request, report)
    except OSError as error:
        report(messages.Lost.of(error, str(error.filename)))
    channel.send(messages.Finished())


def _expanded(path: str) -> str:
    """Return a path of this machine that was given on the other one: "" is the home directory, where a shell starts."""
    return os.path.expanduser(path) or "."


@contextmanager
def _bases(paths: Sequence[str], destination: str, request: HostRequest) -> Iterator[list[Entry]]:
    with ExitStack() as opened:
        stripped = destination.rstrip("/") or "/"
        named = opened.enter_context(
            entries.find_targets(paths, stripped, follow=False, directory=request.in_directory, exact=request.exact)
        )
        try:
            bases = [opened.enter_context(entry.located()) for _, entry in named]
            if destination.endswith("/") and bases[0].path == stripped:  # the directory does not exist
                bases[0] = bases[0]._replace(path=destination)
        except OSError as error:
            raise OSError(error.errno, text_of(error), destination) from None
        yield bases


class Route:
    """The machines of one command. OSError EINVAL if its names are not possible.

    ``sources``: files of this machine, or HOST:PATH of another one. ``ends``: the destination, or several, HOST:PATH
    each, that are filled one from the other. ``shell``, ``program``: what reaches another machine, and gpufs there; ""
    for ssh and gpufs.
    """

    def __init__(self, sources: Sequence[str], ends: Sequence[str], *, shell: str = "", program: str = "") -> None:
        self._from = [names.parse(name) for name in sources if names.is_host_name(name)]
        self._to = [names.parse(name) for name in ends if names.is_host_name(name)]
        self._sources = sources
        self._end = ends[0]
        self._shell = shell
        self._program = program
        named = [str(target).rstrip("/") for target in self._to]
        twice = [name for place, name in enumerate(named) if name in named[:place]]
        text = ""
        if self._from and len(self._from) < len(sources):
            text = "files of this machine and of another cannot be sources of one command: use two"
        elif len({name.host for name in self._from}) > 1:
            text = "the sources are on several machines: use one command for each"
        elif self._to and len(self._to) < len(ends):
            text = "destinations on this machine and on others need a command each"
        elif plain(shell + program) != shell + program:
            text = "the commands that reach other machines must be UTF-8"
        elif not self._to and len(ends) > 1:
            text = "files of another machine have one destination here: copy to the others from there"
        elif twice:
            text = f"{twice[0]}: is given more than once"
        if text:
            raise OSError(errno.EINVAL, text)

    @contextmanager
    def connected(
        self, context: CopyContext, request: HostRequest, report: Report, cancel: Cancellation
    ) -> Iterator[Callable[[], None]]:
        """Connect, which may ask for a password, and return what copies, with the options of the request."""
        hosts = [target.host for target in self._to]
        if self._from:
            hosts.insert(0, self._from[0].host)
        shell, program = self._shell, self._program
        with connected(hosts, shell=shell, program=program, cancel=cancel, notice=report.noticed) as peer:
            source = self._from[0].host if self._from else ""
            shown = HostReports(report, peer.host, source, [target.host for target in self._to] or [""])
            yield partial(self._copy, context, peer.channel, request, shown.take, cancel)

    def _copy(
        self, context: CopyContext, channel: HostChannel, request: HostRequest, report: _Report, cancel: Cancellation
    ) -> None:
        if not self._from:
            _upload(context, channel, self._sources, self._to, request, report)
            return
        request.sends, paths = True, [name.path for name in self._from]
        request.sources = [os.fsencode(path) for path in paths]
        if self._to:
            _ask_for_upload(channel, self._to, request, report)
            return
        with _bases(paths, self._end, request) as bases:
            channel.send(request)
            Receiver(context, channel, bases, request, report, cancel).run()


def new_request(options: CopyOptions, *, in_directory: bool = False) -> HostRequest:
    """Return what another machine needs to know about a copy, apart from the names."""
    known = {name: getattr(options, name) for name in HostRequest.__struct_fields__ if hasattr(options, name)}
    known |= {name: list(map(os.fsencode, known[name])) for name in ("include", "exclude")}
    return HostRequest(sends=False, sources=[], in_directory=in_directory, **known)


# ---- what the command, or a program, sees ----


class HostReports:
    """Passes the messages of a copy on to its report. What is on another machine is shown as HOST:PATH.

    ``peer``: the machine that this one is connected to. ``source`` has the sources, and ``ends`` have the copies; "" is
    this machine.
    """

    def __init__(self, report: Report, peer: str, source: str, ends: Sequence[str]) -> None:
        self._report = report
        self._peer = peer
        self._source = source
        self._ends = ends
        self._failed_hops: set[int] = set()

    def take(self, message: messages.Plan | messages.Report) -> None:
        report = self._report
        match message:
            case messages.Plan():
                report.planned(message.size)
            case messages.Moved():
                if (show := report.reporter(_named(self._source, message.source))) is not None:
                    show(CopyProgress(message.size, 0, {"pipe": message.size}))
            case messages.Notice():
                report.noticed(f"{self._peer}: {message.text}")
            case messages.Deleted():
                report.deleted(_named(self._ends[message.hop], message.path))
            case messages.Lost():
                report.host_lost(message.hop, CopyError(message.error, message.text, os.fsdecode(message.path)))
            case messages.Failed():
                if message.path:  # else a source could not be read
                    self._failed_hops.add(message.hop)
                self._finish(message)
            # A file is cancelled if its directory could not be created, which has been reported.
            case messages.FileResult() if message.error != errno.ECANCELED or message.hop not in self._failed_hops:
                self._finish(message)

    def _finish(self, message: messages.FileResult | messages.Failed) -> None:
        source, end = _named(self._source, message.source), _named(self._ends[message.hop], message.path)
        if message.error:
            text = message.text
            if self._source and message.error == errno.ENOENT and any(character in source for character in "*?["):
                text += " (patterns are not expanded there: name the files, or copy the directory)"
            names = [name for name in (source, end) if name] or [self._peer]
            error = error_class(message.error)(message.error, text, *names)
            self._report.finished(source or end, [end if source else ""], [error], message.hop)
        elif isinstance(message, messages.Failed) or message.skipped:
            self._report.finished(source, [], [], message.hop)
            self._report.skipped()
        else:
            moved = (message.size, message.seconds, "node", message.paths)
            result = CopyResult(source, end, *moved, sha256=message.checksum or None)
            self._report.finished(source, [end], [result], message.hop)


def _named(host: str, path: bytes) -> str:
    return f"{host}:{os.fsdecode(path)}" if host and path else os.fsdecode(path)
