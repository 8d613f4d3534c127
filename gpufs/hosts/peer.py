"""Starts gpufs on another machine, by ssh or what stands for it, and says how it has ended."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final
from urllib.parse import quote

from gpufs._version import __version__
from gpufs.hosts.channel import CancelSignal, ChannelError, ConnectionEnded, HostChannel, RefusedError
from gpufs.hosts.messages import VERSION
from gpufs.hosts.names import HostName, ssh_argument
from gpufs.syscalls import start_thread

SHELL: Final = "ssh"
PROGRAM: Final = "gpufs"
COMMAND: Final = "serve-copy"
# The first line of the other side, with the versions of the protocol and of gpufs: what comes before it is not gpufs.
_GREETING: Final = "gpufs copy "
_GREETING_BYTES: Final = 256
_SILENCE_SECONDS: Final = 10.0
_PASSWORD_SECONDS: Final = 600.0  # for the question of ssh, which comes first
_END_SECONDS: Final = 1.0
_NOT_FOUND: Final = 127  # the exit code of shells


def greeting() -> bytes:
    return f"{_GREETING}{VERSION} {__version__}".encode()


class Peer:
    """gpufs on another machine.

    ``shell``: the command that runs a program there; it gets the host and the program as arguments. ``program``: as the
    remote shell takes it. ``passes_on``: it passes files on to other machines, by the same two commands.
    """

    def __init__(
        self, host: str, shell: str, program: str, cancel: CancelSignal | None = None, *, passes_on: bool = False
    ) -> None:
        self.host = host
        try:
            words = shlex.split(shell)
        except ValueError as error:
            raise OSError(errno.EINVAL, f"cannot be split into words: {error}", shell) from None
        if not words or not program.split():
            raise OSError(errno.EINVAL, "an empty command is given", host)
        if os.path.basename(words[0]) == SHELL:
            words.append("--")  # after its options: what follows is the host
        # ssh joins its arguments by spaces, and the remote shell parses the whole.
        command: Sequence[str] = [*words, ssh_argument(host), *program.split(), COMMAND]
        if passes_on and (shell, program) != (SHELL, PROGRAM):
            # Words that no shell changes.
            command = [*command, f"--shell={quote(shell, safe='')}", f"--program={quote(program, safe='')}"]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
            )
        except OSError as error:
            raise OSError(error.errno, f"cannot be run: {error.strerror}", words[0]) from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._lines: deque[str] = deque(maxlen=20)  # the last of its standard error
        try:
            self._reader = start_thread(self._read_errors)
        except OSError:
            self._process.kill()
            self._process.communicate()
            raise
        fds = (self._process.stdout.fileno(), self._process.stdin.fileno())
        self.channel = HostChannel(*fds, silence=_SILENCE_SECONDS, cancel=cancel)

    def greet(self) -> None:
        """Wait for the other side, which must speak our version of the protocol. OSError if that fails."""
        line = self.channel.read_line(_GREETING_BYTES, _PASSWORD_SECONDS).decode(errors="backslashreplace")
        if not line.startswith(_GREETING):
            text = f"{line!r} came instead of gpufs: is it printed by a shell's file?"
            raise OSError(errno.EPROTO, text, self.host)
        version, _, program = line.removeprefix(_GREETING).partition(" ")
        if version != str(VERSION):
            text = f"gpufs {program} there speaks version {version} of the protocol, and this one {VERSION}"
            raise OSError(errno.EPROTONOSUPPORT, f"{text}: install the same gpufs on both", self.host)
        self.channel.start_alive()

    def explain(self, error: ChannelError) -> OSError:
        """Return an error of the channel for the user: the host, and why its connection has ended."""
        if isinstance(error, RefusedError):
            return OSError(error.errno, error.strerror, str(HostName(self.host, error.filename)))
        if not isinstance(error, ConnectionEnded):
            return OSError(error.errno, error.strerror, self.host)
        text = error.strerror or str(error)
        code = self._wait(_END_SECONDS) if error.errno != errno.ETIMEDOUT else None
        if code is not None:
            self._reader.join(_END_SECONDS)
        if self._lines:
            text += f": {self._lines.pop()}"
        elif code:
            text += f": exit code {code}" if code > 0 else f": signal {-code}"
        if code == _NOT_FOUND:
            text += " (--remote-gpufs names the program there)"
        return OSError(error.errno, text, self.host)

    def close(self, notice: Callable[[str], None] | None) -> None:
        """End the connection and the program. ``notice`` gets what it has printed on standard error."""
        self.channel.close()
        process = self._process
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()
        if self._wait(_END_SECONDS) is None:
            process.terminate()
            if self._wait(_END_SECONDS) is None:
                process.kill()
                process.wait()
        self._reader.join(_END_SECONDS)
        if process.stderr is not None and not self._reader.is_alive():  # else a process that ssh has left has the pipe
            process.stderr.close()
        for line in list(self._lines):
            if notice is not None:
                notice(f"{self.host}: {line}")

    def _wait(self, seconds: float) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        fd = self._process.stderr.fileno()
        rest = b""
        while block := os.read(fd, 4096):
            *lines, rest = (rest + block).replace(b"\r", b"").split(b"\n")
            rest = rest[-4096:]
            self._lines.extend(line.decode(errors="backslashreplace") for line in lines if line.strip())
        if rest.strip():
            self._lines.append(rest.decode(errors="backslashreplace"))


@contextmanager
def connected(
    hosts: Sequence[str],
    *,
    shell: str = "",
    program: str = "",
    cancel: CancelSignal | None = None,
    notice: Callable[[str], None] | None = None,
) -> Iterator[Peer]:
    """Start gpufs on the first of a chain of machines. Errors of the connection become errors for the user. OSError."""
    host, *behind = hosts
    peer = Peer(host, shell or SHELL, program or PROGRAM, cancel, passes_on=bool(behind))
    try:
        peer.greet()
        yield peer
    except ChannelError as error:
        failure = peer.explain(error)
        if behind:
            verb = "get" if len(behind) > 1 else "gets"
            failure.strerror = f"{failure.strerror} ({', '.join(behind)} {verb} the files from there)"
        raise failure from None
    finally:
        peer.close(notice)
