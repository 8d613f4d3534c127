"""A copy service over a fake engine: a directory of /dev/shm stands for the mount, its files for buffers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import logging
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import trio

from gpufs import mounting, service
from gpufs.client._connection import Connection
from gpufs.protocol import LOAD
from gpufs.service._mount import TransferState
from support import processes
from support.processes import PATIENCE

MIB = 1 << 20
HOUR = 3600 * 50 * MIB  # bytes that take an hour with a delay of 0.02


def mount_entry(device: int, folder: str) -> mounting.MountEntry:
    """A mount with this st_dev, as the kernel would list it."""
    number = f"{os.major(device)}:{os.minor(device)}"
    return mounting.MountEntry(folder, "/", number, "gpufs", "rw", mounting.FILESYSTEM_TYPE, 1, frozenset())


class Item:
    """What the fake engine hands out: a duplicated descriptor that counts as open until it is closed."""

    def __init__(self, backend: FakeBackend, fd: int) -> None:
        self.fd = os.dup(fd)
        self.backend = backend
        backend.opened(self)

    def close(self) -> None:
        if (closing := self.backend.closing) is not None:
            with self.backend.lock:
                self.backend.held_up += 1
            closing.wait(PATIENCE)
        self.backend.closed(self)
        os.close(self.fd)


class FakeTransfer:
    """Copies on a thread, in pieces, as fast as the backend says."""

    def __init__(self, backend: FakeBackend, request: dict[str, Any]) -> None:
        self.backend = backend
        self.request = request
        self.event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._state = TransferState(ended=False)
        self._cancelled = threading.Event()
        backend.opened(self)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        request, backend = self.request, self.backend
        source, target = request["host"].fd, request["buffer"].fd
        source_offset, target_offset = request["host_offset"], request["offset"]
        if request["direction"] != LOAD:
            source, target = target, source
            source_offset, target_offset = target_offset, source_offset
        size = max(os.fstat(source).st_size - source_offset, 0)
        if request["size"] is not None:
            size = min(size, request["size"])
        done, error, message = 0, 0, ""
        if backend.sparse_tail and request["direction"] != LOAD:
            os.pwrite(target, b"x", target_offset + size)  # as threads that are ahead of the others
        while done < size and not error:
            if self._cancelled.wait(backend.delay):
                error = errno.ECANCELED
                break
            if backend.fail_at is not None and done >= backend.fail_at[0]:
                error, message = backend.fail_at[1], "planned"
                break
            piece = os.pread(source, min(backend.piece, size - done), source_offset + done)
            if not piece:
                break
            done += os.pwrite(target, piece, target_offset + done)
            self._state = TransferState(size, done, done, {"fallback": done}, ended=False)
        paths = {"fallback": done} if done else {}
        device_code = 77 if error == errno.EIO else 0
        self._state = TransferState(size, done, done, paths, ["file_system"], error, device_code, message)
        os.eventfd_write(self.event_fd, 1)

    def state(self) -> TransferState:
        return self._state

    def cancel(self) -> None:
        if self.event_fd < 0:
            raise OSError(errno.EBADF, "the transfer is closed")  # as the engine's
        if not self.backend.deaf:
            self._cancelled.set()

    def close(self) -> None:
        self._cancelled.set()
        self._thread.join()
        self.backend.closed(self)
        fd, self.event_fd = self.event_fd, -1
        os.close(fd)


class FakeBackend:
    """The engine. piece and delay set the speed, fail_at a failure after so many bytes.

    hang stops open_host(), and closing the closing of what it opened.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.piece = MIB
        self.delay = 0.0
        self.fail_at: tuple[int, int] | None = None
        self.sparse_tail = False
        self.deaf = False
        self.hang: threading.Event | None = None
        self.closing: threading.Event | None = None
        self.hanging = 0  # calls that have come to hang, all in all
        self.held_up = 0  # closings, the same
        self.refuse_start: OSError | MemoryError | None = None
        self.requests: list[dict[str, Any]] = []
        self.writes: list[int] = []
        self.lock = threading.Lock()
        self.open: set[Any] = set()

    def opened(self, item: Any) -> None:
        with self.lock:
            self.open.add(item)

    def closed(self, item: Any) -> None:
        with self.lock:
            self.open.remove(item)

    def has_moved(self) -> bool:
        """Whether a copy that is under way has copied something."""
        with self.lock:
            return any(isinstance(item, FakeTransfer) and item.state().done for item in self.open)

    def open_host(self, fd: int) -> Item:
        if (hang := self.hang) is not None:
            with self.lock:
                self.hanging += 1
            hang.wait(PATIENCE)
        return Item(self, fd)

    def open_buffer(self, ino: int) -> Item:
        for path in self.folder.rglob("*"):
            if path.is_file() and path.stat().st_ino == ino:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    return Item(self, fd)
                finally:
                    os.close(fd)
        raise OSError(errno.EINVAL, "the file on the mount holds no device memory")

    def start(self, direction: str, host: Item, buffer: Item, **options: Any) -> FakeTransfer:
        if self.refuse_start is not None:
            raise self.refuse_start
        request = {"direction": direction, "host": host, "buffer": buffer, **options}
        self.requests.append(request)
        return FakeTransfer(self, request)

    def await_space(self, buffer: Item, size: int) -> None:
        """There is no device that could be full."""

    def written(self, ino: int) -> None:
        self.writes.append(ino)


class Complaints(logging.Handler):
    """What the service logs as an error, with its traceback, until closed."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._texts: list[str] = []
        logging.getLogger("gpufs.service").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(self.format(record))

    def taken(self) -> list[str]:
        """Those since this was last asked."""
        self.acquire()  # emit() is called with it held
        try:
            texts, self._texts = self._texts, []
        finally:
            self.release()
        return texts

    def close(self) -> None:
        logging.getLogger("gpufs.service").removeHandler(self)
        super().close()


class FakeMount:
    """A running service. folder is "the mount", host a directory of the host."""

    def __init__(self, limits: service.Limits | None = None, *, allow_other: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gpufs-client-", dir="/dev/shm"))
        self.host = Path(tempfile.mkdtemp(prefix="gpufs-client-", dir="/tmp"))
        for folder in (self.folder, self.host):
            folder.chmod(0o777)
        self.socket = str(self.host / "socket")
        (self.folder / ".gpufs").mkdir()
        (self.folder / ".gpufs" / "socket").write_text(self.socket + "\n")
        self.device = os.stat(self.folder).st_dev
        self.backend = FakeBackend(self.folder)
        self.service: service.Service
        self.failure: BaseException | None = None
        self._limits = limits
        self._allow_other = allow_other
        self._complaints = Complaints()
        self._started = threading.Event()
        self._scope = trio.CancelScope()
        self._thread = threading.Thread(target=self._main)
        self._thread.start()
        self._started.wait(PATIENCE)
        if self.failure is not None:
            raise self.failure

    def _main(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:  # noqa: BLE001 - raised by who waits for it
            self.failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._scope:
            async with trio.open_nursery() as nursery:

                async def serve(task_status: trio.TaskStatus[service.Service]) -> None:
                    await service.serve(
                        cast(Any, self.backend),
                        path=self.socket,
                        device=self.device,
                        limits=self._limits,
                        allow_other=self._allow_other,
                        task_status=task_status,
                    )

                self.service = await nursery.start(serve)
                self._started.set()

    def stop(self) -> None:
        """Ends the service as the daemon does."""
        if self._thread.is_alive():
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._scope.cancel)
            self._thread.join(60)
            assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """AssertionError when the service has logged a failure of its own."""
        try:
            self.stop()
            assert not self._complaints.taken()
        finally:
            self._complaints.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.rmtree(self.host, ignore_errors=True)

    def complaints(self) -> list[str]:
        """What the service has logged as failures of its own since this was last asked."""
        return self._complaints.taken()

    def raw(self) -> socket.socket:
        """A connected socket on which nothing has been said."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(PATIENCE)
            sock.connect(self.socket)
        except BaseException:
            sock.close()
            raise
        return sock

    def connect(self) -> Connection:
        return Connection(self.raw())

    def file(self, name: str, content: bytes, folder: Path | None = None) -> Path:
        path = (folder or self.host) / name
        path.write_bytes(content)
        path.chmod(0o666)
        return path

    def hollow(self, name: str, size: int, folder: Path | None = None) -> Path:
        """A file of zeros that takes no space."""
        path = self.file(name, b"", folder)
        os.truncate(path, size)
        return path

    @contextlib.contextmanager
    def once(self, condition: Callable[[], bool], action: Callable[[], object]) -> Iterator[None]:
        """Does the action on another thread as soon as the condition holds, while the block runs."""

        def wait() -> None:
            wait_until(condition)
            action()

        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            waiting = executor.submit(wait)
            yield
            waiting.result(processes.PATIENCE)

    def quiet(self) -> bool:
        """Whether nothing runs and everything has been given back."""
        return self.service.statistics()["running"] == 0 and not self.backend.open

    def entry(self) -> mounting.MountEntry:
        return mount_entry(self.device, str(self.folder))


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_until(condition: Any) -> None:
    processes.wait_until(condition, processes.PATIENCE, "the condition")
