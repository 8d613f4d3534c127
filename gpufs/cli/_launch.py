"""Starts the daemon of a mount. A failed start leaves nothing behind."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, Any, NoReturn

from gpufs import mounting
from gpufs.cli._errors import Failure, complain
from gpufs.cli._python import python_module
from gpufs.daemon.startup import MountRequest, is_journal

DAEMON = tuple(python_module("gpufs.daemon"))
_GRACE = 3.0  # seconds between asking a process to end and ending it


def run_in_foreground(request: MountRequest) -> NoReturn:
    """Replaces this process by the daemon."""
    with tempfile.TemporaryFile() as file:  # unlike a pipe it takes any length
        file.write(request.encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.chdir("/")  # so that relative entries of the module search path do not name the user's directory
    os.execv(DAEMON[0], [*DAEMON, request.mountpoint])


def launch(request: MountRequest, timeout: float) -> dict[str, Any]:
    """Starts the daemon in its own session and returns its answer once the mount works.

    Failure if it reports an error, ends, or does not answer within ``timeout`` seconds. Then, and if this process is
    interrupted, the daemon has ended and nothing is mounted.
    """
    answer_end, daemon_end = os.pipe2(os.O_CLOEXEC)
    passed = {"--answer-fd": daemon_end}
    if is_journal(2):  # mount(8) run by systemd, for a line of /etc/fstab
        passed["--journal-fd"] = os.dup(2)
    # A signal during the start is delayed until there is a process to end.
    early: list[int] = []
    previous = {
        number: signal.signal(number, lambda caught, _: early.append(caught))
        for number in (signal.SIGTERM, signal.SIGINT)
        if number == signal.SIGTERM or callable(signal.getsignal(number))  # an ignored SIGINT stays ignored
    }
    try:
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [*DAEMON, *(word for name, fd in passed.items() for word in (name, str(fd))), request.mountpoint],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd="/",
                pass_fds=tuple(passed.values()),
                start_new_session=True,
            )
            came_up = False
            try:
                for fd in passed.values():
                    os.close(fd)
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
                if signal.SIGINT in previous:
                    signal.signal(signal.SIGINT, previous[signal.SIGINT])
                for number in early:
                    signal.raise_signal(number)
                assert process.stdin is not None
                try:
                    process.stdin.write(request.encode())
                    process.stdin.close()
                except BrokenPipeError:
                    pass  # it has ended; its answer gives the reason
                answer = _answer(process, answer_end, errors, timeout)
                came_up = True
                process.returncode = 0  # the daemon lives on: Popen must not wait for it
                return answer
            finally:
                os.close(answer_end)
                if not came_up:
                    for number in previous:
                        signal.signal(number, signal.SIG_IGN)  # another signal must not interrupt the cleanup
                    _end(process)
                    _unmount_left_over(request.mountpoint)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _answer(process: "subprocess.Popen[bytes]", fd: int, errors: IO[bytes], timeout: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise Failure(f"the mount did not come up within {timeout:g} seconds{_last_line(errors)}")
        part = os.read(fd, 1 << 16)
        if not part:
            break
        line += part
    try:
        answer = json.loads(line)
    except ValueError:
        raise Failure(f"the daemon ended without an answer{_how(process)}{_last_line(errors)}") from None
    if not isinstance(answer, dict) or not answer.get("ok"):
        text = answer.get("message") if isinstance(answer, dict) else None
        raise Failure(str(text or "the daemon gave no reason"))
    return answer


def _how(process: "subprocess.Popen[bytes]") -> str:
    try:
        code = process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        return ""
    if code < 0:
        return f" ({signal.Signals(-code).name})" if -code in set(signal.Signals) else f" (signal {-code})"
    return f" (exit code {code})"


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0, os.SEEK_END)
    errors.seek(max(errors.tell() - 4096, 0))
    lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1]}" if lines else ""


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process and its whole process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            continue
        if number == signal.SIGTERM:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # its children
            except ProcessLookupError:
                pass
        return


def _unmount_left_over(mountpoint: str) -> None:
    if mounting.entry_of(mountpoint) is not None:
        try:
            mounting.unmount(mountpoint, force=True, lazy=True)
        except OSError as error:
            if mounting.entry_of(mountpoint) is not None:  # otherwise the daemon has unmounted
                complain(f"{mountpoint} is still mounted: {error.strerror}")
