"""Reading and writing pipes, and other open files that have no offsets."""

import os
import select


def read_full(fd: int, buffer: memoryview) -> int:
    """Fills a buffer from a pipe or another stream. Returns fewer bytes only at the stream's end."""
    filled = 0
    while filled < len(buffer):
        try:
            count = os.readv(fd, [buffer[filled:]])
        except BlockingIOError:  # the stream's other users want it so
            _await(fd, select.POLLIN)
            continue
        if not count:
            break
        filled += count
    return filled


def write_some(fd: int, data: memoryview) -> int:
    """Writes to a pipe or another stream. Returns how many bytes it took, at least one."""
    while True:
        try:
            return os.write(fd, data)
        except BlockingIOError:
            _await(fd, select.POLLOUT)


def _await(fd: int, event: int) -> None:
    poll = select.poll()
    poll.register(fd, event)
    poll.poll()
