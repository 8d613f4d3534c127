"""A process beside pytest that cleans up mounts when pytest cannot.

A thread is not enough: a page fault on a mapping of a hung mount blocks with the interpreter's lock held. The watchdog
reads commands as JSON lines from its standard input:

    {"do": "mount", "path": P, "group": G}   P is (about to be) mounted by process group G
    {"do": "gone", "path": P}                P has been unmounted and its daemon has ended
    {"do": "arm", "seconds": S, "what": W}   W must end within S seconds
    {"do": "disarm"}

When time is up it reports where the daemon's threads stand, aborts the connections and so makes every blocked client
return; at the end of its input (also when pytest was killed) it removes every mount and process group that is left, and
the session's other processes with the mounts that they serve.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from support.processes import session_processes

CONNECTIONS = Path("/sys/fs/fuse/connections")


def mounted_at(path: str) -> list[tuple[str, str]]:
    """The mounts at path, oldest first, as (minor device number, file system type). Never asks the file system."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        for line in lines:
            fields = line.split(" ")
            if fields[4].replace("\\040", " ") == path:
                found.append((fields[2].split(":")[1], fields[fields.index("-") + 1]))
    return found


def mount_fusectl() -> None:
    """Makes /sys/fs/fuse/connections usable; without the rights to do so, mounts can only be detached."""
    if os.geteuid() == 0 and CONNECTIONS.is_dir() and not os.path.ismount(CONNECTIONS):
        subprocess.run(["mount", "-t", "fusectl", "fusectl", str(CONNECTIONS)], check=False, stderr=subprocess.DEVNULL)


def abort(path: str) -> None:
    """Ends the FUSE connections mounted at path: every waiting client gets an error."""
    try:
        root = os.open(path, os.O_PATH)  # while it is open, the kernel gives the mount's number to no other one
    except OSError:
        return
    try:
        for minor, kind in mounted_at(path):
            if kind.startswith("fuse"):
                with contextlib.suppress(OSError):
                    (CONNECTIONS / minor / "abort").write_text("1")
    finally:
        os.close(root)


def rescue(path: str, group: int | None, log: list[str] | None = None) -> None:
    """Abort, unmount lazily, kill the process group: after this nothing of the mount is left, whatever happened."""
    abort(path)
    for _ in range(8):
        if not mounted_at(path):
            break
        command = ["umount", "-l", path] if os.geteuid() == 0 else ["fusermount3", "-u", "-z", path]
        subprocess.run(command, check=False, capture_output=True, timeout=60)
    if group:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
            if log is not None:
                log.append(f"killed process group {group} of {path}")


def where_threads_stand(group: int) -> str:
    """Lists every thread of the group: its name, state and the kernel function it waits in (root only)."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) != group:
                continue
            for task in (process / "task").iterdir():
                state = next(x for x in (task / "status").read_text().splitlines() if x.startswith("State"))
                try:
                    stack = " < ".join(x.split()[-1].split("+")[0] for x in (task / "stack").read_text().splitlines())
                except OSError:
                    stack = (task / "wchan").read_text()
                lines.append(f"  {process.name}/{task.name} {(task / 'comm').read_text().strip()} {state[7:]} {stack}")
        except (OSError, StopIteration):
            continue
    return "\n".join(lines)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = open(sys.argv[1], "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - lives as long as the process
    mount_fusectl()
    mounts: dict[str, int] = {}
    deadline, what, pending = None, "", b""
    while True:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([0], [], [], wait)[0]:
            deadline = None
            report.write(f"time is up: {what}\n")
            for path, group in mounts.items():
                report.write(f" {path} {mounted_at(path)}\n{where_threads_stand(group)}\n")
                abort(path)
            continue
        data = os.read(0, 65536)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for command in map(json.loads, lines):
            if command["do"] == "mount":
                mounts[command["path"]] = command["group"]
            elif command["do"] == "gone":
                mounts.pop(command["path"], None)
            elif command["do"] == "arm":
                deadline, what = time.monotonic() + command["seconds"], command["what"]
            else:
                deadline = None
    for path, group in mounts.items():
        log: list[str] = []
        rescue(path, group, log)
        report.write("".join(f"left over: {line}\n" for line in log))
    # Keepers first, which start other daemons.
    for pid, line in sorted(session_processes(sys.argv[2]).items(), key=lambda process: "keeper" not in process[1]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if "gpufs-keeper" in line or "gpufs.daemon" in line:
            rescue(line.rstrip().rsplit(" ", 1)[-1], None)
        report.write(f"left over: killed {pid}: {line}\n")


if __name__ == "__main__":
    main()
