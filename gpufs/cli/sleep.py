"""gpufs sleep: files leave their devices for the host's memory."""

from collections import Counter
from contextlib import suppress
from typing import Final

import click

from gpufs import config
from gpufs.cli._files import parked_bytes
from gpufs.cli._main import complete_files
from gpufs.cli._options import timeout_option
from gpufs.cli._parking import failed, files_below, opened, report
from gpufs.client._daemons import park

_SMALL: Final = 2 << 20  # such files share memory with others


@click.command(name="sleep")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, shell_complete=complete_files)
@timeout_option(config.SLEEP_TIMEOUT)
def command(paths: tuple[str, ...], timeout: float) -> None:
    """Move files from a device to the host's memory of their mount, which leaves the device's memory free.

    Names, contents and owners stay the same. A directory stands for all files below it. All of the files move, or none.
    They come back with `gpufs wake`, and when a program writes to them, attaches them or wakes; reading them leaves
    them where they are. Files smaller than 2 MiB stay on their device, and files in host0 and registered memory
    stay where they are.

    Programs that use the files in place are asked to release them, if they have called gpufs.when_asked(): each once,
    and all together have the time of --sleep-timeout. The others, and those that do not do it in time, are named, and
    nothing moves. Only the files' owner, root and the user who mounted may do this. The mount needs --host-memory.
    """

    files = files_below(paths)
    large = [file for file in files if file.status.st_size >= _SMALL and file.held]
    try:
        park({file.path: file.status for file in large}, timeout)
    except OSError as error:
        raise failed(paths, files, error) from None
    changed = []
    unchanged: Counter[str] = Counter()
    for file in files:
        after: int | None = 0
        with suppress(FileNotFoundError), opened(file) as place:
            after = parked_bytes(place)
        if file.parked:
            unchanged["asleep before"] += 1
        elif after != 0:
            changed.append(after or file.held)
        elif not file.held:
            unchanged["of holes alone"] += 1
        elif file.status.st_size < _SMALL:
            unchanged["smaller than 2 MiB"] += 1
        else:
            unchanged["in memory of the host or a program, or in use again"] += 1
    report("asleep:", changed, unchanged)
