"""The models on the node's mount: fetched once for all volumes that show them, and removed with the last one.

They are in ``DEVICE/csi``, a directory that root has made and nobody else can search, so that no name in it is
another user's. Each operation opens and checks it again: a descriptor that stays would keep the mount from being
unmounted. A model is complete if it has the mark that is written into it as the last thing, and all files that the mark
lists. What a volume shows is never removed, whatever the plug-in knows of it: the kernel's list of mounts decides.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any, Final

import msgspec

from gpufs import mounting, syscalls
from gpufs.csi import binding
from gpufs.csi.errors import CallError
from gpufs.csi.volumes import DEVICE, Model, environment_of
from gpufs.mounting import MountEntry
from gpufs.syscalls import closed_after, start_thread
from gpufs.trees import remove_tree
from gpufs.units import bytes_text

log = logging.getLogger(__name__)

FOLDER: Final = "csi"  # of all models on a device
_FETCHES: Final = 4  # at a time; each is a process with about 100 MiB, and copies four files at once
_END_SECONDS: Final = 5.0
_PARTIAL: Final = ".partial-"
_GONE: Final = ".gone-"
_MARK: Final = f"{binding.CONTROL}/model.json"
_KEEP: Final = f"{binding.CONTROL}/keep"  # this file exists if the model stays without volumes
_SUFFIXED: Final = re.compile(r"-[0-9a-f]{8}$")
_MOST_MARK: Final = 16 << 20  # bytes
_NOT_THERE: Final = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Mark(msgspec.Struct, frozen=True):
    """What a complete model says of itself. ``files``: their sizes by their paths."""

    model: Model
    files: dict[str, int]


class _Fetch:
    """One fetch, which any number of publications wait for."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: CallError | None = None
        self.progress = "waiting for other fetches"
        self.cancelled = threading.Event()
        self.process: subprocess.Popen[str] | None = None

    def cancel(self) -> None:
        """End it. It may take a moment."""
        self.cancelled.set()
        process = self.process
        if process is not None:
            process.kill()


class Models:
    """The models of one mount. Thread-safe.

    Several plug-ins may use a mount. Each has models of its own, whose names end with what identifies it.

    Attributes
    ----------
    mountpoint : str
        Where the node's mount is. It need not be there all the time.
    """

    def __init__(self, mountpoint: str, identity: str, shown: Callable[[], set[Model]]) -> None:
        """``identity``: of the plug-in, the same after each start. ``shown``: what volumes need."""
        self.mountpoint = os.path.realpath(mountpoint)
        self._suffix = f"-{hashlib.sha256(os.fsencode(identity)).hexdigest()[:8]}"
        self._shown = shown
        self._lock = threading.Lock()  # guards the two below
        self._fetches: dict[Model, _Fetch] = {}
        # By device and name; held while the directories of a model change.
        self._locks: weakref.WeakValueDictionary[tuple[str, str], threading.Lock] = weakref.WeakValueDictionary()
        self._slots = threading.BoundedSemaphore(_FETCHES)

    # ---- the mount, and the directories of models ----

    def mount(self) -> MountEntry:
        """The node's mount. CallError UNAVAILABLE if there is none now."""
        entry = mounting.entry_of(self.mountpoint)
        if entry is None:
            raise CallError("UNAVAILABLE", f"no gpufs is mounted at {self.mountpoint} on this node")
        if entry.uid != 0:  # whose daemon could show anything
            raise CallError("FAILED_PRECONDITION", f"{self.mountpoint} is a mount of user {entry.uid}, not of root")
        return entry

    def sockets(self) -> str:
        """The directory of the daemon's socket. OSError if the mount does not answer."""
        with open(os.path.join(self.mountpoint, binding.SOCKET), encoding="utf-8") as file:
            return os.path.dirname(file.read().strip())

    def name_of(self, model: Model) -> str:
        """Return the name of a model's directory."""
        return f"{model.name}{self._suffix}"

    def path_of(self, model: Model) -> str:
        """Return its path below the mount."""
        return f"{model.device}/{FOLDER}/{self.name_of(model)}"

    @contextmanager
    def _root(self) -> Iterator[int]:
        """Open the mount's root. CallError without a mount."""
        entry = self.mount()
        with closed_after(os.open(self.mountpoint, _OPEN)) as root:
            if syscalls.identity(root).st_dev != entry.st_dev:
                raise CallError("UNAVAILABLE", f"the mount at {self.mountpoint} has just changed")
            yield root

    def _devices(self) -> list[str]:
        """List the devices of the mount; none without a mount."""
        if mounting.entry_of(self.mountpoint) is None:
            return []
        with self._root() as root:
            return sorted(filter(DEVICE.fullmatch, os.listdir(root)))

    @contextmanager
    def _folder(self, device: str, *, create: bool = False) -> Iterator[int]:
        """Open the directory of models on a device; ``create`` makes it first. CallError UNAVAILABLE without one."""
        with self._root() as root:
            if (above := _open(root, device)) is not None:
                with closed_after(above):
                    if create:
                        with suppress(FileExistsError):
                            os.mkdir(FOLDER, 0o700, dir_fd=above)
                    if (fd := _open_folder(above)) is not None:
                        with closed_after(fd):
                            yield fd
                        return
        path = os.path.join(self.mountpoint, device, FOLDER)
        text = "is not there, or not a directory that only root can change: the node's administrator must rename it"
        raise CallError("UNAVAILABLE", f"{path} {text}")

    def _each(self) -> Iterator[tuple[str, int, str]]:
        """Yield all that this plug-in has: the device, its open directory of models, and the name."""
        for device in self._devices():
            with suppress(CallError), self._folder(device) as folder:
                for name in sorted(os.listdir(folder)):
                    if name.endswith(self._suffix) or not _SUFFIXED.search(name):  # not another plug-in's
                        yield device, folder, name

    @contextmanager
    def opened(self, model: Model) -> Iterator[int]:
        """Open the directory of a complete model. CallError UNAVAILABLE if it is not there."""
        with self._folder(model.device) as folder:
            if (fd := _open(folder, self.name_of(model))) is not None:
                with closed_after(fd):
                    if _is_complete(fd):
                        yield fd
                        return
        raise CallError("UNAVAILABLE", f"{model.source} is not on {model.device}, or not all of it")

    def is_there(self, model: Model) -> bool:
        """Return whether all of a model is on the mount. OSError if that does not answer."""
        with suppress(CallError), self.opened(model):
            return True
        return False

    def resident(self) -> dict[str, set[str]]:
        """The sources of all models on the mount, and their devices. OSError or CallError if it does not answer."""
        sources: dict[str, set[str]] = {}
        for device, folder, name in self._each():
            if not name.startswith(".") and (mark := _mark(folder, name)) is not None:
                sources.setdefault(mark.model.source, set()).add(device)
        return sources

    # ---- removing ----

    def keep(self, model: Model) -> None:
        """Make a model that is there stay without volumes. OSError or CallError if that fails."""
        with self.opened(model) as fd, suppress(FileExistsError):
            os.close(os.open(_KEEP, _NEW, 0o644, dir_fd=fd))

    def release(self, model: Model) -> None:
        """Remove a model that no volume needs. Return when its memory is free. OSError if that fails."""
        with self._lock:
            fetch = self._fetches.get(model)
            if fetch is not None and model not in self._shown():
                fetch.cancel()
        for name in (f"{_PARTIAL}{self.name_of(model)}", self.name_of(model)):
            self.remove_unneeded(model.device, name)

    def leftovers(self) -> list[tuple[str, str]]:
        """List what no volume needs, by devices and names, for remove_unneeded(). OSError or CallError as resident().

        That are models of a plug-in that was killed, and those that were in use when they were to go.
        """
        needed = self._needed()
        return [(device, name) for device, _, name in self._each() if (device, _plain(name)) not in needed]

    def remove_unneeded(self, device: str, name: str) -> None:
        """Remove a directory, unless a volume needs it, anything shows it, or it is to stay. OSError if that fails."""
        # A volume is recorded before its model is looked for, which takes this lock. Without a mount there is nothing.
        path = f"{device}/{FOLDER}/{name}"
        with suppress(CallError), self._lock_of(device, _plain(name)), self._folder(device) as folder:
            if (device, _plain(name)) in self._needed() or self._is_bound(path) or _stays(folder, name):
                return
            with suppress(FileNotFoundError):
                self._discard(folder, name)
                log.info("removed %s, which no volume needs", path)

    def _discard(self, folder: int, name: str) -> None:
        """Remove what has a name; first it loses the name, so that no half of a model has it.

        OSError: FileNotFoundError if there is nothing, others if it stays under another name for leftovers().
        """
        gone = name if name.startswith(_GONE) else self._rename_away(folder, name)
        if stat.S_ISDIR(os.stat(gone, dir_fd=folder, follow_symlinks=False).st_mode):
            remove_tree(folder, gone)
        else:
            os.unlink(gone, dir_fd=folder)

    def _rename_away(self, folder: int, name: str) -> str:
        gone = f"{_GONE}{os.urandom(8).hex()}{self._suffix}"
        os.rename(name, gone, src_dir_fd=folder, dst_dir_fd=folder)
        return gone

    def _needed(self) -> set[tuple[str, str]]:
        return {(model.device, self.name_of(model)) for model in self._shown()}

    def _is_bound(self, path: str) -> bool:
        """Return whether anything shows a directory of the mount, or one in it."""
        mount = self.mount()
        entries = [entry for entry in mounting.listed() if entry.device == mount.device]
        return any(f"{binding.below(mount, entry)}/".startswith(f"{path}/") for entry in entries)

    def _lock_of(self, device: str, name: str) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault((device, name), threading.Lock())

    # ---- fetching ----

    def ensure(self, model: Model, secrets: Mapping[str, str], proceed: Callable[[str], None]) -> None:
        """Return when a model is on the mount. CallError if it cannot be fetched.

        ``proceed``: called several times a second with the progress; its exception ends the wait, not the fetch.
        """
        while True:
            with self._lock:
                fetch = self._fetches.get(model)
                if fetch is None:
                    fetch = _Fetch()
                    start_thread(self._run, model, dict(secrets), fetch)
                    self._fetches[model] = fetch
            while not fetch.ended.wait(0.1):
                proceed(fetch.progress)
            if fetch.error is None:
                return
            if not fetch.cancelled.is_set():
                raise fetch.error
            proceed(fetch.progress)  # and fetch it again: another volume was the last one

    def close(self) -> None:
        """End all fetches. Waits a moment for them."""
        with self._lock:
            fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.cancel()
        deadline = time.monotonic() + _END_SECONDS
        for fetch in fetches:
            fetch.ended.wait(max(0.0, deadline - time.monotonic()))

    def _run(self, model: Model, secrets: dict[str, str], fetch: _Fetch) -> None:
        try:
            with self._lock_of(model.device, self.name_of(model)):
                if fetch.cancelled.is_set():
                    raise CallError("ABORTED", "cancelled")
                self._put(model, secrets, fetch)
        except CallError as error:
            fetch.error = error
        except OSError as error:
            fetch.error = CallError.of(error, f"{model.source}: {error.strerror or error}")
        except Exception as error:  # a bug must not leave callers waiting
            log.exception("fetching %s failed", model.source)
            fetch.error = CallError("INTERNAL", f"{model.source}: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                del self._fetches[model]
            fetch.ended.set()

    def _put(self, model: Model, secrets: dict[str, str], fetch: _Fetch) -> None:
        self.mount()
        if model.device not in (devices := self._devices()):
            text = f"this node has no {model.device}: it has {', '.join(devices) or 'none'}"
            raise CallError("INVALID_ARGUMENT", text)
        if self.is_there(model):
            return
        name = self.name_of(model)
        partial = f"{_PARTIAL}{name}"
        with self._folder(model.device, create=True) as folder:
            with suppress(FileExistsError):
                os.mkdir(partial, 0o755, dir_fd=folder)
            with closed_after(os.open(partial, _OPEN, dir_fd=folder)) as target, self._slots:
                remove_tree(target, binding.CONTROL)  # of a try that has come that far
                if fetch.cancelled.is_set():
                    raise CallError("ABORTED", "cancelled")
                try:
                    _seal(target, Mark(model, self._fetch(model, secrets, target, fetch)))
                except CallError as error:
                    # What a store that does not answer has sent already is needed at the next try.
                    if error.code != "UNAVAILABLE":
                        self._discard(folder, partial)
                    raise
            with suppress(FileNotFoundError):  # it is not complete any more; what shows it gets the new one
                self._rename_away(folder, name)
            os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
        log.info("%s is on %s", model.source, model.device)

    def _fetch(self, model: Model, secrets: dict[str, str], target: int, fetch: _Fetch) -> dict[str, int]:
        """Run the process that fetches into an open directory. Return what is there. CallError if that fails."""
        began = time.monotonic()
        log.info("fetching %s to %s", model.source, model.device)
        order = {
            "source": model.source,
            "target": target,
            "include": model.include,
            "exclude": model.exclude,
            "secrets": environment_of(secrets),
        }
        # -P: a module in the working directory may be another user's.
        process = fetch.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gpufs.csi.fetch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(target,),
            text=True,
            cwd="/",
        )
        if fetch.cancelled.is_set():  # before there was a process
            process.kill()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):
                process.stdin.write(f"{json.dumps(order)}\n")
                process.stdin.flush()
            result = _read_result(process.stdout, fetch)
        finally:
            process.kill()
            with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                process.communicate(timeout=_END_SECONDS)  # it ends at once, unless the mount does not answer
        if fetch.cancelled.is_set():
            raise CallError("ABORTED", "cancelled")
        if result is None:
            text = f"{model.source}: the process that fetches it ended with {process.poll()}"
            raise CallError("UNAVAILABLE", text)
        if not result["ok"]:
            text = str(result["text"])[:1000]
            if result["errno"] == errno.EISDIR:
                text = f"{model.source} is a file: name its directory, and the file in include"
            raise CallError.of(OSError(result["errno"], ""), text)
        files: dict[str, int] = result["files"]
        if not files:
            raise CallError("NOT_FOUND", f"{model.source} has no file that include and exclude leave")
        seconds = time.monotonic() - began
        log.info("fetched %s: %s in %.1f s", model.source, bytes_text(result["bytes"]), seconds)
        return files


def _read_result(output: IO[str], fetch: _Fetch) -> dict[str, Any] | None:
    """Read what the process reports until its result."""
    for line in output:
        report: dict[str, Any] = json.loads(line)
        if "ok" in report:
            return report
        fetch.progress = f"{bytes_text(report['moved'])} of {bytes_text(report['total'])} are there"
    return None


def _plain(name: str) -> str:
    return name.removeprefix(_PARTIAL)


def _open(above: int, name: str) -> int | None:
    """Open a directory, None if there is none, or anything else."""
    try:
        return os.open(name, _OPEN, dir_fd=above)
    except (FileNotFoundError, NotADirectoryError):  # the second also for a link
        return None


def _open_folder(above: int) -> int | None:
    """Open the directory of models, which only root can search; None if there is none, or anything else."""
    if (fd := _open(above, FOLDER)) is None:
        return None
    status = os.fstat(fd)
    is_ours = (status.st_uid, status.st_dev) == (0, os.fstat(above).st_dev)
    if is_ours and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        if stat.S_IMODE(status.st_mode) != 0o700:  # an administrator made it, to set a limit
            os.fchmod(fd, 0o700)  # after which the kernel asks for the name again, though the mount may be dead
        return fd
    os.close(fd)
    return None


def _seal(target: int, mark: Mark) -> None:
    """Add to the files of a model what a volume needs, and then the mark."""
    os.mkdir(binding.CONTROL, 0o755, dir_fd=target)
    os.mkdir(binding.RUN, 0o755, dir_fd=target)
    os.close(os.open(binding.SOCKET, _NEW, 0o644, dir_fd=target))
    with open(os.open(_MARK, _NEW, 0o644, dir_fd=target), "wb") as file:
        file.write(msgspec.json.encode(mark))


def _mark(directory: int, name: str) -> Mark | None:
    """Read the mark of a model, None if it has none. OSError if the mount does not answer."""
    try:
        with open(syscalls.open_beneath(directory, f"{name}/{_MARK}".encode(), _READ), "rb") as file:
            return msgspec.json.decode(file.read(_MOST_MARK), type=Mark)
    except (OSError, ValueError) as error:  # msgspec's is one, and that of bytes that are not UTF-8
        if isinstance(error, OSError) and error.errno not in _NOT_THERE:
            raise
        return None


def _is_complete(model: int) -> bool:
    """Return whether an open directory has all that its mark lists. OSError if the mount does not answer."""
    mark = _mark(model, ".")
    if mark is None:
        return False
    try:
        found = {path: os.stat(path, dir_fd=model, follow_symlinks=False) for path in mark.files}
    except (FileNotFoundError, NotADirectoryError):
        return False
    return all(stat.S_ISREG(found[path].st_mode) and found[path].st_size == size for path, size in mark.files.items())


def _stays(folder: int, name: str) -> bool:
    """Return whether a model is complete and to stay without volumes."""
    if name.startswith(".") or _mark(folder, name) is None:
        return False
    try:
        os.stat(f"{name}/{_KEEP}", dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
