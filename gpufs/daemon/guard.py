"""Unmounts after the daemon has died: the keeper becomes this program when no daemon can take over.

The command is ``python -I -S guard.py PID MOUNTPOINT LOG_FILE IDENTITY``: the daemon's process, and the identity of its
mount, "ID MAJOR:MINOR", which is empty if it died before it had mounted. The guard detaches that mount, but only if it
is still there and its connection is dead: something that was mounted there later stays. If threads of the daemon wait
for the mount itself, it cuts the connection, which they keep open.
"""

import glob
import os
import sys
import time
from contextlib import suppress


def command(mountpoint: str, log_file: str | None, identity: str = "") -> list[str]:
    """Return the command that unmounts once this process has died."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), mountpoint, log_file or "", identity]


def _log(log_file: str, text: str) -> None:
    """Write a line to the mount's log, or to the system's log if the mount has none."""
    from gpufs.daemon.log_file import open_log_file

    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}.000 ERROR gpufs.guard: {text}\n"
    if log_file:
        with suppress(OSError):  # use the system's log
            fd = open_log_file(log_file)
            try:
                os.write(fd, os.fsencode(line))
            finally:
                os.close(fd)
            return
    import syslog

    syslog.openlog("gpufs", syslog.LOG_PID, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_ERR, text)


def _is_left(pid: str) -> bool:
    """Return whether a dead process has threads that wait in the kernel."""
    states = []
    for path in glob.glob(f"/proc/{pid}/task/*/stat"):
        with suppress(OSError), open(path, "rb") as file:
            states.append(file.read().rpartition(b") ")[2][:1])
    return b"D" in states


def main(pid: str, mountpoint: str, log_file: str, identity: str) -> None:
    """Unmount, if the mount is still there."""
    sys.path.insert(0, os.path.abspath(__file__).rsplit(os.sep, 3)[0])
    from gpufs import mounting

    entry = mounting.entry_with(identity) if identity else mounting.entry_of(mountpoint)
    if entry is None:
        return
    # If the mount has gone, the next one may have its numbers, at another place: that one must go on.
    if identity and entry.mountpoint == mountpoint and _is_left(pid):
        mounting.abort(entry)
    try:
        gone = mounting.unmount_dead(entry)
    except OSError as failure:
        reason = failure.strerror or str(failure)
        _log(log_file, f"the daemon ({pid}) has died: {reason}: run gpufs umount {mountpoint}")
        return
    if gone:
        _log(log_file, f"the daemon ({pid}) has died: its mount at {entry.mountpoint} was unmounted")


if __name__ == "__main__":
    main(*sys.argv[1:])
