"""Whether others can go on working while one plain user takes all that a mount gives them of something.

    def attack(ready: Callable[[], None]) -> None:  # runs as nobody, in a process of its own
        take_all_there_is()
        ready()

    assert_unharmed(mount, attack)

Root and a second plain user create, write, read, copy and attach files: first while nothing else happens, then during
the attack.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gpufs import modes, protocol
from support.attaching import Attacker
from support.cli import user_gpufs
from support.copying import socket_path
from support.data import KIB, noise
from support.mounting import GPUFS, GpufsMount
from support.processes import NOBODY, OTHER, in_child, run

Attack = Callable[[Callable[[], None]], None]
Medians = dict[str, float]  # seconds by operation

FACTOR = 3  # an operation may take that many times its quiet median during the attack,
SLACK = 0.05  # and so many seconds more: the attack needs the CPU, too
# A program that has nothing to do with the mount. If it takes longer as well, others keep the processors busy.
ELSEWHERE = "a program elsewhere"
ATTEMPTS = 3  # other programs may make the machine slower; what an attack makes slower is so each time
ROUNDS, COPIES = 5, 2  # `gpufs cp` starts a process, so it is slow and even
BUDGET = 10.0  # seconds for the rounds of one user; the first ones are always measured
CONTENT = noise(300 * KIB)  # memory of its own


@contextlib.contextmanager
def attacking(attack: Attack) -> Iterator[None]:
    """Runs attack(ready) as nobody in a child process; the block begins when it has called ready().

    If attack() returns, the child keeps what it has. At the end of the block the child is killed, and all that it has
    started in its process group.
    """
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            os.close(receive)
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)

            def ready() -> None:
                os.write(send, b"1")

            attack(ready)
            signal.pause()
        except BaseException:  # noqa: BLE001 - shown, and the parent notices the end
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    os.close(send)
    try:
        with os.fdopen(receive, "rb") as pipe:
            assert pipe.read(1), "the attack failed before it was ready"
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class Bystander:
    """One user with a directory of their own on the first device of a mount."""

    def __init__(self, mount: GpufsMount, uid: int) -> None:
        self.uid = uid
        self.socket = socket_path(mount.path)
        self.folder = mount.device / f"bystander-{uid}"
        self.source = mount.path.with_name(f"{mount.path.name}-source-{uid}")
        self.command: Sequence[str] = GPUFS
        self.environment = dict(os.environ)
        if not self.folder.exists():
            self.folder.mkdir()
            self.source.write_bytes(CONTENT)
            for path in (self.folder, self.source):
                os.chown(path, uid, uid)
        if uid != 0:
            self.command, self.environment = user_gpufs({"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"})

    def measure(self) -> Medians:
        """Fails if an operation does."""
        found: Medians = in_child(self._rounds, uid=self.uid, gid=self.uid)
        return found

    def _rounds(self) -> Medians:
        signal.alarm(60)  # an operation without an answer ends this process
        times: dict[str, list[float]] = {}
        end = time.monotonic() + BUDGET
        for number in range(ROUNDS):
            if number >= COPIES and time.monotonic() > end:
                break
            self._round(times, copy=number < COPIES)
        return {name: statistics.median(found) for name, found in times.items()}

    def _round(self, times: dict[str, list[float]], *, copy: bool) -> None:
        @contextlib.contextmanager
        def measured(name: str) -> Iterator[None]:
            start = time.monotonic()
            try:
                yield
            except Exception as error:
                error.add_note(f"user {self.uid}: {name}, after {time.monotonic() - start:.3f} s")
                raise
            times.setdefault(name, []).append(time.monotonic() - start)

        file, copied = self.folder / "file", self.folder / "copied"
        with measured("create"):
            fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with measured("write"):
                assert os.pwrite(fd, CONTENT, 0) == len(CONTENT)
            with measured("read"):
                assert os.pread(fd, len(CONTENT), 0) == CONTENT
            with measured("attach"), Attacker(self.socket) as client:
                assert client.greet(), "the daemon refuses the connection"
                answer, descriptors = client.ask(protocol.Attach(1, modes.READ), [fd])
                assert not answer.get("error"), answer
                for received in descriptors:
                    os.close(received)
            if copy:
                with measured(ELSEWHERE):
                    run("sh", "-c", "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done", cwd="/")
                with measured("gpufs cp"):
                    run(*self.command, "cp", self.source, copied, env=self.environment, cwd="/")
        finally:
            os.close(fd)
        file.unlink()
        copied.unlink(missing_ok=True)


def assert_unharmed(mount: GpufsMount, attack: Attack) -> None:
    """Fails if an operation of a bystander fails during the attack, or takes much longer than before it.

    Unless a program elsewhere does, too.
    """
    bystanders = [Bystander(mount, uid) for uid in (0, OTHER)]
    for _ in range(ATTEMPTS):
        quiet = [one.measure() for one in bystanders]
        with attacking(attack):
            attacked = [one.measure() for one in bystanders]
        busy = [max(now[ELSEWHERE] / before[ELSEWHERE], 1) for before, now in zip(quiet, attacked, strict=True)]
        slower = [
            f"user {one.uid}: {name} took {now[name] * 1000:.1f} ms, without the attack {before[name] * 1000:.1f} ms"
            for one, before, now, factor in zip(bystanders, quiet, attacked, busy, strict=True)
            for name in before
            if now[name] > FACTOR * factor * before[name] + SLACK and name != ELSEWHERE
        ]
        if not slower:
            return
    raise AssertionError("\n".join(slower))


# ---- waits while something goes on ----


@contextlib.contextmanager
def watched(mount: Path, most: float) -> Iterator[Medians]:
    """Fails if during the block an operation of another plain user fails, or takes longer than ``most`` seconds.

    The longest time of each is in what this yields, after the block. Three times what a message to another process
    takes at its worst comes on top: for that other programs are to blame.
    """
    folder = mount / "gpu0/watched"
    folder.mkdir()
    os.chown(folder, OTHER, OTHER)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ours.close()
            os.setgroups([])
            os.setresgid(OTHER, OTHER, OTHER)
            os.setresuid(OTHER, OTHER, OTHER)
            theirs.sendall(json.dumps(_longest(mount, folder, theirs)).encode())
            code = 0
        except BaseException:  # noqa: BLE001 - shown, and the parent notices the end
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    theirs.close()
    took: Medians = {}
    try:
        yield took
    finally:
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_WR)
        found = ours.makefile("rb").read()
        ours.close()
        failed = os.waitpid(child, 0)[1]
        shutil.rmtree(folder)
    assert not failed, "another user could not work"
    took |= json.loads(found)
    limit = most + 3 * took[ELSEWHERE]
    slow = {name: round(seconds, 3) for name, seconds in took.items() if seconds > limit}
    assert not slow, f"another user waited longer than {limit:.3f} s: {slow}"


def _longest(mount: Path, folder: Path, end: socket.socket) -> Medians:
    """Works on a mount until the other end is shut down. The longest time of each operation."""
    took: Medians = {}
    path = folder / "file"
    echo, ours = socket.socketpair()
    if os.fork() == 0:
        end.close()
        ours.close()
        while data := echo.recv(1):
            echo.send(data)
        os._exit(0)
    echo.close()

    @contextlib.contextmanager
    def measured(name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        took[name] = max(took.get(name, 0.0), time.monotonic() - start)

    with Attacker(socket_path(mount)) as client:
        assert client.greet()
        end.setblocking(False)
        while True:
            with contextlib.suppress(BlockingIOError):
                end.recv(1)
                return took
            with measured(ELSEWHERE):
                ours.send(b"x")
                ours.recv(1)
            with measured("create"):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            with measured("write"):
                assert os.pwrite(fd, CONTENT, 0) == len(CONTENT)
            with measured("read"):
                assert os.pread(fd, len(CONTENT), 0) == CONTENT
            with measured("attach and detach"):
                answer, received = client.ask(protocol.Attach(1, modes.READ_WRITE), [fd])
                assert not answer["error"], answer
                for one in received:
                    os.close(one)
                assert not client.ask(protocol.Detach(9, 1))[0]["error"]
            with measured("statfs"):
                os.statvfs(folder)
            with measured("close and remove"):
                os.close(fd)
                path.unlink()
            time.sleep(0.01)
