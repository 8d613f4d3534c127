"""The process that serves one mount: puts the parts together, and takes them apart again whatever happens.

Started by ``gpufs mount`` as ``python -m gpufs.daemon [--answer-fd N] MOUNTPOINT`` in a session of its own, with one
JSON object on standard input: mountpoint, source, config (a value for each knob), foreground. With ``--answer-fd`` it
answers one JSON line there once the mount answers requests, {"ok": true, ...}, or {"error": errno, "message": text}.

How it ends: when the mount is unmounted, by whomever, or by SIGTERM or SIGINT. A signal cancels running copies and
unmounts; a mount that is in use is detached, and what is open in it fails from then on. SIGHUP reopens the log file.
Should it die otherwise, its guard takes the mount away (gpufs/daemon/guard.py).
"""

import argparse
import errno
import fcntl
import functools
import logging
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pyfuse3
import trio

from gpufs import config, engine, mounting, service
from gpufs._version import __version__
from gpufs.daemon import heap, loop, supervision, threads
from gpufs.daemon.logs import Log
from gpufs.daemon.runtime import CountersFile, runtime_directory
from gpufs.daemon.startup import Answer, Request, StartFailure
from gpufs.fs.backing import BackingOperations
from gpufs.fs.control import MountStatistics, MountStatus, version_text
from gpufs.fs.host_inodes import Backing
from gpufs.fs.operations import Operations
from gpufs.fs.tree import Tree

log = logging.getLogger("gpufs.daemon")

# The drivers that `auto` tries, in this order.
_AUTOMATIC = ("cuda", "hip", "host")
# Seconds at the end: for copies that were cancelled, and until a mount in use is detached instead of unmounted.
_COPIES_GRACE = 6.0
_BUSY_GRACE = 0.5
# Seconds at the end for requests that are being answered. Those that wait for a server that hangs are left behind.
_REQUESTS_GRACE = 2.0
# Seconds for a log file to be reopened, until the mount goes on without that.
_REOPEN_GRACE = 5.0
# Seconds for another one who is mounting at the same place.
_LOCK_PATIENCE = 5.0
_BUSY_PAUSE = 0.05
# Seconds until the next attempt to wait for other mount flags, where no thread can be started.
_FLAGS_PAUSE = 1.0
# Seconds between two looks whether many files have gone.
_HEAP_INTERVAL = 2.0
# They end the mount, or reopen the log file. Held back until there is somebody to see to them: one that came between
# mounting and that would end the process with its default action, and leave a dead mount.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _open_engine(wanted: str, values: dict[str, Any], statistics_path: str) -> tuple[engine.Engine, str, list[str]]:
    """The engine, the name of its driver, and what the user should know about the choice."""
    reasons = []
    for driver in _AUTOMATIC if wanted == "auto" else (wanted,):
        try:
            memory = values["memory"] or 0
            if driver == "host":
                memory = config.host_memory(values["memory"], values["devices"])
            opened = engine.Engine(
                driver,
                devices=values["devices"] or (1 if driver == "host" else 0),
                memory_bytes=memory,
                slab_file_bytes=values["slab_file_bytes"],
                statistics_path=statistics_path,
                keep_freed=values["keep_freed"],
                lock_policy=values["lock_policy"],
                hip_memory=config.hip_memory(values),
            )
        except config.ConfigError as failure:
            raise StartFailure(errno.EINVAL, str(failure)) from None
        except engine.EngineError as failure:
            text = failure.strerror or str(failure)
            if wanted == "auto" and failure.errno == errno.ENODEV:
                reasons.append(text)
                continue
            if failure.errno == errno.ENODEV:
                text += "; gpufs doctor says what to do"
            raise StartFailure(failure.errno or errno.EIO, text) from None
        notes = (
            [f"no GPU was found ({'; '.join(reasons)}): host memory is used"] if driver == "host" and reasons else []
        )
        largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if largest != resource.RLIM_INFINITY:
            notes.append(f"no file that the mount holds or writes can have more than {largest} bytes (ulimit -f)")
        return opened, driver, notes
    raise StartFailure(errno.ENODEV, "; ".join(reasons))


def _set_limits(*, core_dumps: bool) -> None:
    """Many descriptors, for each buffer may have some; files of any size; a core file only where it is wanted.

    The size of files: the host driver's devices are made of some, and the kernel holds each client to its own limit.
    The devices' memory and what moves through pinned memory are in no core file: their mappings are marked so.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, PermissionError):  # without CAP_SYS_RESOURCE
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most if core_dumps else 0, most))


def _set_access_times(mount: engine.Mount, shown: frozenset[str], asked: frozenset[str] = frozenset()) -> None:
    """Has access times kept as a mount's flags say: the kernel leaves those of FUSE to the daemon."""
    if "noatime" in shown or "ro" in shown:
        policy = engine.NOATIME
    elif "relatime" in shown and "strictatime" not in asked:
        policy = engine.RELATIME
    else:
        policy = engine.STRICTATIME
    mount.set_access_times(policy, not_directories="nodiratime" in shown | asked)


def _is_there(entry: mounting.MountEntry) -> bool:
    """Whether this very mount can be seen; also true where mountinfo cannot be read, so that unmounting it is tried."""
    return _now(entry) is not None


def _now(entry: mounting.MountEntry) -> mounting.MountEntry | None:
    """This very mount where it is now, None if it is gone or hidden. The old entry where mountinfo cannot be read."""
    try:
        return mounting.entry_with(entry.identity)
    except OSError:
        return entry


@contextmanager
def _nobody_else_mounts(mountpoint: str) -> Iterator[None]:
    """Of two that are started for one place at once, the second finds the first one's mount. StartFailure for it."""
    with ExitStack() as held:
        with suppress(OSError):  # that cannot be opened, or locked
            directory = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, directory)
            deadline = time.monotonic() + _LOCK_PATIENCE
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # a lock that stays is somebody's for his own reasons
                    time.sleep(_BUSY_PAUSE)
        if mounting.entry_of(mountpoint) is not None:
            raise StartFailure(errno.EBUSY, f"{mountpoint}: gpufs is mounted there already")
        yield


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


@contextmanager
def _mounted(request: Request, has_ended: Callable[[], bool]) -> Iterator[tuple[int, mounting.MountEntry]]:
    """The descriptor of a fresh mount and its entry; it is unmounted at the end, however that comes.

    ``has_ended``: whether the kernel has ended the connection. The mount is dead or gone then, and the kernel may have
    given its numbers to another one, which answers.
    """
    try:
        with _nobody_else_mounts(request.mountpoint):
            fd, entry = mounting.mount(
                request.mountpoint,
                source=request.source,
                allow_other=bool(request.config["allow_other"]),
                flags=request.flags,
            )
    except OSError as failure:
        raise StartFailure(failure.errno or errno.EIO, failure.strerror or str(failure)) from None
    try:
        yield fd, entry
    finally:
        if (now := _now(entry)) is not None:
            try:
                if has_ended():
                    mounting.unmount_dead(now)
                else:
                    mounting.unmount(now.mountpoint, lazy=True)
            except OSError as failure:
                if _is_there(entry):  # else another process has unmounted it
                    log.warning("%s", failure.strerror or failure)


def _refuse_itself(path: str, mountpoint: str) -> None:
    """StartFailure where a directory to show below backing/ will be the mount, which cannot be asked by itself."""
    if os.path.commonpath((os.path.realpath(path), mountpoint)) == mountpoint:
        raise StartFailure(
            errno.EDEADLK, f"backing: {path}: is the mountpoint or below it: the mount cannot show itself"
        )


class Daemon:
    """One mount, from its engine to its end."""

    def __init__(self, request: Request, answer: Answer, logs: Log) -> None:
        self._request = request
        self._answer = answer
        self._log = logs
        self._service: service.Service | None = None
        self._copies_ended = trio.Event()
        self._serving = trio.CancelScope()  # around the loop that answers requests
        self._manager = supervision.ServiceManager()
        self._ended = False  # whether the kernel has ended the connection
        self._early: list[int] = []  # signals that have come before anybody waited for them

    def run(self) -> None:
        """Serves the mount until it ends. StartFailure where it does not come up."""
        values = self._request.config
        for _, path, _ in values["backing"] or ():
            _refuse_itself(path, self._request.mountpoint)
        runtime = runtime_directory(allow_other=bool(values["allow_other"]))
        with ExitStack() as parts:
            counters = CountersFile(runtime, self._request.mountpoint)
            service.sweep(runtime)
            parts.callback(counters.remove)
            opened, driver, notes = _open_engine(values["driver"], values, counters.path)
            parts.callback(opened.close)
            try:
                engine.io_configure(opened, **config.io_options(values))
                relay_fd, control_fd = engine.relay_pair()
            except engine.EngineError as failure:
                raise StartFailure(failure.errno or errno.EIO, failure.strerror or str(failure)) from None
            control = parts.enter_context(ExitStack())
            control.callback(os.close, control_fd)
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            for number in _SIGNALS:
                # Threads that a vendor's library has started may take them all the same: they are seen to later. And
                # when the mount is on its way out one more must not end the process before all is taken apart.
                signal.signal(number, lambda early, _: self._early.append(early))
            guard = None
            if values["auto_unmount"]:
                guard = parts.enter_context(supervision.Guard(self._request.mountpoint, values["log_file"]))
            try:
                fuse_fd, entry = parts.enter_context(_mounted(self._request, lambda: self._ended))
            except BaseException:
                os.close(relay_fd)
                raise
            if guard is not None:
                guard.watch(entry.identity)
            counters.belongs_to(entry.device)
            try:
                mount = engine.Mount(
                    opened,
                    fuse_fd,
                    relay_fd,
                    reader_threads=values["reader_threads"],
                    worker_threads=values["worker_threads"],
                    reader_spin=values["reader_spin"],
                    max_write=values["max_write"],
                    mask_flags=values["mask_flags"],
                    attribute_timeout=values["attribute_timeout"],
                    transport=values["transport"],
                    metadata_bytes=config.metadata_memory(values["metadata"]),
                )
            except engine.EngineError as failure:
                raise StartFailure(failure.errno or errno.EIO, failure.strerror or str(failure)) from None
            parts.callback(mount.close)
            # A plain user's program for mounting has no words for some.
            _set_access_times(mount, entry.flags, frozenset(self._request.flags) if os.geteuid() != 0 else frozenset())
            socket_path = os.path.join(runtime, f"{os.getpid()}-{entry.device.replace(':', '-')}.socket")
            operations = self._build(opened, mount, driver, socket_path, entry)
            pyfuse3.init(operations, f"/dev/fd/{control_fd}", {"fsname=gpufs"})
            control.pop_all()  # from here on libfuse's session closes the descriptor
            parts.callback(pyfuse3.close, unmount=False)
            parts.callback(mount.close)  # first of the two: its other end does not vanish beneath the data plane
            mount.start()
            log.info("gpufs %s serves %s with driver %s", __version__, self._request.mountpoint, driver)
            try:
                trio.run(self._serve, mount, operations, entry, socket_path, driver, len(opened.devices), notes)
            except BaseExceptionGroup as failures:
                started = failures.subgroup(StartFailure)
                if started is None:
                    raise
                raise started.exceptions[0] from None
            finally:
                self._ended = _is_readable(mount.ended_fd)
                for number in _SIGNALS:
                    signal.signal(number, signal.SIG_IGN)  # also while the interpreter ends
        log.info("the mount at %s has ended", self._request.mountpoint)

    def _build(
        self, opened: engine.Engine, mount: engine.Mount, driver: str, socket_path: str, entry: mounting.MountEntry
    ) -> Operations:
        values = self._request.config
        status = MountStatus(
            mountpoint=self._request.mountpoint,
            driver=driver,
            devices=opened.devices,
            knobs=values,
            statistics=mount.statistics,
            files=lambda index: tree.files[index],
            transfers=lambda: self._service.statistics() if self._service is not None else {},
            io=opened.io_statistics,
        )
        counted = MountStatistics(opened, self._request.mountpoint, driver)
        contents: dict[str, Callable[[int], bytes]] = {  # for the user who opens the file
            "version": lambda _: version_text(),
            "status": status.as_bytes,
            "stats": lambda _: counted.as_bytes(),
            "metrics": lambda _: counted.as_metrics(),
            "socket": lambda _: os.fsencode(socket_path) + b"\n",
        }
        tree = Tree(
            mount,
            len(opened.devices),
            uid=os.geteuid(),
            gid=os.getegid(),
            # Like a tmpfs: where others are let in they may use it, each for himself.
            device_mode=0o1777 if values["allow_other"] and os.geteuid() == 0 else 0o755,
            control_files=contents,
            streams={"trace": engine.Trace},
        )

        options = {
            "entry_timeout": values["entry_timeout"],
            "attribute_timeout": values["attribute_timeout"],
        }
        if not values["backing"]:
            return Operations(tree, mount, **options)
        try:
            return BackingOperations(
                tree,
                mount,
                backings=[Backing(*one) for one in values["backing"]],
                device=entry.st_dev,
                uid=os.geteuid(),
                gid=os.getegid(),
                **options,
            )
        except OSError as failure:
            path = os.fsdecode(failure.filename) if failure.filename else "backing"
            raise StartFailure(failure.errno or errno.EIO, f"backing: {path}: {failure.strerror}") from None

    async def _serve(
        self,
        mount: engine.Mount,
        operations: Operations,
        entry: mounting.MountEntry,
        socket_path: str,
        driver: str,
        devices: int,
        notes: list[str],
    ) -> None:
        async with trio.open_nursery() as nursery:
            copies = trio.CancelScope()
            nursery.start_soon(self._watch_signals, copies, entry)
            nursery.start_soon(self._watch_end, mount, copies)
            nursery.start_soon(loop.keep, self._watch_flags, mount, entry)
            nursery.start_soon(self._copies, copies, mount, entry, socket_path)
            nursery.start_soon(self._tell_launcher, mount, entry, driver, devices, notes)
            nursery.start_soon(loop.keep, self._publish, mount.engine)
            nursery.start_soon(loop.keep, self._give_back_memory, operations)
            nursery.start_soon(loop.keep, self._keep_watchdog)
            with self._serving:
                await loop.serve()
            copies.cancel()
            nursery.cancel_scope.cancel()

    async def _copies(
        self, scope: trio.CancelScope, mount: engine.Mount, entry: mounting.MountEntry, socket_path: str
    ) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                try:
                    self._service = await nursery.start(
                        functools.partial(
                            service.serve,
                            mount,
                            path=socket_path,
                            device=entry.st_dev,
                            allow_other=bool(self._request.config["allow_other"]),
                        )
                    )
                except OSError as failure:
                    # The mount is worth having without it.
                    log.error("no copy service: %s: %s", socket_path, failure.strerror)
        self._copies_ended.set()

    async def _tell_launcher(
        self, mount: engine.Mount, entry: mounting.MountEntry, driver: str, devices: int, notes: list[str]
    ) -> None:
        try:
            # The kernel's first question comes back only once both planes work.
            await threads.run(lambda: os.stat(os.path.join(entry.mountpoint, "gpu0")), abandon_on_cancel=True)
        except OSError as failure:
            if not _is_there(entry):
                return  # unmounted meanwhile, by a signal or by somebody else: nothing has failed
            raise StartFailure(
                failure.errno or errno.EIO, f"{entry.mountpoint}: mounted, but does not answer: {failure.strerror}"
            ) from None
        if not self._request.foreground:
            # Before the answer: whoever has it may count on that nothing of its own is held.
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            for number in (0, 1, 2):
                os.dup2(self._log.fd if number == 2 and self._log.fd >= 0 else null, number)
            os.close(null)
        try:
            self._answer.give(
                {
                    "ok": True,
                    "pid": os.getpid(),
                    "mountpoint": self._request.mountpoint,
                    "driver": driver,
                    "devices": devices,
                    "transport": mount.statistics()["transport"]["name"],
                    "notes": notes,
                }
            )
        except OSError:
            log.error("whoever asked for the mount has gone: it ends")
            await self._unmount(entry)
            return
        await self._manager.ready(f"serves {self._request.mountpoint}")
        if self._request.foreground and notes:
            threads.in_background(functools.partial(_print_remarks, notes))

    async def _publish(self, opened: engine.Engine) -> None:
        """Writes how things stand beside the counters, from time to time."""
        while True:
            opened.statistics_publish()
            await trio.sleep(self._request.config["stats_interval"])

    async def _give_back_memory(self, operations: Operations) -> None:
        """What the C library keeps of files that are gone goes back to the system."""
        spare = heap.Shrinking(operations.inodes_gone)
        while True:
            await trio.sleep(_HEAP_INTERVAL)
            if spare.due():
                with suppress(OSError):  # no thread can be started: it can wait until more files have gone
                    await threads.run(heap.release)

    async def _keep_watchdog(self) -> None:
        """Tells the service manager that the control plane runs, where it wants to know."""
        while self._manager.watchdog_seconds:
            await self._manager.alive()
            await trio.sleep(self._manager.watchdog_seconds / 2)

    async def _watch_signals(self, copies: trio.CancelScope, entry: mounting.MountEntry) -> None:
        with trio.open_signal_receiver(*_SIGNALS) as arriving:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            for number in self._early:
                signal.raise_signal(number)
            async for number in arriving:
                if number == signal.SIGHUP and not (self._request.foreground and os.isatty(2)):
                    await self._manager.reloading()
                    with trio.move_on_after(_REOPEN_GRACE):  # its disk may be frozen
                        await threads.run(self._log.reopen, abandon_on_cancel=True)
                    log.info("SIGHUP: the log goes on here")
                    await self._manager.ready(f"serves {self._request.mountpoint}")
                    continue
                log.info("%s: the mount ends", signal.Signals(number).name)
                await self._manager.stopping(f"unmounts {self._request.mountpoint}")
                copies.cancel()
                # Clients get their results and close their files while the mount still answers.
                with trio.move_on_after(_COPIES_GRACE):
                    await self._copies_ended.wait()
                await self._unmount(entry)
                self._take_no_more()
                return

    async def _watch_flags(self, mount: engine.Mount, entry: mounting.MountEntry) -> None:
        """A remount may change which reads set access times."""
        changes = mounting.Changes()
        seen = True
        while True:
            try:
                if seen:
                    # Left behind at the end: the unmounting itself lets it go.
                    await threads.run(changes.wait, abandon_on_cancel=True)
                seen = False
                now = mounting.entry_with(entry.identity)
            except OSError:  # no thread, no descriptor, no memory: what has changed is looked at later
                await trio.sleep(_FLAGS_PAUSE)
                continue
            seen = True
            if now is not None and now.flags != entry.flags:
                entry = now
                _set_access_times(mount, entry.flags)

    async def _watch_end(self, mount: engine.Mount, copies: trio.CancelScope) -> None:
        await trio.lowlevel.wait_readable(mount.ended_fd)
        log.info("unmounted")
        copies.cancel()
        self._take_no_more()

    def _take_no_more(self) -> None:
        """The loop that answers requests ends, with what it has begun, soon."""
        pyfuse3.terminate()
        self._serving.deadline = min(self._serving.deadline, trio.current_time() + _REQUESTS_GRACE)

    async def _unmount(self, entry: mounting.MountEntry) -> None:
        """In peace, or by detaching where it stays in use. What else stands there now stays."""
        deadline = trio.current_time() + _BUSY_GRACE
        while (now := _now(entry)) is not None:
            lazy = trio.current_time() >= deadline
            try:
                await threads.run(
                    functools.partial(mounting.unmount, now.mountpoint, lazy=lazy), abandon_on_cancel=True
                )
                return
            except OSError as failure:
                if failure.errno != errno.EBUSY or lazy:
                    if _is_there(entry):  # else another process has unmounted it
                        log.warning("%s", failure.strerror or failure)
                    return
            await trio.sleep(_BUSY_PAUSE)


def main(arguments: list[str] | None = None) -> int:
    """The entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gpufs.daemon")
    parser.add_argument("--answer-fd", type=int)
    parser.add_argument("mountpoint")
    chosen = parser.parse_args(arguments)
    if chosen.answer_fd is not None:
        os.set_inheritable(chosen.answer_fd, False)
    answer = Answer(chosen.answer_fd)
    logs = None
    try:
        request = Request.read(chosen.mountpoint)
        _set_limits(core_dumps=bool(request.config["core_dumps"]))
        logs = Log(request.config["log_file"], request.config["log_level"], foreground=request.foreground)
        os.umask(0)
        Daemon(request, answer, logs).run()
    except StartFailure as failure:
        _say(answer, failure.errno, failure.message)
        return 1
    except OSError as failure:
        log.exception("the mount failed")
        _say(answer, failure.errno or errno.EIO, str(failure))
        return 1
    except Exception as failure:
        log.exception("the mount failed")
        _say(answer, errno.EIO, f"internal failure: {failure}")
        return 1
    finally:
        if logs is not None:
            logs.close()
    return 0


def _print_remarks(notes: list[str]) -> None:
    """On a thread: standard error may be a pipe that nobody reads. By write(2), so that the exit waits for no lock."""
    with suppress(OSError):
        os.write(2, "".join(f"gpufs: {note}\n" for note in notes).encode(errors="surrogateescape"))


def _say(answer: Answer, code: int, message: str) -> None:
    """Tells the launcher, or in the foreground the user, why there is no mount."""
    try:
        if not answer.give({"error": code, "message": message}):
            print(f"gpufs: {message}", file=sys.stderr)
    except OSError:
        pass  # whoever asked has gone
