"""The keeper: what a daemon has given it comes back after any death, and it ends with the mount."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hanging import HangingMount
from support.processes import PATIENCE, has_ended, links_of, wait_until

from gpufs.daemon.keeper import PROGRAM, Keeper, MessageKind, new_memfd

# What the programs begin with that act as daemons. They append lines of JSON to the file that REPORT names.
PROLOGUE = """
import json, os, signal, socket, struct, subprocess, sys, time

HOLD, DROP, RESTART, GIVE_UP, HAND_OVER, END, SERVES, WHY, HELD, READY = 1, 2, 3, 4, 5, 6, 8, 9, 16, 17

def start(name):
    global keeper
    keeper, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    null = subprocess.DEVNULL
    return subprocess.Popen([PROGRAM, name], stdin=theirs, stdout=null, stderr=null, start_new_session=True).pid

def send(kind, numbers=(), descriptors=()):
    data = struct.pack(f"=II{len(numbers)}Q", kind, len(numbers), *numbers)
    socket.send_fds(keeper, [data], descriptors)

def memfd(text):
    fd = os.memfd_create("held")
    os.write(fd, text)
    return fd

def command(kind, body):
    words = [sys.executable, "-c", TEXT, body, ""]
    words = [word.encode() for word in words] + [n + b"=" + v for n, v in os.environb.items()]
    send(kind, [5], [memfd(b"".join(word + b"\\0" for word in words))])

def take_over():
    global keeper
    keeper, held = socket.socket(fileno=3), {}
    while True:
        data, descriptors, flags, _ = socket.recv_fds(keeper, 4096, 253)
        kind, count = struct.unpack_from("=II", data)
        numbers = struct.unpack_from(f"={count}Q", data, 8)
        if kind == READY:
            return held, numbers[0]
        assert kind == HELD and len(descriptors) == count and not flags & socket.MSG_CTRUNC
        held.update(zip(numbers, descriptors))

def report(**what):
    with open(os.environ["REPORT"], "a") as file:
        file.write(json.dumps(what) + "\\n")

def read(fd):
    return os.pread(fd, 100, 0).decode()

def die(how):
    if how == "exception":
        raise RuntimeError("planned")
    elif how == "exit":
        sys.exit(0)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(100)

"""
TEXT = f"import sys\nTEXT = sys.orig_argv[2]\nPROGRAM = {os.fspath(PROGRAM)!r}\n{PROLOGUE}\nexec(sys.argv[1])\n"

# Takes over, reports that, and ends the mount.
SUCCESSOR = "held, _ = take_over(); report(held={key: read(fd) for key, fd in held.items()}); send(END)"


class Daemons:
    """Programs that act as daemons, and what they have reported."""

    def __init__(self, folder: Path) -> None:
        self._report = folder / "report"
        self._report.touch()
        self.name = f"/mnt/{folder.name}"
        self._programs: list[subprocess.Popen[bytes]] = []

    def start(self, body: str) -> subprocess.Popen[bytes]:
        """Runs the body of a first daemon; it finds the name of its mount in NAME."""
        environment = {**os.environ, "REPORT": str(self._report), "NAME": self.name}
        words = [sys.executable, "-c", TEXT, body]
        program = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
        self._programs.append(program)
        return program

    def reports(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self._report.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def wait_for(self, count: int) -> list[dict[str, object]]:
        """The first ``count`` reports."""
        wait_until(lambda: len(self.reports()) >= count, 10, f"{count} reports")
        return self.reports()

    def keepers(self) -> list[int]:
        """The keepers of this mount, whoever their parents are."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[1:2] == [self.name.encode()] and not has_ended(int(process.name)):
                found.append(int(process.name))
        return found

    def keeper(self) -> int:
        wait_until(self.keepers, 5, "a keeper")  # one that is starting has no name yet
        (pid,) = self.keepers()
        return pid

    def wait_ended(self) -> None:
        wait_until(lambda: not self.keepers(), 10, "the end of the keeper")

    def close(self) -> None:
        for pid in self.keepers():
            os.kill(pid, signal.SIGKILL)
        for program in self._programs:
            program.kill()
            program.wait(PATIENCE)


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    made = Daemons(tmp_path)
    yield made
    made.close()


def memfds(pid: int) -> int:
    own = "/memfd:gpufs-keeper-state"
    return sum(link.startswith("/memfd:") and not link.startswith(own) for link in links_of(pid).values())


# ---- what comes back ----


@pytest.mark.parametrize("how", ["SIGKILL", "SIGABRT", "SIGSEGV", "exit", "exception"])
def test_descriptors_come_back_after_any_death(daemons: Daemons, how: str) -> None:
    daemons.start(
        f"start(os.environ['NAME']); command(RESTART, {SUCCESSOR!r})\n"
        "send(HOLD, [1, 1 << 32], [memfd(b'one'), memfd(b'large key')])\n"
        f"send(HOLD, [7], [memfd(b'seven')]); die({how!r})"
    )
    (report,) = daemons.wait_for(1)
    assert report == {"held": {"1": "one", str(1 << 32): "large key", "7": "seven"}}
    daemons.wait_ended()


def test_a_new_daemon_begins_as_the_first_one(daemons: Daemons) -> None:
    """Its own session, a blocked SIGTERM, no newly ignored signal, the environment, no descriptor but the socket."""
    successor = (
        "def link(number):\n"
        "    try: return [os.readlink(f'/proc/self/fd/{number}').split(':')[0]]\n"
        "    except FileNotFoundError: return []\n"
        "report(session=os.getsid(0) == os.getpid(), arguments=sys.argv[2:], variable=os.environ['VARIABLE'],\n"
        "    links=[one for number in range(20) for one in link(number)],\n"
        "    signals=[line for line in open('/proc/self/status') if line.startswith(('SigBlk', 'SigIgn'))])\n"
        "before = time.monotonic_ns(); held, died = take_over(); report(pause=before - died); send(END)"
    )
    daemons.start(
        "os.environ['VARIABLE'] = 'a value'; os.environ['EMPTY'] = ''\n"
        f"start(os.environ['NAME']); command(RESTART, {successor!r})\n"
        "send(HOLD, [1], [memfd(b'one')]); die('SIGKILL')"
    )
    first, second = daemons.wait_for(2)
    assert first["session"]
    assert first["arguments"] == [""]
    assert first["variable"] == "a value"
    assert first["links"] == ["/dev/null"] * 3 + ["socket"]
    by_python = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
    (inherited,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigIgn"))
    blocked, disregarded = (int(line.split()[1], 16) for line in first["signals"])  # type: ignore[attr-defined]
    assert blocked == sum(1 << number - 1 for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    assert disregarded & ~by_python & ~int(inherited.split()[1], 16) == 0
    assert 0 < int(str(second["pause"])) < PATIENCE * 1e9


def test_thousands_of_descriptors(daemons: Daemons) -> None:
    count = 5000
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert most == resource.RLIM_INFINITY or most > count + 100
    successor = (
        "began = time.monotonic(); held, _ = take_over(); seconds = time.monotonic() - began\n"
        "report(wrong=[key for key, fd in held.items() if read(fd) != str(key)], count=len(held), seconds=seconds)\n"
        "send(END)"
    )
    daemons.start(
        "import resource; _, most = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"
        f"start(os.environ['NAME']); command(RESTART, {successor!r})\n"
        f"for first in range(0, {count}, 200):\n"
        "    keys = range(first + 10, first + 210)  # some have a meaning\n"
        "    send(HOLD, keys, [memfd(str(key).encode()) for key in keys])\n"
        "die('SIGKILL')"
    )
    (report,) = daemons.wait_for(1)
    assert report["wrong"] == []
    assert report["count"] == count
    daemons.wait_ended()


def test_a_chain_of_daemons(daemons: Daemons) -> None:
    """A daemon that took over can hold more, and is followed in its turn. Handing over does not count as a death."""
    successor = (
        "held, _ = take_over(); generation = len(held)\n"
        "if generation == 6:\n"
        "    report(held=sorted(map(read, held.values()))); send(END); sys.exit()\n"
        "send(HOLD, [100 + generation], [memfd(str(generation).encode())]); send(HAND_OVER); die('exit')"
    )
    daemons.start(
        f"start(os.environ['NAME']); command(RESTART, {successor!r})\n"
        "send(HOLD, [1], [memfd(b'0')]); send(HAND_OVER); die('exit')"
    )
    (report,) = daemons.wait_for(1)
    assert report["held"] == ["0", "1", "2", "3", "4", "5"]
    daemons.wait_ended()


# ---- holding, dropping, ending ----


def test_hold_replaces_and_drop_closes(daemons: Daemons) -> None:
    with Keeper(daemons.name) as keeper:
        pid = daemons.keeper()

        def held(count: int) -> None:
            wait_until(lambda: memfds(pid) == count, 5, f"{count} descriptors in the keeper")

        fds = [new_memfd("held", b"") for _ in range(500)]
        keeper.hold(dict.fromkeys(range(3), fds[0]))
        held(3)
        keeper.hold({1: fds[1], 2: fds[2]})
        keeper.hold({3: fds[3]})
        held(4)
        keeper.drop([0, 1, 77])
        held(2)
        keeper.hold(dict(enumerate(fds)))
        held(500)
        keeper.drop(range(1, 500))
        held(1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
        keeper.drop([0])
        held(0)
    assert has_ended(pid)
    for fd in fds:
        os.close(fd)


def test_end_closes_everything(daemons: Daemons) -> None:
    """After END nothing runs, whatever was set, and the memory is gone with the daemon."""
    daemon = daemons.start(
        f"start(os.environ['NAME']); command(RESTART, {SUCCESSOR!r}); command(GIVE_UP, 'report(gave_up=1)')\n"
        "send(HOLD, [1], [memfd(b'one')]); send(END); die('SIGKILL')"
    )
    daemon.wait(PATIENCE)
    daemons.wait_ended()
    time.sleep(0.3)
    assert daemons.reports() == []


# ---- pauses, and giving up ----


def test_pauses_before_daemons_that_do_not_answer(daemons: Daemons) -> None:
    """They become longer, but never end; what the daemon says about its death can be read."""
    fails = "report(at=time.monotonic()); send(WHY, struct.unpack('=2Q', b'a broken thing\\0\\0')); die('SIGKILL')"
    daemons.start(
        f"start(os.environ['NAME']); command(RESTART, {'take_over(); ' + fails!r})\n"
        "send(SERVES); send(HOLD, [1], [os.eventfd(0)]); time.sleep(2.1); die('SIGKILL')"
    )
    times = [float(str(one["at"])) for one in daemons.wait_for(4)]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert 0.9 < pauses[0] < pauses[1] < pauses[2]
    wait_until(lambda: state_of(daemons.keeper()), 5, "the keeper's state")
    deaths, start, reason = state_of(daemons.keeper()).splitlines()
    assert int(deaths) == 4
    assert 4 < int(start) / 1e9 - time.monotonic() < 9
    assert reason == "a broken thing"
    os.kill(daemons.keeper(), signal.SIGTERM)
    daemons.wait_ended()


def test_daemons_that_have_answered_are_replaced_at_once(daemons: Daemons, tmp_path: Path) -> None:
    count = tmp_path / "count"
    successor = (
        "take_over(); report(at=time.monotonic()); send(SERVES)\n"
        f"open({str(count)!r}, 'a').write('x'); time.sleep(0.1)\n"
        f"send(END) if os.path.getsize({str(count)!r}) == 3 else die('SIGKILL')"
    )
    daemons.start(
        f"start(os.environ['NAME']); command(RESTART, {successor!r})\n"
        "send(SERVES); send(HOLD, [1], [os.eventfd(0)]); die('SIGKILL')"
    )
    times = [float(str(one["at"])) for one in daemons.wait_for(3)]
    assert times[2] - times[0] < 1.5
    daemons.wait_ended()


def test_without_a_program_that_takes_over_it_gives_up_at_once(daemons: Daemons) -> None:
    last = "report(gave_up=True, held=[n for n in os.listdir('/proc/self/fd') if int(n) > 3], arguments=sys.argv[2:])"
    daemons.start(
        f"start(os.environ['NAME']); command(GIVE_UP, {last!r})\n"
        "send(HOLD, [1, 2], [memfd(b'one'), memfd(b'two')]); die('SIGKILL')"
    )
    assert daemons.wait_for(1) == [{"gave_up": True, "held": [], "arguments": [""]}]
    daemons.wait_ended()


def test_a_program_that_cannot_be_started_counts_as_a_death(daemons: Daemons) -> None:
    daemons.start(
        "start(os.environ['NAME'])\n"
        "send(RESTART, [1], [memfd(b'/there/is/no/such/program\\0')]); send(HOLD, [1], [os.eventfd(0)])\n"
        "report(started=True); die('SIGKILL')"
    )
    daemons.wait_for(1)
    wait_until(lambda: state_of(daemons.keeper()).startswith("2\n"), 10, "the second death")
    os.kill(daemons.keeper(), signal.SIGTERM)
    daemons.wait_ended()


def test_sigusr1_tries_again(daemons: Daemons, tmp_path: Path) -> None:
    """In a pause the keeper holds everything and uses no processor."""
    fixed = tmp_path / "fixed"
    works = "held, _ = take_over(); report(held=read(held[2])); send(END)"
    successor = f"if not os.path.exists({str(fixed)!r}): report(failed=True); die('exit')\n{works}"
    daemons.start(
        f"start(os.environ['NAME']); command(RESTART, {successor!r})\n"
        "send(HOLD, [1, 2], [os.eventfd(0), memfd(b'one')]); die('SIGKILL')"  # 1: no requests
    )
    daemons.wait_for(3)
    pid = daemons.keeper()
    wait_until(lambda: not children_of_keeper(pid), 5, "the last daemon to be gone")
    time.sleep(0.2)
    before = used_time(pid)
    time.sleep(0.5)
    assert used_time(pid) == before
    assert memfds(pid) == 1
    os.kill(pid, signal.SIGUSR1)
    daemons.wait_for(4)
    wait_until(lambda: not children_of_keeper(pid), 5, "the last daemon to be gone")
    assert memfds(pid) == 1
    fixed.touch()
    os.kill(pid, signal.SIGUSR1)
    wait_until(lambda: daemons.reports()[-1] == {"held": "one"}, 10, "the daemon that works")
    daemons.wait_ended()


def test_sigterm_ends_it_where_no_daemon_runs(daemons: Daemons) -> None:
    """Nobody else could end the mount then; while a daemon runs, that does it."""
    successor = "report(started=True); time.sleep(0.5); die('SIGKILL')"
    daemons.start(
        f"start(os.environ['NAME']); command(RESTART, {successor!r})\nsend(HOLD, [1], [os.eventfd(0)]); die('SIGKILL')"
    )
    daemons.wait_for(1)
    pid = daemons.keeper()
    os.kill(pid, signal.SIGTERM)  # a daemon runs
    wait_until(lambda: not children_of_keeper(pid), 5, "the last daemon to be gone")
    os.kill(pid, signal.SIGTERM)
    daemons.wait_ended()


def state_of(pid: int) -> str:
    """What the keeper has for `gpufs status`; "" while it starts."""
    found = [fd for fd, link in links_of(pid).items() if link.startswith("/memfd:gpufs-keeper-state")]
    return Path(f"/proc/{pid}/fd/{found[0]}").read_text() if found else ""


def children_of_keeper(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


def used_time(pid: int) -> list[str]:
    """The processor time of a process, by the kernel and by itself."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]


def test_unmounting_ends_a_keeper_that_has_given_up(daemons: Daemons, tmp_path: Path) -> None:
    """A FIFO without a reader has the same sign as /dev/fuse after unmounting: POLLERR."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    daemons.start(
        "start(os.environ['NAME']); send(GIVE_UP)\n"
        f"send(HOLD, [1, 2], [os.open({str(fifo)!r}, os.O_WRONLY), memfd(b'two')]); report(held=True); die('SIGKILL')"
    )
    daemons.wait_for(1)
    pid = daemons.keeper()
    time.sleep(0.5)
    assert daemons.keepers() == [pid]
    os.close(reader)
    daemons.wait_ended()


def test_a_keeper_that_was_to_replace_another_one_ends(daemons: Daemons) -> None:
    """The daemon died before it had sent what to start: the former keeper starts it, and answers the requests."""
    daemons.start("start(os.environ['NAME']); send(HOLD, [1], [os.eventfd(0)]); report(held=True); die('SIGKILL')")
    daemons.wait_for(1)
    daemons.wait_ended()


def test_an_unmounted_mount_is_not_taken_over(daemons: Daemons) -> None:
    daemons.start(
        f"start(os.environ['NAME']); command(RESTART, {SUCCESSOR!r}); reader, writer = os.pipe()\n"
        "send(HOLD, [1], [writer]); die('SIGKILL')"
    )
    daemons.wait_ended()
    assert daemons.reports() == []


# ---- daemons and keepers that live, stall and die at odd moments ----


def test_a_stalled_daemon_is_not_replaced(daemons: Daemons) -> None:
    daemon = daemons.start(
        f"start(os.environ['NAME']); command(RESTART, {SUCCESSOR!r}); send(HOLD, [1], [memfd(b'one')])\n"
        "report(ready=True); keeper.close(); time.sleep(1000)"  # even without its socket
    )
    daemons.wait_for(1)
    daemon.send_signal(signal.SIGSTOP)
    time.sleep(1)
    os.kill(daemons.keeper(), signal.SIGUSR1)
    time.sleep(0.5)
    assert len(daemons.reports()) == 1
    daemon.kill()
    assert daemons.wait_for(2)[1] == {"held": {"1": "one"}}
    daemons.wait_ended()


def test_a_daemon_that_waits_for_its_successor_is_replaced(daemons: Daemons) -> None:
    """As one that was killed while a thread of it reads its own mount: only the next daemon can end that wait."""
    daemon = daemons.start(
        "import ctypes, threading; libc = ctypes.CDLL(None)\n"
        "def wait():\n"
        "    libc.unshare(0x400); os.closerange(3, 100); ready.set(); time.sleep(1000)\n"
        f"start(os.environ['NAME']); command(RESTART, {SUCCESSOR!r}); send(HOLD, [1], [memfd(b'one')])\n"
        "ready = threading.Event(); threading.Thread(target=wait).start(); ready.wait()\n"
        "libc.syscall(60, 0)"  # ends this thread alone
    )
    assert daemons.wait_for(1) == [{"held": {"1": "one"}}]
    assert daemon.poll() is None
    daemons.wait_ended()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("waits", ["main thread", "other thread"])
def test_a_daemon_that_cannot_end_is_replaced(daemons: Daemons, waits: str) -> None:
    """A thread of it waits in the kernel, and shares its descriptors; one that is alive and waits is not replaced."""
    last = "wait()" if waits == "main thread" else "threading.Thread(target=wait).start(); time.sleep(1000)"
    with HangingMount(operations=["fsync"]) as hanging:
        daemon = daemons.start(
            "import threading\n"
            f"def wait(): os.fsync(os.open({str(hanging.file)!r}, os.O_RDONLY))\n"
            f"start(os.environ['NAME']); command(RESTART, {SUCCESSOR!r}); send(HOLD, [1], [memfd(b'one')])\n{last}"
        )
        wait_until(hanging.hanging, PATIENCE, "the thread to wait")
        time.sleep(2)
        assert daemons.reports() == []
        daemon.kill()
        assert daemons.wait_for(1) == [{"held": {"1": "one"}}]
        assert daemon.poll() is None
    daemons.wait_ended()


def test_a_daemon_that_dies_at_once_leaves_no_keeper(daemons: Daemons) -> None:
    for _ in range(10):
        daemons.start("start(os.environ['NAME']); die('SIGKILL')").wait(PATIENCE)
    daemons.wait_ended()


@pytest.mark.parametrize("data", ["b'short'", "struct.pack('=IIQ', HOLD, 1, 1)", "struct.pack('=II', HOLD, 9999)"])
def test_a_malformed_message_ends_the_keeper(daemons: Daemons, data: str) -> None:
    """The daemon starts another one then."""
    daemons.start(f"start(os.environ['NAME']); keeper.send({data}); report(end=keeper.recv(9).decode())")
    assert daemons.wait_for(1) == [{"end": ""}]
    daemons.wait_ended()


def test_messages_of_newer_daemons_are_skipped(daemons: Daemons) -> None:
    daemons.start(
        f"start(os.environ['NAME']); command(RESTART, {SUCCESSOR!r})\n"
        "send(99, [1, 2], [memfd(b'new'), memfd(b'new')]); send(HOLD, [1], [memfd(b'one')]); die('SIGKILL')"
    )
    assert daemons.wait_for(1) == [{"held": {"1": "one"}}]
    daemons.wait_ended()


def wait_for_another(daemons: Daemons, keeper: Keeper, former: int) -> int:
    """The keeper that has taken the place of the former one, and has everything."""
    wait_until(lambda: keeper.obstacle() is None and daemons.keepers() not in ([], [former]), 10, "another keeper")
    assert has_ended(former)
    return daemons.keeper()


def test_a_keeper_that_dies_is_replaced(daemons: Daemons) -> None:
    """The next one gets everything: descriptors, and the programs to start."""
    memfd, other = new_memfd("held", b"one"), new_memfd("held", b"two")
    with Keeper(daemons.name) as keeper:
        keeper.hold({1: memfd, 2: memfd, 3: other})
        keeper.instruct(MessageKind.GIVE_UP, ["/bin/false"])
        pid = daemons.keeper()
        for _ in range(3):
            keeper.drop([2])
            os.kill(pid, signal.SIGKILL)
            pid = wait_for_another(daemons, keeper, pid)
            assert memfds(pid) == 2
        os.kill(pid, signal.SIGKILL)
        keeper.hold({4: other})
        assert memfds(wait_for_another(daemons, keeper, pid)) == 3
    os.close(memfd)
    os.close(other)


def test_a_stalled_keeper_is_replaced(daemons: Daemons) -> None:
    """After five seconds in which it reads nothing; what is held and dropped in that time is right in the next one."""
    fds = [new_memfd("held", b"") for _ in range(300)]
    with Keeper(daemons.name) as keeper:
        pid = daemons.keeper()
        os.kill(pid, signal.SIGSTOP)
        for key, fd in enumerate(fds, 100):
            keeper.hold({key: fd})
            keeper.drop([key - 100])
        assert memfds(wait_for_another(daemons, keeper, pid)) == 100
    for fd in fds:
        os.close(fd)


def test_a_failure_to_send_lasts_as_long_as_its_cause(daemons: Daemons) -> None:
    memfd = new_memfd("held", b"one")
    with Keeper(daemons.name) as keeper:
        pid = daemons.keeper()
        keeper.hold({1: memfd, 2: 1 << 30})  # which cannot be sent
        assert "Bad file descriptor" in str(keeper.obstacle())
        keeper.hold({3: memfd})
        time.sleep(0.5)
        assert keeper.obstacle() is not None
        keeper.drop([2])
        assert memfds(wait_for_another(daemons, keeper, pid)) == 2
    os.close(memfd)


def test_without_a_descriptor_the_former_keeper_stays(daemons: Daemons) -> None:
    """It still holds what it got, until another one can be started."""
    memfd = new_memfd("held", b"one")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Keeper(daemons.name) as keeper:
        pid = daemons.keeper()
        keeper.hold({1: memfd})
        resource.setrlimit(resource.RLIMIT_NOFILE, (memfd + 1, before[1]))
        try:
            keeper.hold({2: 1 << 30})
            keeper.drop([2])
            time.sleep(0.5)
            obstacle = keeper.obstacle()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert "Too many open files" in str(obstacle)
        assert memfds(pid) == 1
        assert memfds(wait_for_another(daemons, keeper, pid)) == 1
    os.close(memfd)


def test_what_a_new_keeper_got_comes_back(daemons: Daemons) -> None:
    """The daemon's own side of it: its keeper dies, then itself, and another daemon takes over."""
    body = (
        "from gpufs.daemon import keeper as side\n"
        "kept = side.Keeper(os.environ['NAME']); fds = {key: memfd(str(key).encode()) for key in range(10, 500)}\n"
        f"kept.hold(fds); kept.instruct(side.MessageKind.RESTART, [sys.executable, '-c', TEXT, {SUCCESSOR!r}])\n"
        "report(ready=True); time.sleep(1000)"
    )
    daemon = daemons.start(body)
    daemons.wait_for(1)
    former = daemons.keeper()
    os.kill(former, signal.SIGKILL)
    wait_until(lambda: daemons.keepers() not in ([], [former]), 10, "another keeper")
    time.sleep(0.5)  # the programs come after the descriptors
    daemon.kill()
    report = daemons.wait_for(2)[1]
    assert report["held"] == {str(key): str(key) for key in range(10, 500)}
    daemons.wait_ended()


def test_a_daemon_that_took_over_replaces_its_keeper(daemons: Daemons) -> None:
    successor = (
        "from gpufs.daemon import keeper as side\n"
        "held, _, died = side.receive_held(3); kept = side.Keeper(os.environ['NAME'], held, 3); first = os.getppid()\n"
        "os.kill(first, 9); deadline = time.monotonic() + 10\n"
        "while os.getppid() == first or kept.obstacle():\n"
        "    assert time.monotonic() < deadline; time.sleep(0.01)\n"
        "report(held={key: read(fd) for key, fd in held.items()}); kept.end(); report(end=True)"
    )
    daemons.start(
        f"start(os.environ['NAME']); command(RESTART, {successor!r})\n"
        "send(HOLD, [1, 2], [memfd(b'one'), memfd(b'two')]); die('SIGKILL')"
    )
    first, _ = daemons.wait_for(2)
    assert first == {"held": {"1": "one", "2": "two"}}
    daemons.wait_ended()


def test_a_real_daemon_says_why_it_cannot_take_over(daemons: Daemons) -> None:
    """The keeper does not hold what a takeover needs: each attempt fails, and what is held stays."""
    daemons.start(
        "from gpufs.daemon import keeper as side; from gpufs.daemon.startup import DAEMON\n"
        "kept = side.Keeper(os.environ['NAME']); kept.hold({1: memfd(b'no connection')})\n"
        "kept.instruct(side.MessageKind.RESTART, [*DAEMON, '--takeover-fd', '3', os.environ['NAME']])\n"
        "report(started=True); die('SIGKILL')"
    )
    daemons.wait_for(1)
    wait_until(lambda: "does not hold journal" in state_of(daemons.keeper()), 30, "the reason")
    assert memfds(daemons.keeper()) == 1
    os.kill(daemons.keeper(), signal.SIGTERM)
    daemons.wait_ended()


def test_a_keeper_started_by_hand_explains_itself() -> None:
    done = subprocess.run([PROGRAM], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "usage: gpufs-keeper MOUNTPOINT" in done.stderr
