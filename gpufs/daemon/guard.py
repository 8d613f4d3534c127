"""Takes a mount away whose daemon has died: a small process that waits beside the daemon, in a session of its own.

Started by the daemon as ``python -I -S guard.py PID MOUNTPOINT LOG_FILE`` with the end of a pipe as standard input. The
daemon says there which mount is its own ("ID MAJOR:MINOR"), and "end" when it ends as it should. Should the pipe close
without that, the daemon was killed or has crashed: then, and only while that very mount still stands there and its
connection is dead, it is detached. What somebody has mounted there since stays.

Imports next to nothing while it waits, for one stands beside each mount. Signals that end processes are blocked by its
starter: it goes when the daemon goes, and not before.
"""

import os
import sys


def _wait() -> list[str]:
    """What the daemon has said when it closed the pipe, or ended."""
    said = b""
    while part := os.read(0, 4096):
        said += part
    return said.decode(errors="replace").split("\n")


def _tell(log_file: str, text: str) -> None:
    """A line in the mount's log, or in the system's where it has none."""
    import time

    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}.000 ERROR gpufs.guard: {text}\n"
    if log_file:
        try:
            fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        except OSError:
            pass  # the system's log has it then
        else:
            os.write(fd, os.fsencode(line))
            os.close(fd)
            return
    import syslog

    syslog.openlog("gpufs", syslog.LOG_PID, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_ERR, text)


def main(pid: str, mountpoint: str, log_file: str) -> None:
    """The entry point."""
    said = _wait()
    if "end" in said:
        return
    sys.path.insert(0, os.path.abspath(__file__).rsplit(os.sep, 3)[0])
    from gpufs import mounting

    entry = mounting.entry_with(said[0]) if said[0] else mounting.entry_of(mountpoint)
    if entry is None:
        return
    try:
        gone = mounting.unmount_dead(entry)
    except OSError as failure:
        reason = failure.strerror or str(failure)
        _tell(log_file, f"the daemon ({pid}) has died: {reason}: run gpufs umount {mountpoint}")
        return
    if gone:
        _tell(log_file, f"the daemon ({pid}) has died: its mount at {entry.mountpoint} was unmounted")


if __name__ == "__main__":
    main(*sys.argv[1:])
