"""A file system that is slow, fails or stops answering, as one on a network does: a small FUSE server of our own."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _WRITE, _STATFS, _RELEASE, _FSYNC = 1, 2, 3, 14, 15, 16, 17, 18, 20
_FLUSH, _INIT, _INTERRUPT, _DESTROY, _BATCH_FORGET, _FALLOCATE = 25, 26, 36, 38, 42, 43
_NO_REPLY = (_FORGET, _INTERRUPT, _BATCH_FORGET)
OPERATIONS = {"lookup": _LOOKUP, "open": _OPEN, "read": _READ, "statfs": _STATFS, "flush": _FLUSH, "release": _RELEASE}
OPERATIONS |= {"write": _WRITE, "fsync": _FSYNC, "fallocate": _FALLOCATE}
_ROOT, _FILE = 1, 2
_KEEP_CACHE = 2


def _attributes(node: int, size: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == _ROOT else stat.S_IFREG | 0o666
    times = (0,) * 6
    size = 0 if node == _ROOT else size
    head = struct.pack("=6Q3I", node, size, size // 512, *times[:3], *times[3:])
    return head + struct.pack("=7I", mode, 1, 0, 0, 0, 4096, 0)


def serve(fd: int, size: int, good: int, failure: int, delay: float, hanging: Iterable[int]) -> None:
    """Answers requests for one file of zeros; READ from offset `good` on and the `hanging` operations not before
    something comes on standard input. A byte goes to standard output for each of these that has come.

    failure: READ from `good` on fails with this errno instead. delay: seconds that each READ takes. What is written is
    forgotten.
    """
    buffer_bytes = (1 << 20) + 4096
    hang = set(hanging)
    kept: list[bytes] = []

    def keep(request: bytes) -> None:
        kept.append(request)
        os.write(sys.stdout.fileno(), b".")

    def answer_to(request: bytes) -> None:
        _, operation, unique, node = struct.unpack_from("=IIQQ", request)
        body = request[40:]
        if operation in _NO_REPLY:
            return
        if operation in hang and operation != _READ:
            keep(request)
            return
        error, answer = 0, b""
        if operation == _INIT:
            answer = struct.pack("=4I2H2I2HI7I", 7, 31, 1 << 17, 0, 12, 9, 1 << 17, 1, 0, 0, 0, *(0,) * 7)
        elif operation == _LOOKUP:
            if body.rstrip(b"\0") == b"file":
                answer = struct.pack("=4Q2I", _FILE, 0, 3600, 3600, 0, 0) + _attributes(_FILE, size)
            else:
                error = -errno.ENOENT
        elif operation == _GETATTR:
            answer = struct.pack("=QII", 3600, 0, 0) + _attributes(node, size)
        elif operation == _OPEN:
            answer = struct.pack("=QII", 1, _KEEP_CACHE, 0)  # else an opening waits for reads that hang
        elif operation == _READ:
            _, offset, count = struct.unpack_from("=QQI", body)
            if offset + count > good and failure:
                error = -failure
            elif offset + count > good and _READ in hang:
                keep(request)
                return
            else:
                time.sleep(delay)
                answer = bytes(max(0, min(count, size - offset)))
        elif operation == _WRITE:
            answer = struct.pack("=II", struct.unpack_from("=QQI", body)[2], 0)
        elif operation == _STATFS:
            answer = struct.pack("=5Q4I6I", 1, 1, 1, 1, 1, 4096, 255, 4096, 0, *(0,) * 6)
        elif operation not in (_RELEASE, _FLUSH, _FSYNC, _FALLOCATE, _DESTROY):
            error = -errno.ENOSYS
        try:
            os.write(fd, struct.pack("=IiQ", 16 + len(answer), error, unique) + answer)
        except OSError:
            pass

    os.set_blocking(fd, False)
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    waiting.register(sys.stdin, select.POLLIN)
    while True:
        if sys.stdin.fileno() in dict(waiting.poll()):
            waiting.unregister(sys.stdin)
            hang.clear()
            for request in kept:
                answer_to(request)
        try:
            request = os.read(fd, buffer_bytes)
        except OSError as ended:
            if ended.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                continue
            return
        answer_to(request)


class HangingMount:
    """path/file has `size` zeros, of which the first `good` can be read; `operations` are not answered until resume().

    failure: what reads beyond fail with, instead of hanging. delay: seconds that each read of up to 128 KiB takes.
    release() ends the server: everything that waits fails with ENOTCONN.
    """

    def __init__(
        self,
        size: int = 1 << 30,
        good: int = 0,
        operations: Iterable[str] = ("read",),
        *,
        failure: int = 0,
        delay: float = 0,
    ) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="gpufs-client-", dir="/tmp"))
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other,max_read=131072".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            if libc.mount(b"hanging", os.fsencode(self.path), b"fuse", 0, options):
                raise OSError(ctypes.get_errno(), "mount")
            numbers = [str(OPERATIONS[name]) for name in operations]
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(fd), str(size), str(good), str(failure), str(delay), *numbers],
                pass_fds=(fd,),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        finally:
            os.close(fd)
        self._hanging = 0
        self.file = self.path / "file"

    def resume(self) -> None:
        """Answers everything that waits, and what comes later."""
        assert self._server.stdin is not None
        self._server.stdin.write(b"\n")
        self._server.stdin.flush()

    def waiting(self) -> int:
        """Requests that have no answer yet."""
        number = os.minor(os.stat(self.path).st_dev)
        return int(Path(f"/sys/fs/fuse/connections/{number}/waiting").read_text())

    def hanging(self) -> int:
        """Count the requests that the server has and does not answer. A signal to their sender does not end them."""
        came = self._server.stdout
        assert came is not None
        while select.select([came], [], [], 0)[0] and (more := os.read(came.fileno(), 4096)):
            self._hanging += len(more)
        return self._hanging

    def release(self) -> None:
        if self._server.poll() is None:
            self._server.send_signal(signal.SIGKILL)
        self._server.wait(60)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()

    def __enter__(self) -> HangingMount:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        subprocess.run(["umount", "-l", self.path], check=False, timeout=60)
        os.rmdir(self.path)


# Lists a directory into memory whose pages never come: the kernel keeps the directory's lock meanwhile.
_HOLD = """
import ctypes, mmap, os, sys
libc = ctypes.CDLL(None)
file, directory = os.open(sys.argv[1], os.O_RDWR), os.open(sys.argv[2], os.O_RDONLY)
pages = mmap.mmap(file, 1 << 20, flags=mmap.MAP_PRIVATE)
address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
libc.getdents64(directory, ctypes.c_void_p(address), ctypes.c_size_t(1 << 16))
"""


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """A program holds the kernel's lock of a directory, as any user can who may list it."""
    with HangingMount(1 << 20) as hanging:
        with subprocess.Popen([sys.executable, "-c", _HOLD, hanging.file, directory]) as program:
            try:
                while not hanging.hanging():
                    time.sleep(0.01)
                yield
            finally:
                hanging.release()
                program.kill()


if __name__ == "__main__":
    fd, size, good, failure = map(int, sys.argv[1:5])
    serve(fd, size, good, failure, float(sys.argv[5]), map(int, sys.argv[6:]))
