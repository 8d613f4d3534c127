"""The models on the node's mount: fetched once for all volumes that show them, and removed with the last one.

A model is in ``DEVICE/csi/NAME``, and in ``DEVICE/csi/.partial-NAME`` until all of it is there. So the mount itself
says what is complete, and a mount that has been replaced has nothing.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any, Final

from gpufs import mounting
from gpufs.csi import binding
from gpufs.csi.errors import CallError
from gpufs.csi.volumes import FOLDER, Model, environment_of
from gpufs.mounting import MountEntry
from gpufs.syscalls import start_thread
from gpufs.units import bytes_text

log = logging.getLogger(__name__)

_FETCHES: Final = 4  # at a time; each is a process with about 100 MiB, and copies four files at once
_END_SECONDS: Final = 10.0
_PARTIAL: Final = ".partial-"
_GONE: Final = ".gone-"


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

    Attributes
    ----------
    mountpoint : str
        Where the node's mount is. It need not be there all the time.
    """

    def __init__(self, mountpoint: str, shown: Callable[[], set[Model]]) -> None:
        """``shown``: the models that volumes need."""
        self.mountpoint = os.path.realpath(mountpoint)
        self._shown = shown
        self._lock = threading.Lock()  # guards the two below
        self._fetches: dict[Model, _Fetch] = {}
        self._locks: dict[Model, threading.Lock] = {}  # held while the directories of a model change
        self._slots = threading.BoundedSemaphore(_FETCHES)

    def mount(self) -> MountEntry:
        """The node's mount. CallError UNAVAILABLE if there is none now."""
        entry = mounting.entry_of(self.mountpoint)
        if entry is None:
            raise CallError("UNAVAILABLE", f"no gpufs is mounted at {self.mountpoint} on this node")
        return entry

    def sockets(self) -> str:
        """The directory of the daemon's socket. OSError if the mount does not answer."""
        with open(os.path.join(self.mountpoint, binding.SOCKET), encoding="utf-8") as file:
            return os.path.dirname(file.read().strip())

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

    def keep(self, model: Model) -> None:
        """Make a model that is there stay without volumes. OSError if that fails."""
        with open(os.path.join(self.mountpoint, model.path, binding.KEEP), "ab"):
            pass

    def release(self, model: Model) -> None:
        """Remove a model that no volume needs. Return when its memory is free. OSError if that fails."""
        with self._lock:
            fetch = self._fetches.get(model)
            if fetch is not None and model not in self._shown():
                fetch.cancel()
        with self._lock_of(model):
            if model not in self._shown() and mounting.entry_of(self.mountpoint) is not None:
                complete = os.path.join(self.mountpoint, model.path)
                folder, name = os.path.split(complete)
                _remove(os.path.join(folder, _PARTIAL + name))
                if not os.path.exists(os.path.join(complete, binding.KEEP)):
                    gone = os.path.join(folder, _GONE + name)
                    _remove(gone)
                    with suppress(FileNotFoundError):  # the directory loses its name before any of its files
                        os.rename(complete, gone)
                    _remove(gone)

    def sweep(self) -> None:
        """Remove what no volume needs, after a plug-in that was killed. OSError if that fails."""
        for path in self._directories():
            # Volumes are recorded before their directories are made.
            stay = {model.path for model in self._shown()}
            below = os.path.relpath(path, self.mountpoint).replace(_PARTIAL, "")
            if below not in stay and not os.path.exists(os.path.join(path, binding.KEEP)):
                log.info("removing %s, which no volume needs", path)
                _remove(path)

    def resident(self) -> dict[str, set[str]]:
        """The sources of all models on the mount, and their devices. OSError if the mount does not answer."""
        found: dict[str, set[str]] = {}
        for path in self._directories():
            device, _, name = os.path.relpath(path, self.mountpoint).split("/")
            if not name.startswith("."):
                with suppress(FileNotFoundError), open(os.path.join(path, binding.SOURCE), encoding="utf-8") as file:
                    found.setdefault(file.read(), set()).add(device)
        return found

    def _directories(self) -> list[str]:
        """List the directories of models, also incomplete ones. None without a mount."""
        if mounting.entry_of(self.mountpoint) is None:
            return []
        folders = [os.path.join(self.mountpoint, device, FOLDER) for device in sorted(os.listdir(self.mountpoint))]
        return [
            os.path.join(folder, name) for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)
        ]

    def is_there(self, model: Model) -> bool:
        """Return whether all of a model is on the mount."""
        return os.path.isdir(os.path.join(self.mountpoint, model.path))

    def close(self) -> None:
        """End all fetches."""
        with self._lock:
            fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.cancel()
        for fetch in fetches:
            fetch.ended.wait(_END_SECONDS)

    def _lock_of(self, model: Model) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(model, threading.Lock())

    def _run(self, model: Model, secrets: dict[str, str], fetch: _Fetch) -> None:
        try:
            with self._lock_of(model):
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
        """Fetch a model, unless it is there."""
        self.mount()
        device = os.path.join(self.mountpoint, model.device)
        if not os.path.isdir(device):
            devices = ", ".join(sorted(name for name in os.listdir(self.mountpoint) if name.startswith("gpu")))
            raise CallError("INVALID_ARGUMENT", f"this node has no {model.device}: it has {devices or 'none'}")
        complete = os.path.join(self.mountpoint, model.path)
        if os.path.isdir(complete):
            return
        folder, name = os.path.split(complete)
        partial = os.path.join(folder, _PARTIAL + name)
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)  # pods have binds of what is in it
        status = os.lstat(folder)  # everybody may create names beside it
        if (stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode), status.st_uid) != (stat.S_IFDIR, 0o700, 0):
            raise CallError("FAILED_PRECONDITION", f"{folder} is not a directory of root alone: remove it")
        with suppress(FileExistsError):
            os.mkdir(partial, 0o755)
        with self._slots:
            if fetch.cancelled.is_set():
                raise CallError("ABORTED", "cancelled")
            error = self._fetch(model, secrets, partial, fetch)
        if error is not None:
            # What a store that does not answer has sent already is needed at the next try.
            if error.code != "UNAVAILABLE":
                _remove(partial)
            raise error
        control = os.path.join(partial, binding.CONTROL)
        _remove(control)  # of a try that has come this far
        for path in (control, os.path.join(partial, binding.RUN)):
            os.mkdir(path, 0o755)
        for path, content in ((binding.SOCKET, ""), (binding.SOURCE, model.source)):
            with open(os.path.join(partial, path), "x", encoding="utf-8") as file:
                file.write(content)
        os.rename(partial, complete)
        log.info("%s is on %s", model.source, model.device)

    def _fetch(self, model: Model, secrets: dict[str, str], target: str, fetch: _Fetch) -> CallError | None:
        """Run the process that fetches. Return why it failed, None if it has not."""
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
            with suppress(BrokenPipeError):
                process.communicate()  # until it has ended: no one else writes to the directory
        if fetch.cancelled.is_set():
            return CallError("ABORTED", "cancelled")
        if result is None:
            return CallError("UNAVAILABLE", f"{model.source}: the process that fetches it ended with {process.poll()}")
        if result["ok"]:
            seconds = time.monotonic() - began
            log.info("fetched %s: %s in %.1f s", model.source, bytes_text(result["bytes"]), seconds)
            return None
        text = str(result["text"])[:1000]
        if result["errno"] == errno.EISDIR:
            text = f"{model.source} is a file: name its directory, and the file in include"
        return CallError.of(OSError(result["errno"], ""), text)


def _read_result(output: IO[str], fetch: _Fetch) -> dict[str, Any] | None:
    """Read what the process reports until its result."""
    for line in output:
        report: dict[str, Any] = json.loads(line)
        if "ok" in report:
            return report
        fetch.progress = f"{bytes_text(report['moved'])} of {bytes_text(report['total'])} are there"
    return None


def _remove(path: str) -> None:
    """Remove a directory with all that is in it, if it is there. Another thread may do the same."""
    while os.path.lexists(path):
        with suppress(FileNotFoundError):
            shutil.rmtree(path)
