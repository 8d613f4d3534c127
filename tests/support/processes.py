"""Running programs, acting as another user, and counting what a process holds."""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import fcntl
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NOBODY = 65534
OTHER = 65533
# Every process a test session starts carries this variable, so that leftovers are found whoever their parent is.
SESSION_VARIABLE = "TESTS_OF_GPUFS"


def run(
    *command: str | os.PathLike[str], check: bool = True, timeout: float = 200.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end with its output captured as text; with check, a failure shows that output."""
    everything: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace"}
    everything |= {"timeout": timeout} | ({} if "input" in options else {"stdin": subprocess.DEVNULL}) | options
    done: subprocess.CompletedProcess[str] = subprocess.run([os.fspath(x) for x in command], **everything)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def shell(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a bash script that stops at its first failure."""
    return run("bash", "-euo", "pipefail", "-c", script, **options)


def in_child(action: Callable[[], Any], *, uid: int = 0, gid: int = 0, groups: Sequence[int] = ()) -> Any:
    """What action returns when a forked child runs it as uid:gid; an exception of the child's is raised here.

    Raises ChildKilled if a signal ended the child.
    """
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(receive)
            faulthandler.disable()
            try:
                if (uid, gid) != (os.getuid(), os.getgid()) or groups:
                    os.setgroups(list(groups))
                    os.setresgid(gid, gid, gid)
                    os.setresuid(uid, uid, uid)
                answer = (True, action())
            except BaseException as error:  # noqa: BLE001 - the parent raises it
                error.add_note("in the child:\n" + traceback.format_exc())
                answer = (False, error)
            with os.fdopen(send, "wb") as pipe:
                pickle.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        raise ChildKilled(signal.Signals(os.WTERMSIG(status)))
    good, value = pickle.loads(data)
    if not good:
        raise value
    return value


def as_nobody(action: Callable[[], Any]) -> Any:
    return in_child(action, uid=NOBODY, gid=NOBODY)


def as_other(action: Callable[[], Any]) -> Any:
    return in_child(action, uid=OTHER, gid=OTHER)


class ChildKilled(Exception):
    """A child of in_child was ended by a signal."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


def start_children(count: int, action: Callable[[int], Any]) -> list[int]:
    """Forks count children that run action(index) and end with 0, or with 1 and a traceback on stderr."""
    children = []
    for index in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                action(index)
                code = 0
            except BaseException:  # noqa: BLE001 - shown, and the exit code reports it
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        children.append(child)
    return children


def wait_children(children: Sequence[int]) -> None:
    """Waits for all of them; fails if any did not end with 0."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * len(codes), f"children ended with {codes}"


def errno_of(action: Callable[..., Any], *arguments: Any, **options: Any) -> int:
    """The errno that the call fails with; 0 if it succeeds."""
    try:
        action(*arguments, **options)
    except OSError as error:
        return error.errno or -1
    return 0


# What must come about is given this many seconds at least: on a machine that does much else, an end that comes late is
# no failure, and waiting for one that comes early costs nothing.
PATIENCE = 200.0
# The same for commands that wait for a mount: what they say where it does not answer has tests of its own.
PATIENT = {"GPUFS_STATUS_TIMEOUT": "60", "GPUFS_UMOUNT_TIMEOUT": "60"}


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Polls until condition() is true and returns it; AssertionError naming `what` when the time is up.

    seconds: how long that may take on a machine that does nothing else; it is given PATIENCE or more.
    """
    seconds = max(seconds, PATIENCE)
    deadline = time.monotonic() + seconds
    pause = 0.005
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.2)


def links_of(pid: int) -> dict[int, str]:
    """What the descriptors of a process are, by number; without those that go while they are looked at."""
    found = {}
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[int(entry)] = os.readlink(f"/proc/{pid}/fd/{entry}")
    return found


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits for its parent to notice that it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@dataclass(frozen=True)
class Snapshot:
    """What one process holds."""

    descriptors: int
    memfds: int  # memory of files
    threads: int
    resident_bytes: int
    kinds: collections.Counter[str] = field(compare=False, repr=False)

    @classmethod
    def of(cls, pid: int) -> Snapshot:
        kinds = collections.Counter(link.split("[")[0].split(":[")[0] for link in links_of(pid).values())
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return cls(
            descriptors=kinds.total(),
            memfds=sum(n for name, n in kinds.items() if name.startswith("/memfd:gpufs-buffer")),
            threads=len(os.listdir(f"/proc/{pid}/task")),
            resident_bytes=int(status["VmRSS"].split()[0]) * 1024,
            kinds=kinds,
        )


def session_processes(session: str) -> dict[int, str]:
    """The living processes that carry the session's variable, other than this one: pid -> command line."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(process.name) == os.getpid():
                continue
            environment, command = _program(process)
            if f"{SESSION_VARIABLE}={session}".encode() in environment.split(b"\0"):
                found[int(process.name)] = command.replace(b"\0", b" ").decode()
    return found


def _program(process: Path) -> tuple[bytes, bytes]:
    """The environment and the command line of a process, which are empty for a moment in execve(2)."""
    for _ in range(20):
        environment, command = ((process / name).read_bytes() for name in ("environ", "cmdline"))
        if (environment and command) or not os.path.exists(process / "exe"):  # a zombie, or a thread of the kernel
            break
        time.sleep(0.001)
    return environment, command


def children_of(pid: int) -> list[int]:
    """The direct children of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(x) for x in (task / "children").read_text().split()]
    return found


@contextlib.contextmanager
def other_namespace(command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A shell in a new mount namespace, which has run a command and stays until the block ends."""
    words = ["unshare", "-m", "--propagation", "private", "sh", "-c", f"{command}; echo; read -r _"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process


@contextlib.contextmanager
def plain_user() -> Iterator[dict[str, str]]:
    """An environment in which nobody can mount: an own home, and /dev/fuse of mode 666 (restored), as in Debian.

    One at a time, whatever other runs of tests there are on this machine.
    """
    device = os.open("/dev/fuse", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(device, fcntl.LOCK_EX)
    before = os.stat("/dev/fuse").st_mode & 0o7777
    os.chmod("/dev/fuse", 0o666)
    home = tempfile.mkdtemp(prefix="gpufs-tests-home-")
    os.chown(home, NOBODY, NOBODY)
    os.chmod(home, 0o700)
    try:
        yield {
            "HOME": home,
            "USER": "nobody",
            "LOGNAME": "nobody",
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "XDG_RUNTIME_DIR": home,
            "PYTHONDONTWRITEBYTECODE": "1",
            **PATIENT,
        }
    finally:
        os.chmod("/dev/fuse", before)
        fcntl.flock(device, fcntl.LOCK_UN)  # children may have the descriptor too
        os.close(device)
        subprocess.run(["rm", "-rf", "--one-file-system", home], check=False, timeout=PATIENCE)


def stop_process(process: int) -> None:
    """Stop a process, and wait for each of its threads: a daemon's could still take a request that nobody answers.

    One that has been waiting in the kernel for a while takes none: it stops when that wait ends.
    """
    begun = time.monotonic()
    os.kill(process, signal.SIGSTOP)
    threads = [Path(f"/proc/{process}/task/{thread}/stat") for thread in os.listdir(f"/proc/{process}/task")]

    def running() -> list[str]:
        texts = [thread.read_text() for thread in threads]
        expected = "T" if time.monotonic() < begun + 3 else "TD"
        return [text[:60] for text in texts if text.rpartition(")")[2].split()[0] not in expected]

    try:
        wait_until(lambda: not running(), PATIENCE, "the process to stop")
    except AssertionError as late:
        raise AssertionError(f"{late}; threads that run: {running()}") from None
