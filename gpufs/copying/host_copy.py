"""Copies between this machine and another one, and what the other one does for them.

host_send.py and host_receive.py are the two sides; each machine can be either. What is there is shown as HOST:PATH.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Final

from gpufs.client._cancellation import Cancellation
from gpufs.copying import entries
from gpufs.copying.entries import Entry
from gpufs.copying.host_receive import Receiver
from gpufs.copying.host_reports import OfHost, Reports, outcome_of
from gpufs.copying.host_send import Sender, Sent
from gpufs.copying.job import CopyContext
from gpufs.copying.types import CopyError, CopyOptions, Report, copy_error, error_class
from gpufs.exceptions import text_of
from gpufs.hosts import messages, names
from gpufs.hosts.channel import ChannelError, HostChannel, HostProtocolError, exchange
from gpufs.hosts.messages import HostRequest, plain
from gpufs.hosts.names import HostName
from gpufs.hosts.next_host import NextHost
from gpufs.hosts.peer import GREETING, Peer, connected, our_hello
from gpufs.syscalls import start_thread

# A command that is stopped (Ctrl-Z) sends nothing.
_SILENCE_SECONDS: Final = 60.0


def serve(incoming: int, outgoing: int, *, shell: str = "", program: str = "") -> bool:
    """Do what the other machine asks for; whether it was told the result.

    ``shell`` and ``program`` reach the machines that files are passed on to. The command line of this process names
    them, not the peer: a key that is restricted to this command allows no other one.
    """
    channel = HostChannel(incoming, outgoing, silence=_SILENCE_SECONDS)
    try:
        channel.write_line(GREETING)
        channel.send(our_hello())
        hello = channel.receive()
        if not isinstance(hello, messages.HostHello):
            raise HostProtocolError("no hello")
        hello.check("")
        channel.start_alive()
        request = channel.receive()
        if not isinstance(request, HostRequest):
            raise HostProtocolError("no request")
        with closing(CopyContext(CopyOptions(), None)) as context:
            _answer(context, channel, request, hello.nixl, shell, program)
        return True
    except ChannelError:
        return False  # the other side is gone, or wrong
    except OSError as error:
        try:
            channel.send(
                messages.Refused(error.errno or errno.EIO, plain(text_of(error)), messages.shown(error.filename or ""))
            )
        except ChannelError:
            pass
        return False
    finally:
        channel.close()


def _answer(
    context: CopyContext, channel: HostChannel, request: HostRequest, has_nixl: bool, shell: str, program: str
) -> None:
    def ignore(*_: object) -> None:  # the other side reports them
        pass

    paths = [os.fsdecode(path) for path in request.sources]
    if request.sends and request.forward:
        _upload_as_asked(context, channel, [_expanded(path) for path in paths], request, shell, program)
    elif request.sends:
        sources = [_expanded(path) for path in paths]
        _send(context, channel, sources, request, Report(), ignore, ignore, ignore, ignore, has_nixl)
    else:
        cancel = Cancellation()
        with _bases(paths, _expanded(os.fsdecode(request.destination)), request) as bases:
            next_host = None
            if request.forward:
                next_host = NextHost(channel, request, cancel, shell=shell, program=program)
            receiver = Receiver(
                context, channel, bases, request, Report(), cancel, peer_has_nixl=has_nixl, next_host=next_host
            )
            try:
                receiver.run()
            finally:
                cancel.cancel()
                if next_host is not None:
                    next_host.finish()


def _upload_as_asked(
    context: CopyContext, channel: HostChannel, sources: Sequence[str], request: HostRequest, shell: str, program: str
) -> None:
    """Copy files of this machine to a chain of others, for the machine that asks."""
    cancel, reports = Cancellation(), Reports(channel)
    targets = [names.parse(os.fsdecode(name)) for name in request.forward]

    def watch() -> None:
        try:
            channel.receive()
        except OSError:
            pass
        cancel.cancel()  # the other side has ended

    start_thread(watch)
    try:
        with connected(
            [target.host for target in targets],
            shell=shell,
            program=program,
            cancel=cancel,
            notice=reports.noticed,
        ) as peer:
            _upload(context, peer, sources, targets, request, reports)
    except OSError as error:
        reports.host_lost(0, copy_error(error, str(error.filename)))
    channel.send(messages.Finished())


def _expanded(path: str) -> str:
    """Return a path of this machine that was given on the other one: "" is the home directory, where a shell starts."""
    return os.path.expanduser(path) or "."


@contextmanager
def _bases(paths: Sequence[str], destination: str, request: HostRequest) -> Iterator[list[Entry]]:
    """Find the destinations of sources, with their directories open."""
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


def _upload(
    context: CopyContext,
    peer: Peer,
    sources: Sequence[str],
    targets: Sequence[HostName],
    request: HostRequest,
    report: Report,
) -> None:
    """Copy files to a chain of machines, of which ``peer`` is the first. OSError for what ends all copies."""
    request.sends = False
    request.sources = [os.fsencode(os.path.basename(source.rstrip("/"))) for source in sources]  # their names count
    request.destination = os.fsencode(targets[0].path)
    request.forward = [os.fsencode(str(target)) for target in targets[1:]]
    peer.channel.send(request)
    failed_hops: set[int] = set()

    def take(sent: Sent, result: messages.FileResult) -> None:
        destination = str(HostName(targets[result.hop].host, os.fsdecode(result.path)))
        outcome = outcome_of(result, sent.path, destination, time.monotonic() - sent.began)
        # A file is cancelled if its directory could not be created, which has been reported.
        if result.error != errno.ECANCELED or result.hop not in failed_hops:
            report.file_ended(sent.path, outcome, result.hop)

    def fail(failed: messages.Failed) -> None:
        failed_hops.add(failed.hop)
        shown = str(HostName(targets[failed.hop].host, os.fsdecode(failed.path)))
        report.file_ended("", error_class(failed.error)(failed.error, failed.text, shown), failed.hop)

    def fail_here(path: str, error: OSError) -> None:
        report.file_ended(path, copy_error(error, path))

    def lose(lost: messages.Lost) -> None:
        report.host_lost(lost.hop, CopyError(lost.error, lost.text, os.fsdecode(lost.name)))

    noted = OfHost(report, peer.host, has_source=False)
    _send(context, peer.channel, sources, request, noted, take, fail, fail_here, lose, peer.has_nixl)


def _send(
    context: CopyContext,
    channel: HostChannel,
    sources: Sequence[str],
    request: HostRequest,
    report: Report,
    take: Callable[[Sent, messages.FileResult], None],
    fail: Callable[[messages.Failed], None],
    fail_here: Callable[[str, OSError], None],
    lose: Callable[[messages.Lost], None],
    peer_has_nixl: bool,
) -> None:
    """Send files, and read the results on a thread of its own."""
    follow = not request.recursive or request.dereference
    sent = [Entry.of(source, follow=follow) for source in sources]
    sender = Sender(
        channel, context, sent, request, fail_here, report.moved, report.noticed, peer_has_nixl=peer_has_nixl
    )

    def write() -> None:
        plan = sender.plan()
        report.planned(plan.size)
        sender.run(plan)

    exchange(channel, lambda: sender.read_results(take, fail, lose, report), write)


def _is_text(words: str) -> bool:
    return plain(words) == words


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
        elif not (_is_text(shell) and _is_text(program)):
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
            request.sends = True
            request.sources = [os.fsencode(name.path) for name in self._from]
            if not self._from:
                yield partial(_upload, context, peer, self._sources, self._to, request, report)
            elif self._to:
                yield partial(self._ask_for_upload, peer, request, report)
            else:
                yield partial(self._download, context, peer, request, report, cancel)

    def _download(
        self, context: CopyContext, peer: Peer, request: HostRequest, report: Report, cancel: Cancellation
    ) -> None:
        """Copy files of the other machine."""
        with _bases([name.path for name in self._from], self._end, request) as bases:
            peer.channel.send(request)
            shown = OfHost(report, peer.host, has_source=True)
            Receiver(context, peer.channel, bases, request, shown, cancel, peer_has_nixl=peer.has_nixl).run()

    def _ask_for_upload(self, peer: Peer, request: HostRequest, report: Report) -> None:
        """Let another machine copy its files to a chain of machines."""
        request.forward = [os.fsencode(str(target)) for target in self._to]
        peer.channel.send(request)
        shown, answers = OfHost(report, peer.host, has_source=True), 0
        while not isinstance(message := peer.channel.receive(), messages.Finished):
            match message:
                case messages.Plan():
                    report.planned(message.size)
                case messages.Moved():
                    shown.moved(os.fsdecode(message.source), message.size)
                case messages.Notice():
                    shown.noticed(message.text)
                case messages.FileResult() if message.hop < len(self._to):
                    answers += 1
                    source, end = os.fsdecode(message.source), os.fsdecode(message.path) or None
                    shown.file_ended(source, outcome_of(message, source, end, message.seconds), message.hop)
                case messages.Deleted() if request.delete:
                    report.deleted(os.fsdecode(message.path))
                case messages.Lost() if message.hop < len(self._to):
                    answers += len(self._from)
                    report.host_lost(message.hop, CopyError(message.error, message.text, os.fsdecode(message.name)))
                case _:
                    raise HostProtocolError("no result")
        if answers < len(self._from) and not request.recursive:
            raise HostProtocolError("no result of a file")


def new_request(options: CopyOptions, *, in_directory: bool = False) -> HostRequest:
    """Return what another machine needs to know about a copy, apart from the names."""
    known = {name: getattr(options, name) for name in HostRequest.__struct_fields__ if hasattr(options, name)}
    known |= {name: list(map(os.fsencode, known[name])) for name in ("include", "exclude")}
    return HostRequest(sends=False, sources=[], in_directory=in_directory, **known)
