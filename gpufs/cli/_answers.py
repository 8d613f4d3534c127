"""Asks mounts that may never answer, or answer anything: their daemons may be other users' programs.

Each question is asked in a process of its own. A process that waits for a hung mount may not even end after SIGKILL,
but this command must. That process also shows the answer as the command will: if it fails over a wrong answer, the
command gets one line about it, and goes on with the other mounts.
"""

import json
import os
import resource
import signal
import threading
from collections.abc import Callable, Sequence
from errno import EFBIG, ENOTCONN, EPROTO, ETIMEDOUT
from typing import Any

from gpufs.cli._mounts import Process, wait_for_end
from gpufs.cli._output import Failure, complain
from gpufs.client._daemons import MOST_BYTES
from gpufs.syscalls import os_error

Show = Callable[[Any], object]

_asking = threading.Lock()  # the threads of `gpufs metrics --listen` ask one after the other
_unended: list[int] = []  # processes that we have started and not reaped


def ask(questions: Sequence[Callable[[], Any]], show: Show, timeout: float) -> list[Any]:
    """Call functions in parallel that may never return. Return for each its value, one that JSON has, or an OSError.

    Thread-safe.

    ``show`` makes what is printed of a value. The OSErrors are those that the functions raised, ETIMEDOUT for those
    that do not return, EFBIG for values that are too long, EPROTO for those that cannot be shown.
    """
    with _asking:
        return _ask(questions, show, timeout)


def _ask(questions: Sequence[Callable[[], Any]], show: Show, timeout: float) -> list[Any]:
    results: list[Any] = [OSError(ETIMEDOUT, f"no answer within {timeout:g} seconds") for _ in questions]
    children: dict[int, tuple[Process, int]] = {}  # index of the question: process, descriptor of its answer
    _reap()
    # An interrupt within fork() prints a traceback in the child, and one just after it leaves a child that nobody ends.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for place, question in enumerate(questions):
            try:
                children[place] = _start(question, show)
            except OSError as error:  # too many mounts of other users
                results[place] = error
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        hung = wait_for_end([process for process, _ in children.values()], timeout)
        for place, (process, answer) in children.items():
            if process not in hung:
                results[place] = _read(answer)
    finally:  # also after KeyboardInterrupt
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for process, answer in children.values():
            os.close(answer)
            process.signal(signal.SIGKILL)
            process.close()
        _reap()
    return results


def _reap() -> None:
    """Reap processes that have ended, so that none stays as a zombie while a command runs on."""
    _unended[:] = [pid for pid in _unended if os.waitpid(pid, os.WNOHANG) == (0, 0)]


def _start(question: Callable[[], Any], show: Show) -> tuple[Process, int]:
    answer = os.memfd_create("answer")
    try:
        pid = os.fork()
        if pid == 0:
            try:
                _answer(question, show, answer)  # with SIGINT blocked: the parent ends this process
            finally:
                os._exit(0)  # also after an exception: the rest is the parent's
        _unended.append(pid)
        try:
            return Process(pid, os.pidfd_open(pid)), answer
        except OSError:  # no descriptor is left
            os.kill(pid, signal.SIGKILL)
            raise
    except OSError:
        os.close(answer)
        raise


def _answer(question: Callable[[], Any], show: Show, answer: int) -> None:
    """Write the value, or the errno and the text of a failure; in the child."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # the child may outlive the command, whose output must end
        os.dup2(null, fd)
    try:
        value = question()
        # Fails here, not in the command, if the answer cannot be written as JSON.
        json.dumps([value, show(value)], indent=2, ensure_ascii=False).encode(errors="surrogateescape")
        report = {"value": value}
    except OSError as error:
        report = {"errno": error.errno or ENOTCONN, "text": error.strerror or str(error)}
    except Exception as error:  # noqa: BLE001 - a wrong answer can cause any
        report = {"errno": EPROTO, "text": f"its answer is not understood: {type(error).__name__}: {error}"}
    text = json.dumps(report).encode()
    while text:
        text = text[os.write(answer, text) :]


def _read(answer: int) -> Any:
    size = os.fstat(answer).st_size
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and size >= limit:  # the end of the answer is missing
        return OSError(EFBIG, f"its answer does not fit into {limit} bytes, the most that ulimit -f allows")
    if size > MOST_BYTES:
        return os_error(EFBIG)
    if not size:
        return OSError(EPROTO, "the process that asked has crashed")
    report = json.loads(os.pread(answer, size, 0))
    return report["value"] if "value" in report else OSError(report["errno"], report["text"])


def finish(silent: Sequence[tuple[str, object]], asked: int, *, named: bool) -> None:
    """Complain about mounts that did not answer: mountpoints and reasons. Failure if they were ``named``."""
    for mountpoint, reason in silent:
        complain(f"{mountpoint}: {reason}")
    if named and silent:
        raise Failure(f"{len(silent)} of {asked} mounts did not answer")
