"""Starts the daemon of a mount, for the command line and for programs. A failed start leaves nothing behind."""

import errno
import json
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from typing import IO, Any, Final, NoReturn

from gpufs import mounting
from gpufs.daemon.startup import DAEMON, MountRequest, is_journal

_GRACE: Final = 3.0  # seconds between asking a process to end and ending it
# Directories that programs need, this one among them. A mount over one of them can make a machine unusable: without
# /tmp few shells and editors start.
_NEEDED: Final = (
    *("/bin", "/boot", "/dev", "/dev/shm", "/etc", "/home", "/lib", "/proc", "/root", "/run", "/sbin", "/sys", "/tmp"),
    *("/usr", "/var", "/var/tmp"),
)
# File systems of the kernel's interfaces.
_KERNELS: Final = frozenset({"proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs"})


def check_mountpoint(path: str, mountpoint: str, *, non_empty: bool) -> None:
    """Raise OSError, with one line, if nothing may be mounted there. ``path``: as the user wrote it, for the message.

    ``non_empty``: whether the directory may have files, which the mount hides.
    """

    def fail(code: int, text: str) -> NoReturn:
        raise OSError(code, f"{path}: {text}")

    entries = list(mounting.listed())
    if mounting.entry_of(mountpoint, entries) is not None:
        text = f"gpufs is mounted there already: gpufs umount {mountpoint} ends it, with --force if it does not answer"
        fail(errno.EBUSY, text)
    try:
        status = os.stat(mountpoint)
    except FileNotFoundError:
        fail(errno.ENOENT, "there is no such directory: make it first")
    except OSError as error:
        fail(error.errno or errno.EACCES, os.strerror(error.errno or errno.EACCES))
    if not stat.S_ISDIR(status.st_mode):
        fail(errno.ENOTDIR, "not a directory")
    if hidden := _hidden(mountpoint):
        fail(errno.EBUSY, f"a mount there would hide {hidden}, which programs need: mount on a directory of your own")
    kind = next((entry.fstype for entry in entries if entry.st_dev == status.st_dev), None)
    if kind in _KERNELS:
        fail(errno.EINVAL, f"is on a {kind} file system: mount on a directory of your own")
    if os.geteuid() != 0 and not os.access(mountpoint, os.W_OK | os.X_OK):
        text = f"{os.strerror(errno.EACCES)} (plain users mount only on directories that they may write to)"
        fail(errno.EACCES, text)
    if not non_empty and _has_files(mountpoint):
        text = (
            "the directory is not empty: --allow-non-empty or allow_non_empty=True hides its files until the mount ends"
        )
        fail(errno.ENOTEMPTY, text)


def _has_files(directory: str) -> bool:
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is not None
    except OSError:  # the directory cannot be read
        return False


def _hidden(mountpoint: str) -> str | None:
    """Return a directory that programs need and a mount there would hide, or None."""
    program = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    prefix = mountpoint.rstrip("/") + "/"
    for name in (*_NEEDED, os.path.expanduser("~"), program, sys.prefix, sys.base_prefix):
        place = os.path.realpath(name)
        if place == mountpoint or place.startswith(prefix):
            return name
    return None


def run_in_foreground(request: MountRequest) -> NoReturn:
    """Replace this process by the daemon."""
    with tempfile.TemporaryFile() as file:  # unlike a pipe it takes any length
        file.write(request.encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.chdir("/")  # so that relative entries of the module search path do not name the user's directory
    os.execv(DAEMON[0], [*DAEMON, request.mountpoint])


def launch(
    request: MountRequest, timeout: float, *, service: bool = False
) -> tuple["subprocess.Popen[bytes]", dict[str, Any]]:
    """Start the daemon in its own session; return its process, and its answer once the mount works.

    ``service``: if systemd has started this very process, the daemon reports to it as that service.

    OSError, with one line, if it reports an error, ends, or does not answer within ``timeout`` seconds. Then, and after
    any other exception, the daemon has ended and nothing is mounted. If this process dies, the daemon ends by itself:
    its request or the reader of its answer is missing.
    """
    with tempfile.TemporaryFile() as errors, ExitStack() as opened:
        answer_end, daemon_end = os.pipe2(os.O_CLOEXEC)
        opened.callback(os.close, answer_end)
        with ExitStack() as given:
            given.callback(os.close, daemon_end)
            passed = {"--answer-fd": daemon_end}
            if is_journal(2):  # mount(8) run by systemd, for a line of /etc/fstab
                passed["--log-fd"] = os.dup(2)
                given.callback(os.close, passed["--log-fd"])
            process = subprocess.Popen(
                [*DAEMON, *(word for name, fd in passed.items() for word in (name, str(fd))), request.mountpoint],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd="/",
                env=_environment(service=service),
                pass_fds=tuple(passed.values()),
                start_new_session=True,
            )
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin:  # the daemon has ended; its answer gives the reason
                process.stdin.write(request.encode())
            return process, _answer(process, answer_end, errors, timeout)
        except BaseException as failure:
            _end(process)
            if problem := _unmount_left_over(request.mountpoint):
                failure.add_note(problem)
            raise


def _environment(*, service: bool) -> dict[str, str]:
    """Return the daemon's environment. Only the daemon of a service may report to systemd."""
    environment = dict(os.environ)
    environment.pop("WATCHDOG_PID", None)  # this process
    if not service or environment.get("SYSTEMD_EXEC_PID") != str(os.getpid()):
        environment.pop("NOTIFY_SOCKET", None)
        environment.pop("WATCHDOG_USEC", None)
    return environment


def _answer(process: "subprocess.Popen[bytes]", fd: int, errors: IO[bytes], timeout: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            text = f"the mount did not come up within {timeout:g} seconds{_last_line(errors)}"
            raise OSError(errno.ETIMEDOUT, text)
        part = os.read(fd, 1 << 16)
        if not part:
            break
        line += part
    try:
        answer = json.loads(line)
    except ValueError:
        text = f"the daemon ended without an answer{_how(process)}{_last_line(errors)}"
        raise OSError(errno.EIO, text) from None
    if not answer.get("ok"):
        raise OSError(answer.get("error", errno.EIO), answer.get("message", "the daemon gave no reason"))
    report: dict[str, Any] = answer
    return report


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
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            continue
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its children
        return


def _unmount_left_over(mountpoint: str) -> str | None:
    """Unmount what a daemon that was killed has left. Return what is wrong if that is impossible."""
    if mounting.entry_of(mountpoint) is not None:
        try:
            mounting.unmount(mountpoint, force=True, lazy=True)
        except OSError as error:
            if mounting.entry_of(mountpoint) is not None:  # otherwise the daemon has unmounted
                return f"{mountpoint} is still mounted: {error.strerror}"
    return None
