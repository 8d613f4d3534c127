"""Runs the daemon while its mount answers requests: signals, clients, the launcher's answer, the mount's end."""

import logging
import os
import select
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import trio

from gpufs import engine, mounting, service, syscalls, threads
from gpufs._printable import printable
from gpufs.daemon import devices, environment, mountpoint, takeover
from gpufs.daemon.keeper import Keeper, MessageKind
from gpufs.daemon.logs import Log
from gpufs.daemon.startup import LauncherAnswer, MountRequest, StartFailure
from gpufs.fs.connection import RequestLoop
from gpufs.fs.quotas import Quotas
from gpufs.service import Kept, Service

log = logging.getLogger("gpufs.daemon")

# These signals end the mount, SIGHUP only with a terminal. They are blocked until their handler runs: a default action
# right after mounting would end the process and leave a dead mount.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# Requests that may wait for something at a time. Fewer than these may wait for directories of the host
# (gpufs/fs/backing), so control files are answered even if all of those block. A waiting task takes some 20 KiB.
TASKS = 10_000
# Seconds at the end for cancelled copies.
_COPIES_GRACE = 6.0
# Seconds at the end for requests in progress. Those that wait for a server that hangs are abandoned.
_REQUESTS_GRACE = 2.0
# Seconds between two publications of the gauges.
_PUBLISH_SECONDS = 1.0
# Seconds between two looks at the mount's flags when many mounts come and go.
_FLAGS_PAUSE = 0.2
# Seconds after a takeover until removed files are released that the kernel forgot while there was no daemon.
_FORGOTTEN_PAUSE = 5.0
# Seconds between two looks at whether the mount still survives this daemon, and whether its contexts on GPUs work.
_PROVIDE_SECONDS = 1.0
# Seconds, at least, between two daemons because of such a context.
_CONTEXT_PAUSE = 60.0
# Seconds until the service for clients starts again after it has failed.
_SERVICE_PAUSE = 5.0
# Seconds between two returns of free heap memory to the system: malloc keeps that of files that have gone.
_TRIM_SECONDS = 60.0
# Seconds, at least, until upkeep that has failed is tried again.
_RETRY_SECONDS = 1.0


@dataclass(eq=False)
class Serving:
    """One mount while it answers requests."""

    request: MountRequest
    answer: LauncherAnswer
    log: Log
    mount: engine.Mount
    entry: mounting.MountEntry
    keeper: Keeper | None
    # The reason why the knobs and devices rule out that the mount survives; None if they do not.
    first_obstacle: str | None
    socket_path: str
    answers: Callable[[], None]  # called once the mount answers requests
    early: list[int]  # signals that came before this object could wait for them
    owner: int  # a descriptor of the process with which the mount ends; -1 for none
    notes: list[str]  # what the user gets to read once the mount answers
    # When the daemon died that served the mount before, in nanoseconds of CLOCK_MONOTONIC; None for a new mount.
    died: int | None
    history: takeover.History
    kept: Kept  # what that daemon's clients had, which the service takes over; or where that of this daemon is kept
    service: Service | None = field(default=None, init=False)
    end: str = field(default="it has been unmounted", init=False)  # why the mount has ended
    _answered: trio.Event = field(default_factory=trio.Event, init=False)  # the launcher knows that the mount works
    _manager: environment.ServiceManager = field(default_factory=environment.ServiceManager, init=False)
    _copies: trio.CancelScope = field(default_factory=trio.CancelScope, init=False)
    _copies_ended: trio.Event = field(default_factory=trio.Event, init=False)
    _ending: bool = field(default=False, init=False)  # this process unmounts
    _instructed: bool = field(init=False)  # whether the keeper is to start another daemon
    _contexts_stay_until: float = field(default=0.0, init=False)  # in trio's time
    _flags: frozenset[str] = field(init=False)  # of the mount, as the engine was last told
    _connection: RequestLoop = field(init=False)
    _requests: trio.CancelScope = field(default_factory=trio.CancelScope, init=False)  # of the loop that answers them

    def __post_init__(self) -> None:
        self._flags = self.entry.flags
        self._instructed = self.first_obstacle is None

    async def run(self, connection: RequestLoop) -> None:
        """Answers requests until the mount ends. StartFailure if it does not answer at first."""
        self._connection = connection
        if self.died is not None:
            self._contexts_stay_until = trio.current_time() + _CONTEXT_PAUSE
        async with trio.open_nursery() as nursery:
            essential = [self._watch_signals, self._watch_restart, self._watch_end, self._serve_clients]
            essential.append(self._answer_launcher if self.died is None else self._resume)
            if self.owner >= 0:
                essential.append(self._watch_owner)
            for work in essential:
                nursery.start_soon(self._or_leave, work)
            # The files do not depend on these.
            nursery.start_soon(keep_up, "following remounts", self._watch_flags, _FLAGS_PAUSE)
            nursery.start_soon(keep_up, "publishing statistics", self._publish_statistics, _PUBLISH_SECONDS)
            nursery.start_soon(
                keep_up, "returning heap memory", partial(threads.run, syscalls.trim_heap), _TRIM_SECONDS
            )
            if self.died is not None:
                free = partial(threads.run, self.mount.release_forgotten)  # visits all inodes
                nursery.start_soon(keep_up, "freeing forgotten files", free, _FORGOTTEN_PAUSE)
            if self.keeper is not None:
                nursery.start_soon(keep_up, "providing for the next daemon", self._provide_for_next, _PROVIDE_SECONDS)
            if seconds := self._manager.watchdog_seconds:
                feed = partial(self._manager.notify, "WATCHDOG=1")  # the control plane runs
                nursery.start_soon(keep_up, "feeding the watchdog", feed, seconds / 2)
            with self._requests:
                await self._or_leave(connection.serve)
            self._copies.cancel()
            nursery.cancel_scope.cancel()

    def obstacle(self) -> str | None:
        """Return the reason why the mount does not survive this daemon; None if it does."""
        if (obstacle := self._obstacle_to_instructions()) is not None:
            return obstacle
        assert self.keeper is not None
        return self.keeper.obstacle() or (None if self._instructed else "its keeper does not know yet what to start")

    def _obstacle_to_instructions(self) -> str | None:
        if self.first_obstacle is not None:
            return self.first_obstacle
        if self._ending:
            return "it is being unmounted"
        return "its keeper could not be started" if self.keeper is None else self.mount.obstacle()

    async def _or_leave(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do work that the mount needs. If it fails, another daemon takes over, where that is possible."""
        try:
            await work()
        except Exception:
            self.leave_if_it_survives()
            raise

    def leave_if_it_survives(self) -> None:
        """After a failure, while it is handled: end this process at once, if another daemon can take over.

        The clients' tasks must not be cancelled before, which would end their leases.
        """
        # A mount that is taken over is kept even before the first answer.
        if (self._answered.is_set() or self.died is not None) and self.keeper is not None and self.obstacle() is None:
            log.critical("the daemon has failed: another one takes over", exc_info=True)
            if (failure := sys.exception()) is not None:
                self.keeper.fails(f"it has failed: {takeover.reason_of(failure)}")
            takeover.leave_to_the_keeper(1, self.log)

    async def _provide_for_next(self) -> None:
        """Have the keeper start another daemon only while the mount survives this one. Hand over if a context fails."""
        assert self.keeper is not None
        if not self._answered.is_set():
            return
        await self._instruct_keeper()
        survives = self._instructed
        if survives and trio.current_time() > self._contexts_stay_until and (failed := self._failed_devices()):
            self._contexts_stay_until = trio.current_time() + _CONTEXT_PAUSE
            await self._replace_contexts(failed)

    async def _instruct_keeper(self) -> None:
        assert self.keeper is not None
        survives = self._obstacle_to_instructions() is None
        if survives != self._instructed:
            await threads.run(partial(takeover.instruct, self.keeper, self.request, self.entry, survives))
            self._instructed = survives

    def _failed_devices(self) -> str:
        failed = []
        for device in self.mount.engine.devices:
            try:
                device.check()
            except engine.EngineError:
                failed.append(device.info.directory)
        return ", ".join(failed)

    async def _replace_contexts(self, failed: str) -> None:
        """Have another daemon take over if it can open what this one's contexts have failed for.

        Such a context stays unusable in its process, as after an Xid. Memory that the keeper holds is not lost with it.
        """
        command = devices.probe_command(self.mount.engine.driver, self.request.config)
        probe = await trio.run_process(command, cwd="/", check=False, capture_stdout=True, capture_stderr=True)
        if probe.returncode:
            reason = probe.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            log.error("%s stays out of service, since other processes cannot open it: %s", failed, reason)
            return
        if self.obstacle() is None:
            log.critical("out of service in this process: %s: another daemon takes over", failed)
            self._hand_over()

    def _hand_over(self) -> NoReturn:
        assert self.keeper is not None
        self.keeper.note(MessageKind.HAND_OVER)
        takeover.leave_to_the_keeper(0, self.log)

    async def _watch_restart(self) -> None:
        """End this process at SIGUSR2, which `gpufs restart` sends, so that another one takes over."""
        with trio.open_signal_receiver(signal.SIGUSR2) as arriving:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR2,))
            async for _ in arriving:
                if self.died is None:
                    await self._answered.wait()  # a launcher waits for this very process
                if self.keeper is None or (obstacle := self.obstacle()) is not None:
                    log.warning("cannot restart: the mount does not survive its daemon: %s", obstacle)
                    continue
                log.info("another daemon takes over")
                self._hand_over()

    async def _serve_clients(self) -> None:
        """Runs the service that copies for other processes and lets them attach files, until copies are cancelled."""
        with self._copies:
            await keep_up("serving clients", self._run_service, _SERVICE_PAUSE)
        self._copies_ended.set()

    async def _run_service(self) -> None:
        config = self.request.config
        try:
            await service.serve(
                self.mount,
                Quotas(self.mount).set,
                path=self.socket_path,
                st_dev=self.entry.st_dev,
                allow_other=bool(config["allow_other"]),
                trust_readers=bool(config["trust_readers"]),
                keeper=self.keeper if self.first_obstacle is None else None,
                kept=self.kept,
                failed=self.leave_if_it_survives,
                started=self._service_started,
            )
        finally:
            self.service = None

    def _service_started(self, running: Service) -> None:
        self.service = running

    async def _answer_launcher(self) -> None:
        try:
            await self._see_an_answer()
        except OSError as failure:
            if mountpoint.present(self.entry) is None:
                return  # somebody has unmounted at the same time: nothing has failed
            raise StartFailure.of(failure, f"{self.entry.mountpoint}: mounted, but does not answer: ") from None
        await self._set_read_ahead()  # after INIT, which sets it too
        if not self.request.foreground:
            # Before the answer: afterwards the launcher may rely on that none of its files is still open here.
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            for number in (0, 1, 2):
                os.dup2(self.log.fd if number == 2 and self.log.fd >= 0 else null, number)
            os.close(null)
        try:
            self.answer.send(
                {
                    "ok": True,
                    "pid": os.getpid(),
                    "mountpoint": self.request.mountpoint,
                    "driver": self.mount.engine.driver,
                    "identity": self.entry.identity,
                    "devices": [
                        {
                            "name": device.info.directory,
                            "description": device.info.name,
                            "uuid": device.info.uuid or None,
                            "total_bytes": device.info.total_bytes,
                        }
                        for device in self.mount.engine.devices
                    ],
                    "notes": self.notes,
                }
            )
        except OSError:
            log.error("the launcher has gone: the mount ends")
            await mountpoint.unmount(self.entry)
            return
        self._has_answered()
        # A service whose mount survives has no main process: systemd would end it with that.
        main = f"MAINPID={os.getpid()}\n" if self.request.foreground or self.obstacle() is not None else ""
        await self._manager.notify(f"READY=1\n{main}STATUS=serves {printable(self.request.mountpoint)}")
        if self.request.foreground and self.notes:
            threads.in_background(partial(_print_notes, self.notes))

    async def _resume(self) -> None:
        assert self.died is not None
        with suppress(OSError):  # the mount is elsewhere, or gone: then nobody needs an answer
            await self._see_an_answer()
        self._has_answered()
        log.warning(
            "this daemon has taken over %s, %.2f s after the end of the one before",
            self.request.mountpoint,
            (time.monotonic_ns() - self.died) / 1e9,
        )
        if mountpoint.present(self.entry) is None:
            return  # another file system may be there now
        await self._set_read_ahead()

    async def _see_an_answer(self) -> None:
        """Wait for the kernel's first request, which is answered only if both planes work. OSError of stat(2)."""
        path = os.path.join(self.entry.mountpoint, "gpu0")
        await threads.run(partial(self.mount.await_answer, path), abandon_on_cancel=True)

    def _has_answered(self) -> None:
        self._answered.set()
        self.answers()
        if self.keeper is not None:
            self.keeper.note(MessageKind.SERVES)

    async def _set_read_ahead(self) -> None:
        read_ahead = self.request.config["read_ahead"]
        with suppress(threads.NoThreadError):  # the mount is useful without it
            await threads.run(partial(mountpoint.set_read_ahead, self.mount, self.entry, read_ahead))

    async def _publish_statistics(self) -> None:
        self.mount.engine.statistics_publish()

    async def _watch_signals(self) -> None:
        with trio.open_signal_receiver(*SIGNALS) as arriving:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            for number in self.early:
                signal.raise_signal(number)
            async for number in arriving:
                if number != signal.SIGHUP or (self.request.foreground and os.isatty(2)):  # else it has no effect
                    await self._end(signal.Signals(number).name)
                    return

    async def _watch_owner(self) -> None:
        await trio.lowlevel.wait_readable(self.owner)
        await self._end("the program that mounted has ended")

    async def _end(self, why: str) -> None:
        """Cancel running copies, unmount, and end the loop that answers requests."""
        log.info("%s: the mount ends", why)
        self.end = why
        self._ending = True
        await self._manager.notify(f"STOPPING=1\nSTATUS=unmounts {printable(self.request.mountpoint)}")
        self._copies.cancel()
        # Clients get their results and close their files while the mount answers.
        with trio.move_on_after(_COPIES_GRACE):
            await self._copies_ended.wait()
        await mountpoint.unmount(self.entry)
        self._stop_serving()

    async def _watch_flags(self) -> None:
        """Follow a remount, which may change which reads set access times. Return after a change of any mount."""
        with open("/proc/self/mountinfo", "rb") as mountinfo:  # noqa: ASYNC230 - never waits
            changes = select.poll()
            changes.register(mountinfo, select.POLLPRI)
            self._follow_flags()
            # Abandoned at the end: unmounting wakes the thread up.
            await threads.run(changes.poll, abandon_on_cancel=True)
            self._follow_flags()  # at once: the pause that comes next is for many changes one after the other

    def _follow_flags(self) -> None:
        now = mounting.entry_with(self.entry.identity)
        if now is not None and now.flags != self._flags:
            mountpoint.set_access_times(self.mount, now.flags)
            self._flags = now.flags

    async def _watch_end(self) -> None:
        await trio.lowlevel.wait_readable(self.mount.ended_fd)
        log.info("unmounted")
        self._copies.cancel()
        self._stop_serving()

    def _stop_serving(self) -> None:
        """End the loop that answers requests once those in progress are answered, or soon."""
        self._connection.stop()
        self._requests.deadline = min(self._requests.deadline, trio.current_time() + _REQUESTS_GRACE)


def _print_notes(notes: list[str]) -> None:
    """Print the notes: on a thread because standard error may block, by write(2) so that no lock delays the exit."""
    with suppress(OSError):
        os.write(2, "".join(f"gpufs: {note}\n" for note in notes).encode(errors="surrogateescape"))


async def keep_up(what: str, work: Callable[[], Awaitable[None]], pause: float) -> NoReturn:
    """Call ``work`` repeatedly, ``pause`` seconds after it returned, until cancelled.

    For what the files of a mount do not depend on: the mount goes on if a call fails. A failure is logged unless the
    one before it had the same text.
    """
    last = ""
    while True:
        try:
            await work()
            last = ""
        except Exception as failure:
            text = f"{type(failure).__name__}: {failure}"
            if text != last:
                last = text
                known = isinstance(failure, OSError)  # no thread, descriptor or permission
                log.error("%s has failed, the mount goes on: %s", what, text, exc_info=not known)
        await trio.sleep(max(pause, _RETRY_SECONDS) if last else pause)
