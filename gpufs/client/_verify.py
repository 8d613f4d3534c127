"""Whether a copy is equal to its source: loaded where that is asked for."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading

from gpufs.client._outcome import CopyError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from gpufs.client._copy import _One as Copy

_STREAM_BYTES: Final = 4 << 20


def compare(one: Copy) -> str:
    """The checksum that both files have. CopyError EIO when they differ, ECANCELED when cancelled."""
    # Through the descriptor, so that it is the file that was written whatever its name means now.
    back = os.open(f"/proc/self/fd/{one.destination_fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for fd in (one.destination_fd, back):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        digests: dict[int, str | OSError] = {}
        # Behind the copy a disk goes on.
        end = one.moved.done if stat.S_ISBLK(os.fstat(back).st_mode) else None

        def digest(fd: int, *, tell: bool) -> None:
            try:
                digests[fd] = _digest(fd, one, None if fd == one.source_fd else end, tell=tell)
            except OSError as error:
                digests[fd] = error

        other = threading.Thread(target=digest, args=(back,), kwargs={"tell": False}, daemon=True)
        other.start()
        digest(one.source_fd, tell=True)
        other.join()
    finally:
        os.close(back)
    of_source, of_destination = digests[one.source_fd], digests[back]
    done, total = one.moved.done, one.moved.total
    for name, outcome in ((one.source, of_source), (one.destination, of_destination)):
        if isinstance(outcome, OSError):
            text = f"verifying: {outcome.strerror or outcome}"
            raise CopyError(outcome.errno or errno.EIO, text, name, bytes_done=done, bytes_total=total)
    if of_source != of_destination:
        text = f"the copy differs: SHA-256 {of_source} was copied, {of_destination} was read back"
        raise CopyError(errno.EIO, text, one.source, one.destination, bytes_done=done, bytes_total=total)
    assert isinstance(of_source, str)
    return of_source


def _digest(fd: int, one: Copy, end: int | None, *, tell: bool) -> str:
    """Of the bytes up to the offset ``end``; None: of all."""
    checksum = hashlib.sha256()
    buffer = memoryview(bytearray(_STREAM_BYTES))
    offset = 0
    while True:
        if one.cancel is not None and one.cancel.cancelled:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        count = os.preadv(fd, [buffer if end is None else buffer[: end - offset]], offset)
        if not count:
            return checksum.hexdigest()
        checksum.update(buffer[:count])
        offset += count
        if tell:
            one.tell(offset, "verify")
