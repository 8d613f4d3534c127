"""The process that serves one mount: it builds the parts in order and takes them apart again whatever happens.

``gpufs mount`` starts it as ``python -m gpufs.daemon [--answer-fd N] [--journal-fd N] MOUNTPOINT`` in a session of its
own, with a :class:`~gpufs.daemon.startup.MountRequest` on standard input. With ``--answer-fd`` it writes one JSON line
there: {"ok": true, ...} once the mount answers requests, or {"error": errno, "message": text}. ``--journal-fd`` is a
descriptor of systemd's journal, for the log.

It ends when the mount is unmounted, by anybody, or on SIGTERM or SIGINT. A signal cancels running copies and unmounts;
a mount that is in use is detached, and calls on its open files fail from then on. SIGHUP reopens the log file. If the
daemon dies in another way, its guard unmounts (gpufs/daemon/guard.py).
"""

import argparse
import ctypes
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
from pathlib import Path

import pyfuse3
import trio

from gpufs import config, engine, mounting, service
from gpufs._version import __version__
from gpufs.daemon import supervision, threads
from gpufs.daemon.devices import open_engine
from gpufs.daemon.logs import Log
from gpufs.daemon.runtime import CountersFile, runtime_directory
from gpufs.daemon.startup import Answer, MountRequest, StartFailure
from gpufs.fs.backing import BackingHandler, Share
from gpufs.fs.control import MountActivity, MountStatistics, MountStatus, leases_text, readme_text, version_text
from gpufs.fs.dispatch import Operations
from gpufs.fs.handles import Handles
from gpufs.fs.names import NamesHandler
from gpufs.fs.quotas import Quotas
from gpufs.fs.replies import Replies
from gpufs.fs.tree import Tree

log = logging.getLogger("gpufs.daemon")

# Requests that pyfuse3 serves at a time. More than may wait for directories of the host (gpufs/fs/backing), so names in
# memory are answered even if all of those block. A waiting task takes some 20 KiB.
_TASKS = 10_000
# Descriptors that root's daemon raises its limit to, if the kernel allows that many.
_DESCRIPTORS = 1 << 20
# Seconds at the end: for cancelled copies, and until a mount in use is detached instead of unmounted.
_COPIES_GRACE = 6.0
_BUSY_GRACE = 0.5
# Seconds at the end for requests in progress. Those that wait for a server that hangs are abandoned.
_REQUESTS_GRACE = 2.0
# Seconds to reopen the log file.
_REOPEN_GRACE = 5.0
# Seconds to wait for another daemon that is mounting at the same place.
_LOCK_PATIENCE = 5.0
_BUSY_PAUSE = 0.05
# Seconds until the daemon watches the mount's flags again after it found no thread or descriptor.
_FLAGS_PAUSE = 1.0
# Free heap memory is returned every so many seconds if fewer than half of this many inodes or more are left.
_TRIM_SECONDS = 5.0
_TRIM_INODES = 1000
# These signals end the mount or reopen the log file. They are blocked until their handler runs: a default action right
# after mounting would end the process and leave a dead mount.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _set_limits(*, core_dumps: bool) -> None:
    """Raises the limits on descriptors and file sizes, and forbids core files unless they are wanted.

    The host driver's devices are files, and the kernel applies each client's own limit on file sizes. Core files never
    contain device memory or pinned memory: those mappings are excluded.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        largest = max(most, min(int(Path("/proc/sys/fs/nr_open").read_text()), _DESCRIPTORS))
        resource.setrlimit(resource.RLIMIT_NOFILE, (largest, largest))
    except (OSError, ValueError):  # without CAP_SYS_RESOURCE
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, PermissionError):  # without CAP_SYS_RESOURCE
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most if core_dumps else 0, most))


def _set_access_times(mount: engine.Mount, shown: frozenset[str], asked: frozenset[str] = frozenset()) -> None:
    """Follows the mount's flags for access times, which the kernel leaves to the daemon for FUSE."""
    if "noatime" in shown or "ro" in shown:
        policy = engine.NOATIME
    elif "relatime" in shown and "strictatime" not in asked:
        policy = engine.RELATIME
    else:
        policy = engine.STRICTATIME
    mount.set_access_times(policy, not_directories="nodiratime" in shown | asked)


def _set_read_ahead(device: str, size: int) -> None:
    """Sets how many bytes the kernel reads ahead on the mount, which it allows root only.

    The kernel takes 128 KiB for every FUSE mount, so a scan through a mapping waits for many small requests.
    """
    with suppress(OSError):  # a plain user, or /sys cannot be written
        Path(f"/sys/class/bdi/{device}/read_ahead_kb").write_text(str(size >> 10))


def _now(entry: mounting.MountEntry) -> mounting.MountEntry | None:
    """The mount's present entry, None if it is gone or hidden. The old entry if mountinfo cannot be read."""
    try:
        return mounting.entry_with(entry.identity)
    except OSError:
        return entry


@contextmanager
def _nobody_else_mounts(mountpoint: str) -> Iterator[None]:
    """StartFailure if another daemon mounts here first, also if both were started at the same time."""
    with ExitStack() as held:
        with suppress(OSError):  # the directory cannot be opened or locked
            directory = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, directory)
            deadline = time.monotonic() + _LOCK_PATIENCE
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # a lock that stays has nothing to do with gpufs
                    time.sleep(_BUSY_PAUSE)
        if mounting.entry_of(mountpoint) is not None:
            raise StartFailure(errno.EBUSY, f"{mountpoint}: gpufs is mounted there already")
        yield


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


@contextmanager
def _mounted(request: MountRequest, has_ended: Callable[[], bool]) -> Iterator[tuple[int, mounting.MountEntry]]:
    """Mounts; yields the descriptor of the connection and the mount's entry. Always unmounts at the end.

    ``has_ended``: whether the kernel has ended the connection. The mount is dead or gone then, and the kernel may have
    reused its numbers for another mount.
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
        raise StartFailure.of(failure) from None
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
                if _now(entry) is not None:  # else another process has unmounted it
                    log.warning("%s", failure.strerror or failure)


def _refuse_itself(path: str, mountpoint: str) -> None:
    """StartFailure if a directory to show below backing/ will be inside the mount."""
    if os.path.commonpath((os.path.realpath(path), mountpoint)) == mountpoint:
        raise StartFailure(errno.EDEADLK, f"backing: {path} is the mountpoint or below it; a mount cannot show itself")


def _raise_plainly(failures: BaseExceptionGroup[BaseException]) -> None:
    """Raises what the user gets one line about, if that is among the failures: no start, or no memory."""
    if failures.split(StartFailure)[0] is not None:
        found: BaseException = failures
        while isinstance(found, BaseExceptionGroup):
            found = next(iter((found.subgroup(StartFailure) or found).exceptions))
        raise found from None
    if failures.subgroup(lambda one: isinstance(one, MemoryError) or getattr(one, "errno", 0) == errno.ENOMEM):
        raise MemoryError from None


class Daemon:
    """One mount, from its engine to its end."""

    def __init__(self, request: MountRequest, answer: Answer, logs: Log) -> None:
        self._request = request
        self._answer = answer
        self._log = logs
        self._service: service.Service | None = None
        self._copies_ended = trio.Event()
        self._serving = trio.CancelScope()  # around the loop that answers requests
        self._manager = supervision.ServiceManager()
        self._ended = False  # whether the kernel has ended the connection
        self._early: list[int] = []  # signals that came before the loop waited for them
        self._owner = -1  # descriptor of the process with which the mount ends

    def run(self) -> None:
        """Serves the mount until it ends. StartFailure if it cannot be started."""
        values = self._request.config
        for _, path, _ in values["backing"] or ():
            _refuse_itself(path, self._request.mountpoint)
        runtime = runtime_directory(allow_other=bool(values["allow_other"]))
        with ExitStack() as parts:
            if self._request.owner is not None:
                try:
                    self._owner = os.pidfd_open(self._request.owner)
                except ProcessLookupError:
                    raise StartFailure(errno.ESRCH, "the program that mounts has ended") from None
                parts.callback(os.close, self._owner)
            counters = CountersFile(runtime, self._request.mountpoint)
            service.sweep(runtime)
            parts.callback(counters.remove)
            opened, notes = open_engine(values, counters.path)
            parts.callback(opened.close)
            try:
                engine.io_configure(opened, **config.io_options(values))
                relay_fd, control_fd = engine.relay_pair()
            except engine.EngineError as failure:
                raise StartFailure.of(failure) from None
            control = parts.enter_context(ExitStack())
            control.callback(os.close, control_fd)
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            for number in _SIGNALS:
                # A vendor library's threads may receive them all the same: note them for later. And while the mount
                # ends, another signal must not end the process before everything is taken apart.
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
                    metadata_bytes=config.metadata_memory(values["metadata"]),
                    rings=values["transport"] == "uring",
                    user_bytes=values["user_memory"],
                )
            except engine.EngineError as failure:
                raise StartFailure.of(failure) from None
            parts.callback(mount.close)
            # fusermount3, which mounts for plain users, does not take all flags.
            _set_access_times(mount, entry.flags, frozenset(self._request.flags) if os.geteuid() != 0 else frozenset())
            socket_path = os.path.join(runtime, f"{os.getpid()}-{entry.device.replace(':', '-')}.socket")
            operations, tree = self._build(mount, socket_path, entry)
            pyfuse3.init(operations, f"/dev/fd/{control_fd}", {"fsname=gpufs"})
            control.pop_all()  # from here on libfuse's session closes the descriptor
            parts.callback(pyfuse3.close, unmount=False)
            parts.callback(mount.close)  # before pyfuse3.close(), which closes the other end of the data plane's socket
            mount.start()
            log.info("gpufs %s serves %s with driver %s", __version__, self._request.mountpoint, opened.driver)
            try:
                trio.run(self._serve, mount, tree, entry, socket_path, notes)
            except BaseExceptionGroup as failures:
                _raise_plainly(failures)
                raise
            finally:
                self._ended = _is_readable(mount.ended_fd)
                for number in _SIGNALS:
                    signal.signal(number, signal.SIG_IGN)  # until the interpreter has ended
        log.info("the mount at %s has ended", self._request.mountpoint)

    def _build(self, mount: engine.Mount, socket_path: str, entry: mounting.MountEntry) -> tuple[Operations, Tree]:
        """The control plane's answers to requests, and the tree of names that they are about."""
        values = self._request.config
        opened = mount.engine
        status = MountStatus(
            mountpoint=self._request.mountpoint,
            driver=opened.driver,
            devices=opened.devices,
            knobs=values,
            statistics=mount.statistics,
            files=lambda index: tree.files[index],
            transfers=lambda: self._service.statistics() if self._service is not None else {},
            leases=lambda uid: self._service.leases(uid) if self._service is not None else [],
            io=opened.io_statistics,
            quotas=lambda uid: Quotas(tree, mount).as_list(uid),
        )
        activity = MountActivity(
            status,
            mount,
            paths=lambda inos: tree.paths(inos),
            copies=lambda uid: self._service.copies(uid) if self._service is not None else [],
        )
        counted = MountStatistics(opened, self._request.mountpoint)
        contents: dict[str, Callable[[int], bytes]] = {  # by the user that opens the file
            "version": lambda _: version_text(),
            "status": status.as_bytes,
            "stats": lambda _: counted.as_bytes(),
            "metrics": lambda _: counted.as_metrics(),
            "activity": activity.as_bytes,
            "socket": lambda _: os.fsencode(socket_path) + b"\n",
            "leases": lambda uid: leases_text(self._service.leases(uid) if self._service is not None else []),
        }
        tree = Tree(
            mount,
            [device.info.uuid for device in opened.devices],
            uid=os.geteuid(),
            gid=os.getegid(),
            # As on tmpfs: every user with access to the mount may create files.
            device_mode=0o1777 if values["allow_other"] and os.geteuid() == 0 else 0o755,
            readme=readme_text(
                self._request.mountpoint, opened.devices, [share[0] for share in values["backing"] or ()]
            ),
            control_files=contents,
            streams={"trace": engine.Trace},
        )
        handles = Handles()
        replies = Replies(values["entry_timeout"], values["attribute_timeout"])
        names = NamesHandler(tree, mount, handles, replies)
        if not values["backing"]:
            return Operations(mount, handles, names), tree
        shares = [Share(*one) for one in values["backing"]]
        ids = {"uid": os.geteuid(), "gid": os.getegid()}
        try:
            backing = BackingHandler(tree, mount, handles, replies, shares, device=entry.st_dev, **ids)
        except OSError as failure:
            path = os.fsdecode(failure.filename) if failure.filename else "backing"
            raise StartFailure.of(failure, f"backing: {path}: ") from None
        return Operations(mount, handles, names, backing), tree

    async def _serve(
        self,
        mount: engine.Mount,
        tree: Tree,
        entry: mounting.MountEntry,
        socket_path: str,
        notes: list[str],
    ) -> None:
        async with trio.open_nursery() as nursery:
            copies = trio.CancelScope()
            nursery.start_soon(self._watch_signals, copies, entry)
            nursery.start_soon(self._watch_end, mount, copies)
            if self._owner >= 0:
                nursery.start_soon(self._watch_owner, self._owner, copies, entry)
            nursery.start_soon(self._watch_flags, mount, entry)
            nursery.start_soon(self._copies, copies, mount, tree, entry, socket_path)
            nursery.start_soon(self._answer_launcher, mount, entry, notes)
            nursery.start_soon(self._publish_statistics, mount.engine)
            nursery.start_soon(self._trim_heap, tree)
            nursery.start_soon(self._feed_watchdog)
            with self._serving:
                await pyfuse3.main(max_tasks=_TASKS)
            copies.cancel()
            nursery.cancel_scope.cancel()

    async def _copies(
        self,
        scope: trio.CancelScope,
        mount: engine.Mount,
        tree: Tree,
        entry: mounting.MountEntry,
        socket_path: str,
    ) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                try:
                    self._service = await nursery.start(
                        functools.partial(
                            service.serve,
                            service.ServedMount(
                                mount,
                                tree,
                                Quotas(tree, mount).set,
                                trust_readers=bool(self._request.config["trust_readers"]),
                            ),
                            path=socket_path,
                            device=entry.st_dev,
                            allow_other=bool(self._request.config["allow_other"]),
                        )
                    )
                except OSError as failure:
                    # The mount is useful without it.
                    log.error("no copy service: %s: %s", socket_path, failure.strerror)
        self._copies_ended.set()

    async def _answer_launcher(self, mount: engine.Mount, entry: mounting.MountEntry, notes: list[str]) -> None:
        try:
            # The kernel's first request is answered only if both planes work.
            await threads.run(lambda: os.stat(os.path.join(entry.mountpoint, "gpu0")), abandon_on_cancel=True)
        except OSError as failure:
            if _now(entry) is None:
                return  # it was unmounted at the same time: nothing has failed
            raise StartFailure.of(failure, f"{entry.mountpoint}: mounted, but does not answer: ") from None
        transport = mount.statistics()["transport"]
        if self._request.config["transport"] == "uring" and transport["name"] != "io_uring":
            raise StartFailure(errno.ENOTSUP, f"transport: {transport['reason']}")
        _set_read_ahead(entry.device, self._request.config["read_ahead"])  # after INIT, which sets it too
        if not self._request.foreground:
            # Before the answer: afterwards the launcher may rely on that none of its files is still open here.
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
                    "driver": mount.engine.driver,
                    "identity": entry.identity,
                    "devices": [
                        {
                            "name": f"gpu{device.index}",
                            "description": device.info.name,
                            "uuid": device.info.uuid or None,
                            "total_bytes": device.info.total_bytes,
                        }
                        for device in mount.engine.devices
                    ],
                    "transport": transport["name"],
                    "notes": notes,
                }
            )
        except OSError:
            log.error("the launcher has gone: the mount ends")
            await self._unmount(entry)
            return
        await self._manager.ready(f"serves {self._request.mountpoint}")
        if self._request.foreground and notes:
            threads.in_background(functools.partial(_print_notes, notes))

    async def _publish_statistics(self, opened: engine.Engine) -> None:
        """Writes the gauges to the counters' file from time to time."""
        while True:
            opened.statistics_publish()
            await trio.sleep(self._request.config["stats_interval"])

    async def _trim_heap(self, tree: Tree) -> None:
        """Returns the heap's free memory to the system after many files have gone; malloc keeps most of it."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        most = 0
        while trim is not None:
            await trio.sleep(_TRIM_SECONDS)
            most = max(most, len(tree.nodes))
            if most >= _TRIM_INODES and len(tree.nodes) < most // 2:
                most = len(tree.nodes)
                trim(0)

    async def _feed_watchdog(self) -> None:
        """Reports to the service manager that the control plane runs, if it wants to know."""
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
                    with trio.move_on_after(_REOPEN_GRACE), suppress(OSError):  # its disk may be frozen
                        await threads.run(self._log.reopen, abandon_on_cancel=True)
                    log.info("SIGHUP: the log continues here")
                    await self._manager.ready(f"serves {self._request.mountpoint}")
                    continue
                await self._end(signal.Signals(number).name, copies, entry)
                return

    async def _watch_owner(self, owner: int, copies: trio.CancelScope, entry: mounting.MountEntry) -> None:
        await trio.lowlevel.wait_readable(owner)
        await self._end("the program that mounted has ended", copies, entry)

    async def _end(self, why: str, copies: trio.CancelScope, entry: mounting.MountEntry) -> None:
        """Cancels running copies, unmounts, and ends the loop that answers requests."""
        log.info("%s: the mount ends", why)
        await self._manager.stopping(f"unmounts {self._request.mountpoint}")
        copies.cancel()
        # Clients get their results and close their files while the mount answers.
        with trio.move_on_after(_COPIES_GRACE):
            await self._copies_ended.wait()
        await self._unmount(entry)
        self._stop_serving()

    async def _watch_flags(self, mount: engine.Mount, entry: mounting.MountEntry) -> None:
        """Follows remounts, which may change which reads set access times."""
        changes = mounting.Changes()
        seen = True
        while True:
            try:
                if seen:
                    # Abandoned at the end: unmounting wakes the thread up.
                    await threads.run(changes.wait, abandon_on_cancel=True)
                seen = False
                now = mounting.entry_with(entry.identity)
            except OSError:  # no thread or descriptor is free: look again later
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
        self._stop_serving()

    def _stop_serving(self) -> None:
        """Ends the loop that answers requests once those in progress are answered, or soon."""
        pyfuse3.terminate()
        self._serving.deadline = min(self._serving.deadline, trio.current_time() + _REQUESTS_GRACE)

    async def _unmount(self, entry: mounting.MountEntry) -> None:
        """Unmounts, or detaches the mount if it stays in use. Other mounts at the same place stay."""
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
                    if _now(entry) is not None:  # else another process has unmounted it
                        log.warning("%s", failure.strerror or failure)
                    return
            await trio.sleep(_BUSY_PAUSE)


def main(arguments: list[str] | None = None) -> int:
    """The entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gpufs.daemon")
    parser.add_argument("--answer-fd", type=int)
    parser.add_argument("--journal-fd", type=int, default=-1)
    parser.add_argument("mountpoint")
    chosen = parser.parse_args(arguments)
    if chosen.answer_fd is not None:
        os.set_inheritable(chosen.answer_fd, False)
    if chosen.journal_fd >= 0:
        os.set_inheritable(chosen.journal_fd, False)
    answer = Answer(chosen.answer_fd)
    logs = None
    try:
        request = MountRequest.read()
        _set_limits(core_dumps=bool(request.config["core_dumps"]))
        logs = Log(
            request.config["log_file"],
            request.config["log_level"],
            foreground=request.foreground,
            journal=chosen.journal_fd,
        )
        os.umask(0)
        Daemon(request, answer, logs).run()
    except StartFailure as failure:
        _report(answer, failure.errno, failure.message)
        return 1
    except MemoryError:
        log.error("out of memory: the mount ends")
        _report(answer, errno.ENOMEM, "out of memory")
        return 1
    except Exception as failure:
        log.exception("the mount failed")
        code = failure.errno if isinstance(failure, OSError) else None
        _report(answer, code or errno.EIO, str(failure) if code else f"internal failure: {failure}")
        return 1
    finally:
        if logs is not None:
            logs.close()
    return 0


def _print_notes(notes: list[str]) -> None:
    """Runs on a thread, because standard error may block; uses write(2), so that no lock delays the exit."""
    with suppress(OSError):
        os.write(2, "".join(f"gpufs: {note}\n" for note in notes).encode(errors="surrogateescape"))


def _report(answer: Answer, code: int, message: str) -> None:
    """Reports to the launcher, or to the user if it runs in the foreground, why there is no mount."""
    try:
        if not answer.give({"error": code, "message": message}):
            print(f"gpufs: {message}", file=sys.stderr)
    except OSError:
        pass  # the launcher has gone
