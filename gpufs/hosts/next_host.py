"""Passes on to the next machine of a chain what this machine receives, while it receives it."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from functools import partial
from queue import Empty, Full, Queue
from typing import Final

import msgspec

from gpufs.hosts import messages, names
from gpufs.hosts.channel import CancelSignal, ChannelError, HostChannel, HostProtocolError
from gpufs.hosts.messages import HostRequest, OfSender, plain
from gpufs.hosts.outlet import Outlet
from gpufs.hosts.peer import connected
from gpufs.syscalls import start_thread

# Blocks of BLOCK_BYTES, or messages, that have been received and not sent yet.
_QUEUED: Final = 4
_POLL_SECONDS: Final = 0.1


class NextHost:
    """The connection to the next machine. A failure there is reported upstream, and does not end the copy here."""

    def __init__(
        self, upstream: HostChannel, request: HostRequest, cancel: CancelSignal, *, shell: str = "", program: str = ""
    ) -> None:
        """``request``: its ``forward`` is not empty. ``cancel``: nobody waits for results any more.

        ``shell``, ``program``: as for connected().
        """
        self._shell = shell
        self._program = program
        targets = [names.parse(os.fsdecode(name)) for name in request.forward]
        self._hosts = [target.host for target in targets]
        path, forward = os.fsencode(targets[0].path), request.forward[1:]
        self._request = msgspec.structs.replace(request, destination=path, forward=forward)
        self._upstream = upstream
        self._cancel = cancel
        self._queue: Queue[OfSender | bytes] = Queue(_QUEUED)
        self._thread = start_thread(self._run)

    def pass_on(self, message: OfSender | memoryview) -> None:
        """Send a message, or bytes of a file, to the next machine. Nothing if that has failed."""
        item = bytes(message) if isinstance(message, memoryview) else message
        while self._thread.is_alive():
            with suppress(Full):
                self._queue.put(item, timeout=_POLL_SECONDS)
                return

    def finish(self) -> None:
        """Wait until the next machine has finished, or failed."""
        self._thread.join()

    def _run(self) -> None:
        shell, program = self._shell, self._program
        try:
            with connected(self._hosts, shell=shell, program=program, cancel=self._cancel, notice=self._notice) as peer:
                peer.channel.send(self._request)
                outlet = Outlet(peer.channel, lambda text: self._notice(f"{self._hosts[0]}: {text}"))
                outlet.run(partial(self._write, peer.channel, outlet), self._pass_back)
        except OSError as error:
            self._lose(error)
        except Exception as error:  # noqa: BLE001 - whoever waits for results must hear of it
            self._lose(OSError(errno.EIO, f"{type(error).__name__}: {error}"))

    def _lose(self, error: OSError) -> None:
        if not self._cancel.cancelled:
            self._tell(messages.Lost.of(error, str(error.filename or self._hosts[0]), hop=1))

    def _write(self, channel: HostChannel, outlet: Outlet) -> None:
        while True:
            try:
                item = self._queue.get(timeout=_POLL_SECONDS)
            except Empty:
                channel.check()
                continue
            if isinstance(item, bytes):
                outlet.send_copy(item)
                continue
            if isinstance(item, messages.Plan):
                outlet.send_plan(item)
                continue
            if isinstance(item, messages.End):
                outlet.await_reads()
            channel.send(item)
            if isinstance(item, messages.FilesDone):
                return

    def _pass_back(self, report: messages.Report) -> None:
        if report.hop >= len(self._hosts):
            raise HostProtocolError("no result")
        report.hop += 1
        self._tell(report)

    def _notice(self, text: str) -> None:
        self._tell(messages.Notice(plain(text)))

    def _tell(self, report: messages.Report) -> None:
        with suppress(ChannelError):  # then this copy ends anyway
            self._upstream.send(report)
