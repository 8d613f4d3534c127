"""Runs a command in a process of its own, so that a signal ends the command although a file system does not answer.

A thread that waits in the kernel for such a file system keeps its process until there is an answer, even after SIGKILL.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from gpufs.cli._output import complain
from gpufs.exceptions import text_of
from gpufs.syscalls import start_thread


def run_apart(work: Callable[[], int], seconds: float) -> int:
    """Return the exit code of a function that a child of this process calls; what ends that ends this process, too.

    The child gets the signals of this process. ``seconds``: how long it may run after the first one.
    """
    asked = {number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if not _is_ignored(number)}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*asked, signal.SIGCHLD})
    of_child, of_parent = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(of_parent)
        try:
            start_thread(_end_after, of_child)
        except OSError as error:
            complain(text_of(error))
            return 1
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return work()
    first, deadline = 0, float("inf")
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        arrived = signal.sigtimedwait({*asked, signal.SIGCHLD}, 1.0)
        if arrived is not None and arrived.si_signo in asked:
            os.kill(child, arrived.si_signo)
            if not first:
                first, deadline = arrived.si_signo, time.monotonic() + seconds
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code = os.waitstatus_to_exitcode(ended[1])
    if ended == (0, 0):
        complain("interrupted, and a file system does not answer: the next run removes what is left of this one")
        code = -first
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _end_after(parent: int) -> None:
    """End this process when its parent has ended. Its output ends even if a thread cannot."""
    os.read(parent, 1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN
