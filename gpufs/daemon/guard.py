"""Unmounts if the daemon dies: a small process that waits beside the daemon, in a session of its own.

Started by the daemon as ``python -I -S guard.py PID MOUNTPOINT LOG_FILE`` with the end of a pipe as standard input. The
daemon writes there which mount is its own ("ID MAJOR:MINOR"), and "end" when it ends as it should. If the pipe closes
without that, the daemon was killed or has crashed. The guard then detaches that mount, but only if it is still there
and its connection is dead: something that was mounted there later stays.

It imports almost nothing while it waits, because there is one guard for each mount. The daemon blocks the signals that
end processes before it starts the guard, so the guard ends with the daemon and not before.
"""

import os
import sys


def _wait() -> list[str]:
    """Return the lines that the daemon wrote before it closed the pipe or ended."""
    text = b""
    while part := os.read(0, 4096):
        text += part
    return text.decode(errors="replace").split("\n")


def _log(log_file: str, text: str) -> None:
    """Write a line to the mount's log, or to the system's log if the mount has none."""
    import time

    from gpufs.daemon.log_file import open_log_file

    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}.000 ERROR gpufs.guard: {text}\n"
    if log_file:
        try:
            fd = open_log_file(log_file)
            try:
                os.write(fd, os.fsencode(line))
            finally:
                os.close(fd)
            return
        except OSError:
            pass  # use the system's log
    import syslog

    syslog.openlog("gpufs", syslog.LOG_PID, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_ERR, text)


def main(pid: str, mountpoint: str, log_file: str) -> None:
    """Wait for the daemon's end, and unmount if it died."""
    lines = _wait()
    if "end" in lines:
        return
    sys.path.insert(0, os.path.abspath(__file__).rsplit(os.sep, 3)[0])
    from gpufs import mounting

    identity = lines[0]
    entry = mounting.entry_with(identity) if identity else mounting.entry_of(mountpoint)
    if entry is None:
        return
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
