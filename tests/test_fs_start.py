"""A failure at any step of a daemon's start is reported and leaves nothing behind; a signal ends it cleanly."""

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpufs import mounting

SECONDS = 120

# Runs the daemon with one step replaced: {patch} is a statement that knows all the names below.
PROGRAM = """
import errno, os, signal, sys
import pyfuse3, trio
from gpufs import engine, mounting, service
from gpufs.daemon import main as daemon, supervision

def fail(*arguments, **named):
    raise OSError(errno.ENOMEM, "planned failure")

def crash(*arguments, **named):
    raise RuntimeError("planned failure")

async def crash_later(*arguments, **named):
    raise RuntimeError("planned failure")

def signalled(function):
    def wrapped(*arguments, **named):
        result = function(*arguments, **named)
        os.kill(os.getpid(), signal.SIGTERM)
        return result
    return wrapped

{patch}
sys.exit(daemon.main(["--answer-fd", sys.argv[2], sys.argv[1]]))
"""


@pytest.fixture
def mountpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gpufs-tests-start-", dir="/tmp") as directory:
        yield directory
        if mounting.entry_of(directory) is not None:
            mounting.unmount(directory, lazy=True)


def start(mountpoint: str, patch: str) -> tuple[int, list[dict[str, object]], str]:
    """The exit code, the answers and the standard error of a daemon that is expected to end by itself."""
    answers, answers_end = os.pipe()
    before = set(Path("/run/gpufs").glob("*"))  # what an earlier process of the same number has left is not its own
    request = {
        "mountpoint": mountpoint,
        "source": "gpufs",
        "config": {"driver": "host", "devices": 1, "memory": 64 << 20},
    }
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(patch=patch), mountpoint, str(answers_end)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=(answers_end,),
        text=True,
        start_new_session=True,
    )
    os.close(answers_end)
    with process, open(answers) as file:
        try:
            _, complaints = process.communicate(json.dumps(request), timeout=SECONDS)
        finally:
            process.kill()
        said = file.read()
    assert not set(Path("/run/gpufs").glob(f"{process.pid}-*")) - before, "its socket is left"
    return process.returncode, [json.loads(line) for line in said.splitlines()], complaints


STEPS = {
    "engine": "engine.Engine = fail",
    "io": "engine.io_configure = fail",
    "relay": "engine.relay_pair = crash",
    "mount": "mounting.mount = fail",
    "mountinfo": "mounting.listed = lambda: iter(())",
    "mountinfo that cannot be read": (
        "old = mounting.mount\n"
        "def mount(*arguments, **named):\n"
        "    mounting.listed = fail\n"
        "    return old(*arguments, **named)\n"
        "mounting.mount = mount"
    ),
    "data plane": "engine.Mount = crash",
    "tree": "daemon.Tree = crash",
    "operations": "daemon.Operations = fail",
    "pyfuse3": "pyfuse3.init = crash",
    "threads": "engine.Mount.start = fail",
    "main loop": "pyfuse3.main = crash_later",
}


@pytest.mark.parametrize("step", STEPS)
def test_a_failure_at_any_step_leaves_nothing(mountpoint: str, step: str) -> None:
    code, answers, said = start(mountpoint, STEPS[step])
    assert code == 1, said
    # The main loop may fail after the mount has answered; until then there is one answer, with the reason.
    assert len(answers) == 1 or step == "main loop"
    if answers and not answers[0].get("ok"):
        assert answers[0]["error"]
        assert "\n" not in str(answers[0]["message"])
    assert mounting.entry_of(mountpoint) is None


@pytest.mark.parametrize(
    "step", ["mounting.mount", "daemon.Tree", "daemon.Operations", "pyfuse3.init", "engine.Mount.start"]
)
def test_a_signal_during_the_start_unmounts(mountpoint: str, step: str) -> None:
    code, answers, said = start(mountpoint, f"{step} = signalled({step})")
    assert code == 0, (said, answers)
    assert mounting.entry_of(mountpoint) is None


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGHUP"])
@pytest.mark.parametrize("step", ["mounting.unmount", "pyfuse3.close"])
def test_more_signals_at_any_step_of_the_end_do_no_harm(mountpoint: str, step: str, number: str) -> None:
    """Further signals do not disturb a clean end."""
    patch = (
        f"old, old_exit = {step}, supervision.Guard.__exit__\n"
        "def more():\n"
        "    for _ in range(3):\n"
        f"        os.kill(os.getpid(), signal.{number})\n"
        "def wrapped(*arguments, **named):\n"
        "    done = old(*arguments, **named)\n"
        "    more()\n"
        "    return done\n"
        "def leave(*arguments):\n"
        "    more()\n"
        "    return old_exit(*arguments)\n"
        "supervision.Guard.__exit__ = leave\n"
        "old_give = daemon.Answer.give\n"
        "def give(self, fields):\n"
        "    given = old_give(self, fields)\n"
        f"    {step} = wrapped\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return given\n"
        "daemon.Answer.give = give"
    )
    code, answers, said = start(mountpoint, patch)
    assert code == 0, said
    assert answers[0]["ok"] is True
    assert mounting.entry_of(mountpoint) is None


def test_a_mount_that_does_not_answer_is_a_failure(mountpoint: str) -> None:
    patch = (
        "old_stat = os.stat\n"
        "def stat(path, *arguments, **named):\n"
        "    if path == os.path.join(sys.argv[1], 'gpu0'):\n"
        "        raise OSError(errno.EIO, os.strerror(errno.EIO), path)\n"
        "    return old_stat(path, *arguments, **named)\n"
        "os.stat = stat"
    )
    code, answers, said = start(mountpoint, patch)
    assert code == 1, said
    assert answers[0]["error"] == errno.EIO
    assert str(answers[0]["message"]).startswith(f"{mountpoint}: mounted, but does not answer: ")
    assert mounting.entry_of(mountpoint) is None


def test_of_two_for_one_place_the_second_is_refused(mountpoint: str, tmp_path: Path) -> None:
    """Both check the mountpoint before either has mounted."""
    wait = (
        "import fcntl, time\n"
        "from pathlib import Path\n"
        "def wait_for(name):\n"
        f"    while not Path({str(tmp_path)!r}, name).exists():\n"
        "        time.sleep(0.01)\n"
        f"def tell(name):\n    Path({str(tmp_path)!r}, name).touch()\n"
    )
    first = wait + (
        "old_mount, old_give = mounting.mount, daemon.Answer.give\n"
        "def mount(*arguments, **named):\n"
        "    tell('mounting')\n"
        "    wait_for('waiting')\n"
        "    return old_mount(*arguments, **named)\n"
        "def give(self, fields):\n"
        "    given = old_give(self, fields)\n"
        "    wait_for('refused')\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return given\n"
        "mounting.mount, daemon.Answer.give = mount, give"
    )
    second = wait + (
        "wait_for('mounting')\n"
        "old_flock = fcntl.flock\n"
        "def flock(*arguments):\n"
        "    tell('waiting')\n"
        "    return old_flock(*arguments)\n"
        "fcntl.flock = flock\n"
        "daemon._LOCK_PATIENCE = 60"
    )
    with ThreadPoolExecutor(1) as executor:
        started = executor.submit(start, mountpoint, first)
        try:
            code, answers, said = start(mountpoint, second)
        finally:
            (tmp_path / "refused").touch()
        assert code == 1, said
        assert answers == [{"error": errno.EBUSY, "message": f"{mountpoint}: gpufs is mounted there already"}]
        code, answers, said = started.result()
    assert code == 0, said
    assert answers[0]["ok"] is True


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts as root")
@pytest.mark.parametrize("exchanged", ["the mountpoint", "a directory above it", "a directory above it, later"])
def test_a_path_exchanged_for_a_link_does_not_redirect_the_mount(tmp_path: Path, exchanged: str) -> None:
    """Its owner does that while root mounts, after the path was checked."""
    mountpoint, elsewhere = tmp_path / "owned/mnt", tmp_path / "private"
    mountpoint.mkdir(parents=True)
    (elsewhere / "mnt").mkdir(parents=True)
    place, target = (mountpoint, elsewhere) if exchanged == "the mountpoint" else (mountpoint.parent, elsewhere)
    # "later": once the daemon has a descriptor of the directory.
    moment = "os.readlink" if "later" in exchanged else "os.open"
    patch = (
        f"old = {moment}\n"
        "def wrapped(path, *arguments, **named):\n"
        "    done = old(path, *arguments, **named)\n"
        f"    if str(path) == '/dev/fuse' or str(done) == {str(mountpoint)!r}:\n"
        f"        {moment} = old\n"
        f"        os.rename({str(place)!r}, {str(tmp_path / 'old')!r})\n"
        f"        os.symlink({str(target)!r}, {str(place)!r})\n"
        "    return done\n"
        f"{moment} = wrapped"
    )
    try:
        code, answers, said = start(str(mountpoint), patch)
        assert place.is_symlink()
        assert code == 1, said
        assert answers[0]["error"]
        assert str(answers[0]["message"]).startswith(f"{mountpoint}: mount failed: ")
        assert "\n" not in str(answers[0]["message"])
    finally:
        left = [path for path in mounting.mountpoints() if path.startswith(str(tmp_path))]
        for path in left:
            mounting.unmount(path, lazy=True)
    assert not left


def test_a_copy_service_that_fails_costs_no_mount(mountpoint: str) -> None:
    patch = (
        "service.serve = fail\n"
        "old = daemon.Answer.give\n"
        "def give(self, fields):\n"
        "    given = old(self, fields)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return given\n"
        "daemon.Answer.give = give"
    )
    code, answers, said = start(mountpoint, patch)
    assert code == 0, said
    assert answers[0]["ok"] is True
    assert mounting.entry_of(mountpoint) is None
