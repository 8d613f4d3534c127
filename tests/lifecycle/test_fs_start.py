"""A failure at any step of a daemon's start is reported and leaves nothing behind; a signal ends it cleanly."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufs import mounting

SECONDS = 120

# Runs the daemon with one step replaced: {patch} is a statement that knows all the names below.
PROGRAM = """
import errno, os, signal, sys
from gpufs import engine, mounting, service
from gpufs.daemon import __main__ as daemon, control_plane, environment, keeper, takeover
from gpufs.fs.connection import RequestLoop

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
    assert not set(Path("/run/gpufs").glob(f"{process.pid}-*")) - before, "its counters are left"
    return process.returncode, [json.loads(line) for line in said.splitlines()], complaints


STEPS = {
    "engine": "engine.Engine = fail",
    "mount": "mounting.mount = fail",
    "data plane": "engine.Mount = crash",
    "main loop": "RequestLoop.serve = crash_later",
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


@pytest.mark.parametrize("step", ["mounting.mount", "engine.Mount.start"])
def test_a_signal_during_the_start_unmounts(mountpoint: str, step: str) -> None:
    code, answers, said = start(mountpoint, f"{step} = signalled({step})")
    assert code == 0, (said, answers)
    assert mounting.entry_of(mountpoint) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts as root")
@pytest.mark.parametrize("exchanged", ["the mountpoint", "a directory above it", "a directory above it, later"])
def test_a_path_exchanged_for_a_link_does_not_redirect_the_mount(tmp_path: Path, exchanged: str) -> None:
    """The owner of the directory exchanges it while root mounts, after the path was checked."""
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
        left = [entry.mountpoint for entry in mounting.listed() if entry.mountpoint.startswith(str(tmp_path))]
        for path in left:
            mounting.unmount(path, lazy=True)
    assert not left
