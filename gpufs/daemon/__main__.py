"""The process that serves one mount: it builds the parts in order and takes them apart again whatever happens.

``gpufs mount`` starts it as ``python -m gpufs.daemon [--answer-fd N] [--log-fd N] MOUNTPOINT`` in a session of its
own, with a :class:`~gpufs.daemon.startup.MountRequest` on standard input. With ``--answer-fd`` it writes one JSON line
there: {"ok": true, ...} once the mount answers requests, or {"error": errno, "message": text}. ``--log-fd`` is a
descriptor of systemd's journal, for the log. The keeper starts it as ``python -m gpufs.daemon --takeover-fd N
MOUNTPOINT`` in place of a daemon that has died.

It ends when the mount is unmounted, by anybody, or on SIGTERM or SIGINT. A signal cancels running copies and unmounts;
a mount that is in use is detached, and calls on its open files fail from then on. If the daemon dies in another way,
the keeper (native/keeper/keeper.cc) starts another one, or the guard (gpufs/daemon/guard.py), which unmounts.
"""

import errno
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import trio

from gpufs import config, engine, service, statistics
from gpufs._version import __version__
from gpufs.daemon import control_plane, environment, guard, mountpoint, takeover
from gpufs.daemon.devices import open_engine
from gpufs.daemon.keeper import Keeper, Key, MessageKind, new_memfd, send_reason
from gpufs.daemon.logs import Log
from gpufs.daemon.serving import SIGNALS, TASKS, Serving
from gpufs.daemon.startup import LauncherAnswer, MountRequest, StartFailure
from gpufs.fs.connection import RequestLoop
from gpufs.fs.quotas import Quotas
from gpufs.fs.requests import ROOT_INODE

log = logging.getLogger("gpufs.daemon")


def _reraise_simplified(failures: BaseExceptionGroup[BaseException]) -> None:
    """Raise the one failure that the user gets a line about, if it is among these: no start, or no memory."""
    if failures.split(StartFailure)[0] is not None:
        failure: BaseException = failures
        while isinstance(failure, BaseExceptionGroup):
            failure = next(iter((failure.subgroup(StartFailure) or failure).exceptions))
        raise failure from None
    if failures.subgroup(lambda each: isinstance(each, MemoryError) or getattr(each, "errno", 0) == errno.ENOMEM):
        raise MemoryError from None


def _serve(request: MountRequest, answer: LauncherAnswer, logs: Log, taken: takeover.Takeover | None) -> None:
    """Serves one mount from its engine to its end, a new one or one whose daemon has died (``taken``).

    StartFailure if it cannot be started.
    """
    values = request.config
    for _, path, _ in values["backing"] or ():
        mountpoint.refuse_itself(path, request.mountpoint)
    runtime = environment.runtime_directory(allow_other=bool(values["allow_other"]))
    history = takeover.History() if taken is None else taken.history
    with ExitStack() as parts, _start_of(taken, logs) as answers:
        owner = _watch(request.owner, parts) if taken is None else taken.held.get(Key.OWNER, -1)
        if taken is not None:
            statistics.remove_dead(taken.entry.device, os.geteuid())  # of the daemons before
        counters = environment.CountersFile(runtime, request.mountpoint)
        service.sweep(runtime)
        parts.callback(counters.remove)
        opened, notes = open_engine(values, counters.path, again=taken is not None)
        parts.callback(opened.close)
        with _start_failures():
            engine.io_configure(opened, **config.io_options(values))
            relay_fd, control_fd = engine.relay_pair()
        control = parts.enter_context(socket.socket(fileno=control_fd))
        early = _note_signals()
        obstacle = takeover.obstacle(values, opened)
        keeper = _start_keeper(request, obstacle, parts) if taken is None else parts.enter_context(taken.keeper)
        if taken is None:
            try:
                fuse_fd, entry = parts.enter_context(mountpoint.mounted(request))
            except BaseException:
                os.close(relay_fd)
                raise
        else:
            fuse_fd, entry = os.dup(taken.held[Key.CONNECTION]), taken.entry
            parts.enter_context(mountpoint.unmounted_at_the_end(entry, fuse_fd))
        survives = keeper is not None and obstacle is None
        if keeper is not None and not survives:
            takeover.instruct(keeper, request, entry, survives=False)
        counters.belongs_to(entry.device)
        with _start_failures():
            mount = engine.Mount(
                opened,
                fuse_fd,
                relay_fd,
                mask_flags=values["mask_flags"],
                metadata_bytes=config.metadata_memory(values["metadata"]),
                user_bytes=values["user_memory"],
                keeper=keeper if survives else None,
            )
        parts.callback(mount.close)
        if taken is None:
            for user, limit in values["user_limits"] or ():
                Quotas(mount).set(ROOT_INODE, user, engine.NO_LIMIT if limit is None else limit)
        if keeper is not None and survives:
            given = {"connection": fuse_fd, "owner": owner}
            takeover.prepare(keeper, request, logs, mount, entry, **given, began=history.began)
        # fusermount3, which mounts for plain users, does not take all flags.
        asked = frozenset(request.flags) if os.geteuid() != 0 else frozenset()
        mountpoint.set_access_times(mount, entry.flags, asked)
        socket_path = service.socket_path(runtime, entry.device)
        parts.callback(service.remove_directory, socket_path)
        serving = Serving(
            request,
            answer,
            logs,
            mount,
            entry,
            keeper,
            first_obstacle=obstacle,
            socket_path=socket_path,
            answers=answers,
            early=early,
            owner=owner,
            notes=notes,
            died=None if taken is None else taken.died,
            history=history,
            kept=service.restore(mount, keeper if survives else None, {} if taken is None else taken.held),
        )
        operations = control_plane.build(request, mount, serving)
        if taken is not None:
            mount.close_handles(taken.released)
        if values["evict"]:
            mount.evict_when_full()
        mount.start()
        log.info("gpufs %s serves %s with driver %s", __version__, request.mountpoint, opened.driver)
        try:
            trio.run(serving.run, RequestLoop(control, operations, TASKS))
        except BaseExceptionGroup as failures:
            _reraise_simplified(failures)
            raise
        except Exception:  # of trio itself
            serving.leave_if_it_survives()
            raise
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # until the interpreter has ended
    log.info("the mount at %s has ended", request.mountpoint)
    with suppress(OSError):  # a launcher that still waits, and may have gone
        answer.send({"error": errno.ECANCELED, "message": f"the mount has ended at once: {serving.end}"})


@contextmanager
def _start_of(taken: takeover.Takeover | None, logs: Log) -> Iterator[Callable[[], None]]:
    """The time until the mount answers again, if it is taken over: a failure must take nothing apart until then.

    Yields the function that ends this time. The keeper tries again later, or at once with `gpufs restart`.
    """
    over = threading.Event()
    try:
        yield over.set
    except BaseException as failure:
        if taken is not None and not over.is_set():
            known = isinstance(failure, StartFailure)
            log.critical("cannot take over: %s", failure if known else "internal failure", exc_info=not known)
            taken.keeper.fails(f"it could not take over: {takeover.reason_of(failure)}")
            takeover.leave_to_the_keeper(1, logs)
        raise


def _start_keeper(request: MountRequest, obstacle: str | None, parts: ExitStack) -> Keeper | None:
    """Start the keeper, which ends with the ``parts``. None if nothing is to be done after the daemon's death.

    The mount is useful without it, so a keeper that cannot be started is only logged.
    """
    unmounts = request.config["auto_unmount"]
    if not unmounts and obstacle is not None:
        return None
    try:
        keeper = parts.enter_context(Keeper(request.mountpoint))
        keeper.hold({Key.DEATHS: new_memfd("gpufs-deaths", b"")})
    except OSError as failure:
        log.error("the mount ends with its daemon, and no auto_unmount: %s", failure)
        return None
    if unmounts:
        keeper.instruct(MessageKind.GIVE_UP, guard.command(request.mountpoint, request.config["log_file"]))
    return keeper


def _watch(process: int | None, parts: ExitStack) -> int:
    """Return a descriptor that becomes readable when the process ends; -1 without one."""
    if process is None:
        return -1
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        raise StartFailure(errno.ESRCH, "the program that mounts has ended") from None
    parts.callback(os.close, descriptor)
    return descriptor


def _note_signals() -> list[int]:
    """Block the signals that end the mount, and that of `gpufs restart`. The list gets those that end it all the same.

    A vendor library's threads may receive them. And while the mount ends, another signal must not end the process
    before everything is taken apart.
    """
    early: list[int] = []
    signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, signal.SIGUSR2))
    for number in SIGNALS:
        signal.signal(number, lambda arrived, _: early.append(arrived))
    return early


@contextmanager
def _start_failures() -> Iterator[None]:
    try:
        yield
    except engine.EngineError as failure:
        raise StartFailure.of(failure) from None


def main(arguments: list[str] | None = None) -> int:
    """Serve the mount of the command line, and return the exit code."""
    # By hand: argparse would be a part of each start, and its help is for nobody.
    *options, path = sys.argv[1:] if arguments is None else arguments
    passed = {name: int(number) for name, number in zip(options[::2], options[1::2], strict=True)}
    answer_fd, takeover_fd = passed.get("--answer-fd"), passed.get("--takeover-fd")
    log_fd = passed.get("--log-fd", -1)
    for fd in (answer_fd, log_fd):
        if fd is not None and fd >= 0:
            os.set_inheritable(fd, False)
    answer = LauncherAnswer(answer_fd)
    logs = None
    try:
        taken = None
        if takeover_fd is not None:
            taken = takeover.begin(takeover_fd, path)
        request = taken.request if taken is not None else MountRequest.decode(sys.stdin.buffer.read())
        environment.set_limits(core_dumps=bool(request.config["core_dumps"]))
        logs = Log(
            request.config["log_file"],
            request.config["log_level"],
            foreground=request.foreground and taken is None,
            fd=log_fd if taken is None else taken.held.get(Key.LOG, -1),
        )
        environment.spare_from_oom_killer()
        os.umask(0)
        _serve(request, answer, logs, taken)
    except StartFailure as failure:
        if takeover_fd is not None:
            log.error("%s", failure.message)  # no launcher waits for it
            send_reason(takeover_fd, failure.message)
        _report(answer, failure.errno, failure.message)
        return 1
    except MemoryError:
        log.error("out of memory: the mount ends")
        _report(answer, errno.ENOMEM, "out of memory")
        return 1
    except Exception as failure:
        log.exception("the mount failed")
        code, text = errno.EIO, f"internal failure: {failure}"
        if isinstance(failure, OSError) and failure.errno:
            where = f"{failure.filename}: " if failure.filename is not None else ""
            code, text = failure.errno, f"{where}{failure.strerror}"
        _report(answer, code, text)
        return 1
    finally:
        if logs is not None:
            logs.close()
    return 0


def _report(answer: LauncherAnswer, code: int, message: str) -> None:
    """Report to the launcher, or to the user if it runs in the foreground, why there is no mount."""
    with suppress(OSError):  # the launcher has gone
        if not answer.send({"error": code, "message": message}):
            print(f"gpufs: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
