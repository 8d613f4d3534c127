"""Copies between this machine and another one, and what the other one does for them.

_node_send.py and _node_receive.py are the two sides; each machine can be either. What is there is shown as HOST:PATH.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

from gpufs.client import _ends
from gpufs.client._copy_types import Cancellation, CopyError, CopyOptions, CopyProgress, CopyResult, error_class
from gpufs.client._ends import Entry
from gpufs.client._node_receive import Receiver, Sink
from gpufs.client._node_send import Sender, Sent
from gpufs.exceptions import text_of
from gpufs.nodes import names
from gpufs.nodes.channel import Channel, ChannelError, ConnectionEnded, ProtocolError
from gpufs.nodes.messages import Failed, Hello, Refused, Request, Result, plain
from gpufs.nodes.names import NodeName
from gpufs.nodes.peer import GREETING, Peer, our_hello

if TYPE_CHECKING:
    from gpufs.client._copy import Copier

SHELL: Final = "ssh"
PROGRAM: Final = "gpufs"
# A command that is stopped (Ctrl-Z) sends nothing.
_SILENCE_SECONDS: Final = 60.0
_PROGRESS_SECONDS: Final = 0.1
_END_SECONDS: Final = 2.0
BOTH_REMOTE: Final = "only one of the two can be on another machine: copy to this machine first"


class _Silent:
    """Reports nothing: the other side has the results."""

    def planned(self, size: int) -> None:
        pass

    def moved(self, source: str, count: int) -> None:
        pass

    def noticed(self, text: str) -> None:
        pass

    def ended(self, source: str, outcome: CopyResult | CopyError | None) -> None:
        pass


class _Noted:
    """Passes on what a sender here reports, with the host in lines for the user."""

    def __init__(self, sink: Sink, host: str) -> None:
        self._sink = sink
        self._host = host
        self.planned, self.moved, self.ended = sink.planned, sink.moved, sink.ended

    def noticed(self, text: str) -> None:
        self._sink.noticed(f"{self._host}: {text}")


class _Shown:
    """Passes on what a receiver here reports, with the sources named HOST:PATH."""

    def __init__(self, sink: Sink, host: str) -> None:
        self._sink = sink
        self._host = host
        self.planned = sink.planned

    def moved(self, source: str, count: int) -> None:
        self._sink.moved(f"{self._host}:{source}", count)

    def noticed(self, text: str) -> None:
        self._sink.noticed(f"{self._host}: {text}")

    def ended(self, source: str, outcome: CopyResult | CopyError | None) -> None:
        shown = f"{self._host}:{source}"
        if isinstance(outcome, CopyResult):
            outcome = outcome._replace(source=shown)
        elif outcome is not None:
            outcome.filename = shown if source else outcome.filename2
            outcome.filename2 = outcome.filename2 if source else None
        self._sink.ended(shown, outcome)


@contextmanager
def connected(
    host: str,
    *,
    shell: str = SHELL,
    program: str = PROGRAM,
    cancel: Cancellation | None = None,
    notice: Callable[[str], None] | None = None,
) -> Iterator[Peer]:
    """Start gpufs on another machine. Errors of the connection become errors for the user. OSError."""
    peer = Peer(host, shell, program, cancel)
    try:
        peer.greet()
        yield peer
    except ChannelError as error:
        raise peer.explain(error) from None
    finally:
        peer.close(notice)


def download(
    copier: Copier,
    peer: Peer,
    paths: Sequence[str],
    destination: str,
    request: Request,
    sink: Sink,
    cancel: Cancellation,
) -> None:
    """Copy files of the other machine. ``request`` has the options. OSError for what ends all copies."""
    request.sends = True
    request.sources = [os.fsencode(path) for path in paths]
    with _bases(paths, destination, request) as bases:
        peer.channel.send(request)
        shown, settings, mounts = _Shown(sink, peer.host), copier.settings, copier.mounts()
        Receiver(settings, mounts, peer.channel, bases, request, shown, cancel, peer_has_nixl=peer.has_nixl).run()


def upload(copier: Copier, peer: Peer, sources: Sequence[str], to: NodeName, request: Request, sink: Sink) -> None:
    """Copy files to the other machine. ``request`` has the options. OSError for what ends all copies."""
    request.sends = False
    request.sources = [os.fsencode(os.path.basename(source.rstrip("/"))) for source in sources]  # their names count
    request.destination = os.fsencode(to.path)
    peer.channel.send(request)

    def take(sent: Sent, result: Result) -> None:
        destination = str(NodeName(to.host, os.fsdecode(result.path)))
        outcome: CopyResult | CopyError | None = None
        if result.error:
            outcome = error_class(result.error)(result.error, result.text, sent.path, destination)
        elif not result.skipped:
            seconds = time.monotonic() - sent.began
            digest = result.checksum or None
            outcome = CopyResult(sent.path, destination, result.size, seconds, "node", result.paths, sha256=digest)
        if result.error != errno.ECANCELED:  # its directory is reported
            sink.ended(sent.path, outcome)

    def fail(failed: Failed) -> None:
        shown = str(NodeName(to.host, os.fsdecode(failed.path)))
        sink.ended(shown, error_class(failed.error)(failed.error, failed.text, shown))

    def fail_here(path: str, error: OSError) -> None:
        sink.ended(path, CopyError(error.errno or errno.EIO, text_of(error), path))

    _send(copier, peer.channel, sources, request, _Noted(sink, peer.host), take, fail, fail_here, peer.has_nixl)


def serve(incoming: int, outgoing: int) -> bool:
    """Do what the other machine asks for; whether it was told the result."""
    from gpufs.client._copy import Copier

    channel = Channel(incoming, outgoing, silence=_SILENCE_SECONDS)
    try:
        channel.write_line(GREETING)
        channel.send(our_hello())
        hello = channel.receive()
        if not isinstance(hello, Hello):
            raise ProtocolError("no hello")
        hello.check("")
        channel.start_alive()
        request = channel.receive()
        if not isinstance(request, Request):
            raise ProtocolError("no request")
        with Copier() as copier:
            _answer(copier, channel, request, hello.nixl)
        return True
    except ChannelError:
        return False  # the other side is gone, or wrong
    except OSError as error:
        try:
            channel.send(Refused(error.errno or errno.EIO, plain(text_of(error)), os.fsencode(error.filename or "")))
        except ChannelError:
            pass
        return False
    finally:
        channel.close()


def _answer(copier: Copier, channel: Channel, request: Request, has_nixl: bool) -> None:
    def fail(path: str, error: OSError) -> None:
        channel.send(Failed(error.errno or errno.EIO, plain(text_of(error)), os.fsencode(path)))

    paths = [os.fsdecode(path) for path in request.sources]
    if request.sends:
        sources = [_expanded(path) for path in paths]

        def ignore(*_: object) -> None:  # the receiver reports them
            pass

        _send(copier, channel, sources, request, _Silent(), ignore, ignore, fail, has_nixl)
    else:
        with _bases(paths, _expanded(os.fsdecode(request.destination)), request) as bases:
            settings, mounts, cancel = copier.settings, copier.mounts(), Cancellation()
            Receiver(settings, mounts, channel, bases, request, _Silent(), cancel, peer_has_nixl=has_nixl).run()


def _expanded(path: str) -> str:
    """Return a path of this machine that was given on the other one: "" is the home directory, where a shell starts."""
    return os.path.expanduser(path) or "."


@contextmanager
def _bases(paths: Sequence[str], destination: str, request: Request) -> Iterator[list[Entry]]:
    """Find the destinations of sources, with their directories open."""
    with ExitStack() as opened:
        stripped = destination.rstrip("/") or "/"
        named = opened.enter_context(_ends.find_targets(paths, stripped, follow=False, directory=request.in_directory))
        try:
            bases = [opened.enter_context(entry.located()) for _, entry in named]
        except OSError as error:
            raise OSError(error.errno, text_of(error), destination) from None
        yield bases


def _send(
    copier: Copier,
    channel: Channel,
    sources: Sequence[str],
    request: Request,
    sink: Sink,
    take: Callable[[Sent, Result], None],
    fail: Callable[[Failed], None],
    fail_here: Callable[[str, OSError], None],
    peer_has_nixl: bool,
) -> None:
    """Send files, and read the results on a thread of its own."""
    follow = not request.recursive or request.dereference
    entries = [Entry.of(source, follow=follow) for source in sources]
    sender = Sender(
        channel, copier.mounts(), entries, request, fail_here, sink.moved, sink.noticed, peer_has_nixl=peer_has_nixl
    )
    failures: list[Exception] = []

    def read() -> None:
        try:
            sender.read_results(take, fail)
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)
            channel.stop()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    ended: ChannelError | None = None
    try:
        plan = sender.plan()
        sink.planned(plan.size)
        sender.run(plan)
        thread.join()
    except ConnectionEnded as error:
        ended = error
        thread.join(_END_SECONDS)  # the results end as well, and may say why
    except ChannelError as error:
        ended = error
    finally:
        channel.stop()
        thread.join()
    for failure in failures:
        if ended is None or type(failure) is not ChannelError:
            raise failure
    if ended is not None:
        raise ended


# ---- one copy, of names that a program has given ----


class _One:
    """Takes what becomes of one file."""

    def __init__(self, progress: Callable[[CopyProgress], None] | None, notice: Callable[[str], None] | None) -> None:
        self._progress = progress
        self._notice = notice
        self._size = 0
        self._reported = 0.0
        self.outcome: CopyResult | CopyError | None = None

    def planned(self, size: int) -> None:
        self._size = size

    def moved(self, source: str, count: int) -> None:
        now = time.monotonic()
        if self._progress is not None and now - self._reported >= _PROGRESS_SECONDS:
            self._reported = now
            self._progress(CopyProgress(count, max(count, self._size), {"pipe": count}))

    def noticed(self, text: str) -> None:
        if self._notice is not None:
            self._notice(text)

    def ended(self, source: str, outcome: CopyResult | CopyError | None) -> None:
        self.outcome = outcome


def copy_file(
    copier: Copier,
    source: str,
    destination: str,
    options: CopyOptions,
    progress: Callable[[CopyProgress], None] | None,
    cancel: Cancellation | None,
) -> CopyResult:
    """Copy from or to another machine by ssh. Raises CopyError."""
    cancel, sink = cancel or Cancellation(), _One(progress, copier.settings.notice)
    request = Request(False, [], preserve=options.preserve, verify=options.verify, fsync=options.fsync)
    try:
        check_options(options)
        ends = [names.parse(name) if names.is_node_name(name) else None for name in (source, destination)]
        node = ends[0] or ends[1]
        assert node is not None
        if all(ends):
            raise OSError(errno.EINVAL, BOTH_REMOTE, destination)
        with connected(node.host, cancel=cancel, notice=copier.settings.notice) as peer:
            if ends[0] is not None:
                download(copier, peer, [node.path], destination, request, sink, cancel)
            else:
                upload(copier, peer, [source], node, request, sink)
    except CopyError:
        raise
    except OSError as error:
        raise CopyError(error.errno or errno.EIO, text_of(error), str(error.filename or source)) from None
    if isinstance(sink.outcome, CopyResult):
        return sink.outcome
    raise sink.outcome or CopyError(errno.EIO, "nothing was copied", source, destination)


def check_options(options: CopyOptions) -> None:
    """Raise OSError EINVAL for options that copies between machines do not have."""
    if options.partial:
        raise OSError(errno.EINVAL, "partial cannot be used with HOST:PATH, where a file comes whole or not at all")
    if options.fastpath == "require":
        raise OSError(errno.EINVAL, "fastpath require cannot be used with HOST:PATH: the bytes come from the network")
