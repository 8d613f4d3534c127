"""Loading one file of a store: its parts in flight at once, each requested once."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import closing
from functools import partial
from typing import Final

from gpufs import waiting
from gpufs.stores import errors
from gpufs.stores.errors import StoreError
from gpufs.stores.files import StoreFile
from gpufs.stores.web import WholeFile
from gpufs.syscalls import os_error, write_at
from gpufs.waiting import END_SECONDS, Workers

PART_BYTES: Final = 16 << 20
# Each has a connection, and a chunk of about 1 MiB in memory.
PARTS_IN_FLIGHT: Final = 8
_REPORT_SECONDS: Final = 0.1
# The attribute of an incomplete file that lists its finished parts. The mount has user.gpufs.* for itself.
_ATTRIBUTE: Final = "user.gpufs-parts"


class Download:
    """Loads one file into an open file of its size, with which the list of the parts that have come is stored.

    ``pool`` runs the parts of all files that are loaded at once, which bounds their memory.
    """

    def __init__(self, file: StoreFile, fd: int, pool: Workers) -> None:
        self._file = file
        self._fd = fd
        self._pool = pool
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # guards what the threads of the pool change
        # Others may read the file: no query, which may be signed, and no password.
        self._source = {"url": file.url.shown, "size": file.size, "version": file.version, "part": PART_BYTES}
        self._count = -(-file.size // PART_BYTES)  # parts
        self._finished = 0  # one bit for each part: an attribute's value is at most 64 KiB long
        self.kept = 0  # bytes that an earlier copy had stored
        self.moved = 0  # bytes that have arrived
        self.size = file.size  # may be another one once the file has been loaded as a whole
        self.is_whole = False  # whether it has been loaded from its start
        self.running: list[Future[None]] = []  # parts that may still be written, although run() has ended

    def resume(self) -> bool:
        """Take over the parts that an earlier copy of the same content has stored. False if there are none."""
        try:
            stored = json.loads(os.getxattr(self._fd, _ATTRIBUTE))
            finished = int(stored.pop("finished"), 16)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        if not stored.get("version") or stored != self._source or finished >> self._count:
            return False
        self._finished = finished
        self.kept = self.bytes_done
        return True

    def forget(self) -> None:
        """Remove the list: the file is complete, or is loaded from its start."""
        self._finished = 0
        try:
            os.removexattr(self._fd, _ATTRIBUTE)
        except OSError as error:
            if error.errno != errno.ENODATA:
                raise

    @property
    def bytes_done(self) -> int:
        done = self._finished.bit_count() * PART_BYTES
        last_is_done = self._count > 0 and not self._needs(self._count - 1)
        return done - (self._count * PART_BYTES - self._file.size) * last_is_done

    def _needs(self, part: int) -> bool:
        return not self._finished >> part & 1

    def _finish(self, part: int) -> None:
        with self._lock:
            self._finished |= 1 << part
            # After the part's bytes: what is listed is there, whenever this process ends.
            text = json.dumps({**self._source, "finished": f"{self._finished:x}"})
            os.setxattr(self._fd, _ATTRIBUTE, text.encode())

    def run(
        self, report: Callable[[int], None], cancelled: Callable[[], bool], check_space: Callable[[int], None]
    ) -> None:
        """Load the missing parts, or the whole file where a web server's answers for parts do not fit together.

        ``report`` is called about ten times a second with the bytes that have arrived. OSError ECANCELED once
        ``cancelled``; StoreError if the store fails. ``check_space`` is called with the bytes that the file has more
        than was known, and raises OSError if they do not fit.
        """
        if self._file.is_plain:
            self._run(lambda _: self._load_whole(check_space), [0], report, cancelled)
            return
        try:
            self._run(self._load, list(filter(self._needs, range(self._count))), report, cancelled)
        except StoreError as error:
            # The server sends whole files only; or it names the parts differently, as several servers behind one
            # address do, and all parts must be of one file.
            if error.errno not in (errno.EOPNOTSUPP, errno.ESTALE) or self._file.whole is None or self.running:
                raise
            self._stopped.clear()
            self._run(lambda _: self._load_whole(check_space), [0], report, cancelled)

    def _run(
        self,
        load: Callable[[int], None],
        parts: Sequence[int],
        report: Callable[[int], None],
        cancelled: Callable[[], bool],
    ) -> None:
        pending: set[Future[None]] = set()
        try:
            pending.update(self._pool.submit(load, part) for part in parts)
            while pending:
                done, pending = wait(pending, _REPORT_SECONDS, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if cancelled():
                    raise os_error(errno.ECANCELED)
                report(self.moved)
        finally:
            self._stopped.set()
            self.running += wait([part for part in pending if not part.cancel()], END_SECONDS).not_done

    def _load(self, part: int) -> None:
        """Load a part in one request; in more if it ends early."""
        offset = part * PART_BYTES
        end = min(offset + PART_BYTES, self._file.size)
        tries = 0
        while offset < end:
            before = offset
            try:
                for chunk in self._file.read(offset, end):
                    self._write(chunk, offset)
                    with self._lock:
                        self.moved += len(chunk)
                    offset += len(chunk)
                if offset < end:
                    text = f"the store sent too few bytes: a range ended at {offset} instead of {end}"
                    raise StoreError(errno.EIO, text, self._file.url.shown, transient=True)
            except StoreError as error:
                if not error.transient:
                    raise
                tries = 1 if offset > before else tries + 1
                if tries == errors.TRIES:
                    raise
                errors.wait(tries, self._stopped)
        self._finish(part)

    def _load_whole(self, check_space: Callable[[int], None]) -> None:
        """Load the file by one request. After a failure it begins again: the next answer may be another file."""
        assert self._file.whole is not None
        self.is_whole, self.kept = True, 0
        self.forget()
        errors.retried(partial(self._receive_whole, self._file.whole, check_space), errors.TRIES, self._stopped)
        self.size = self.moved
        os.ftruncate(self._fd, self.size)

    def _receive_whole(self, request: Callable[[], WholeFile], check_space: Callable[[int], None]) -> None:
        self.moved = 0
        with closing(request()) as answer:
            if answer.size is not None and answer.size > self.size:
                check_space(answer.size - self.size)
                self.size = answer.size
            for chunk in answer:
                self._write(chunk, self.moved)
                self.moved += len(chunk)

    def _write(self, chunk: bytes, offset: int) -> None:
        if self._stopped.is_set():
            raise os_error(errno.ECANCELED)
        write_at(self._fd, memoryview(chunk), offset)


def sha256_of_stored(file: StoreFile, cancelled: Callable[[], bool]) -> str:
    """Read a file of a store and return its SHA-256, hexadecimal. OSError ECANCELED once ``cancelled``."""
    whole = hashlib.sha256()
    for start in range(0, file.size, PART_BYTES):
        end = min(start + PART_BYTES, file.size)
        whole.update(waiting.result(waiting.start(errors.retried, partial(_part, file, start, end)), cancelled))
    return whole.hexdigest()


def _part(file: StoreFile, start: int, end: int) -> bytes:
    part = b"".join(file.read(start, end))
    if len(part) != end - start:
        raise StoreError(errno.EIO, "the store sent too few bytes", file.url.shown, transient=True)
    return part
