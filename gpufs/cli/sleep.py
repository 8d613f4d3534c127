"""gpufs sleep: files leave their devices for the host's memory."""

import errno
import os
from typing import Final

import click

from gpufs import config
from gpufs.cli._files import held_bytes, parked_bytes
from gpufs.cli._main import complete_files
from gpufs.cli._options import timeout_option
from gpufs.cli._parking import each_file
from gpufs.client._daemons import park

_SMALL: Final = 2 << 20  # such files share memory with others


@click.command(name="sleep")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, shell_complete=complete_files)
@timeout_option(config.SLEEP_TIMEOUT)
def command(paths: tuple[str, ...], timeout: float) -> None:
    """Move files from a device to the host's memory of their mount, which leaves the device's memory free.

    Names, contents and owners stay the same. A directory stands for all files below it. The files come back with `gpufs
    wake`, and when a program opens them to write, attaches them or wakes; reading them leaves them where they are.
    Files smaller than 2 MiB stay on their device, and files in host0 and registered memory stay where they are.

    Programs that use a file in place are asked to release it, if they have called gpufs.when_asked(). The others, and
    those that do not do it in time, are named, and the file stays. Only the file's owner, root and the user who mounted
    may do this. The mount needs --host-memory.
    """

    def sleep(path: str, status: os.stat_result, before: int | None) -> int | str:
        try:
            park(path, timeout)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return "in memory of the host or a program"
            raise
        after = parked_bytes(path)
        if before:
            return "asleep before"
        if after == 0:
            if status.st_size < _SMALL:
                return "smaller than 2 MiB"
            return "in use again" if status.st_blocks else "of holes alone"
        return after or held_bytes(status)

    each_file(paths, sleep, "asleep:")
