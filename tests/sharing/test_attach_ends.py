"""How attachments end: with the interpreter, while the daemon is stalled, and by interruptions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from errno import EBUSY
from pathlib import Path

import pytest
from support.attaching import leases, program, wait_for_leases
from support.data import MIB, noise
from support.mounting import REPOSITORY, Mounter
from support.processes import errno_of

import gpufs

# Memory of an AMD GPU that is one allocation cannot be shared.
OPTIONS = {"hip": ["--hip-memory", "virtual"]}

# Programs whose memory is attached when they end. Reading and hashing it needs no other module.
ENDS = {
    "a daemon thread uses it": """
import gpufs, hashlib, sys, threading
array = gpufs.attach(sys.argv[1])
began = threading.Event()
def work():
    while True:
        hashlib.sha256(memory_of(array))
        began.set()
threading.Thread(target=work, daemon=True).start()
began.wait()
""",
    "a finalizer uses it": """
import gpufs, sys
class Reader:
    def __init__(self):
        self.array = gpufs.attach(sys.argv[1])
        self.memory = memory_of(self.array)
    def __del__(self):
        print(bytes(self.memory[:5]))
reader = Reader()
""",
    "the first exit handler uses it": """
import atexit, sys
def use():
    print(bytes(memory[:5]))
    array.refresh()
    array.close()
    print(bytes(memory[-5:]))
atexit.register(use)
import gpufs
array = gpufs.attach(sys.argv[1])
memory = memory_of(array)
""",
}
MEMORY_OF = """
import ctypes
def memory_of(array):
    memory = (ctypes.c_ubyte * array.nbytes).from_address(array.address)
    memory.owner = array.view()
    return memoryview(memory)
"""


@pytest.mark.driver
@pytest.mark.parametrize("form", ENDS)
def test_memory_stays_until_the_process_has_ended(mount: Mounter, driver: str, form: str) -> None:
    if driver != "host" and "FAKE_KERNEL_ROOT" not in os.environ:
        pytest.skip("reads attached memory with the CPU; tests/gpu does it with torch")
    mounted = mount(*OPTIONS.get(driver, []), memory=256 * MIB)
    path = mounted.device / "file"
    path.write_bytes(noise(16 * MIB))
    words = [sys.executable, "-c", MEMORY_OF + ENDS[form], str(path)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    wait_for_leases(mounted, 0)


@pytest.mark.driver
@pytest.mark.complains  # about the refusal
def test_leases_end_that_were_detached_while_the_daemon_was_stalled(mount: Mounter, driver: str) -> None:
    """More than the daemon takes at once, whether the program goes on to use the connection or not."""
    mounted = mount(*OPTIONS.get(driver, []), memory=256 * MIB)
    path = mounted.device / "file"
    path.write_bytes(noise(5 * MIB))
    arrays = [gpufs.attach(path) for _ in range(60)]
    kept = gpufs.attach(path)
    mounted.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        while arrays:
            arrays.pop().close()
        assert time.monotonic() - began < 60  # not two seconds for each
    finally:
        mounted.signal(signal.SIGCONT)
    wait_for_leases(mounted, 1)
    assert errno_of(os.truncate, path, 0) == EBUSY
    with gpufs.attach(path, "r+") as other:
        assert other.nbytes == 5 * MIB
    wait_for_leases(mounted, 1)
    kept.close()
    os.truncate(path, 0)
    assert leases(mounted) == []


# Attaches argv[1], and then stops the daemon argv[2] each time it has sent a request, so that the request is
# interrupted. Prints what it sees.
INTERRUPTED = """
import gpufs, os, signal, sys
path, daemon = sys.argv[1], int(sys.argv[2])
kept = gpufs.attach(path, "r+")
stopping = False
class Interrupted(Exception):
    pass
def interrupt(*_):
    raise Interrupted
def stop(event, arguments):
    global stopping
    if event == "socket.sendmsg" and stopping:
        stopping = False
        os.kill(daemon, signal.SIGSTOP)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
signal.signal(signal.SIGALRM, interrupt)
sys.addaudithook(stop)
def held():
    return len(os.listdir("/proc/self/fd"))
def interrupted(call):
    global stopping
    stopping = True
    try:
        call()
    except Interrupted:
        return True
    finally:
        os.kill(daemon, signal.SIGCONT)
    return False
kept.refresh()
before = held()
for _ in range(3):
    assert interrupted(lambda: gpufs.attach(path))
    assert interrupted(kept.refresh)
    kept.refresh()
    with gpufs.attach(path) as array:
        assert array.nbytes == kept.nbytes
assert held() == before, (held(), before)
print(kept.nbytes, flush=True)
sys.stdin.read()
"""


@pytest.mark.driver
def test_interrupted_requests_leave_no_lease_and_no_descriptor(mount: Mounter, driver: str) -> None:
    mounted = mount(*OPTIONS.get(driver, []), memory=256 * MIB)
    path: Path = mounted.device / "file"
    path.write_bytes(noise(90 * MIB))  # with GPUs several descriptors
    with program(INTERRUPTED, path, mounted.pid) as interrupted:
        wait_for_leases(mounted, 1)
        assert interrupted.poll() is None
    wait_for_leases(mounted, 0)


@pytest.mark.driver
def test_a_program_without_free_descriptors_keeps_its_leases(mount: Mounter, driver: str) -> None:
    """Descriptors that it cannot take are its own failure, and not the end of the connection."""
    mounted = mount(*OPTIONS.get(driver, []), memory=256 * MIB)
    path = mounted.device / "file"
    path.write_bytes(noise(90 * MIB))
    script = """
import errno, gpufs, os, resource, sys
kept = gpufs.attach(sys.argv[1])
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
def take_all(event, arguments):
    if event == "socket.sendmsg" and not taken:
        try:
            while True:
                taken.append(os.dup(0))
        except OSError:
            pass
taken = []
resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
sys.addaudithook(take_all)
try:
    gpufs.attach(sys.argv[1])
    raise SystemExit("attached")
except OSError as error:
    assert error.errno == errno.EMFILE, error
for fd in taken:
    os.close(fd)
gpufs.attach(sys.argv[1]).close()
kept.refresh()
print("ready", flush=True)
sys.stdin.readline()
del kept
print("detached", flush=True)
sys.stdin.read()
"""
    with program(script, path) as running:
        wait_for_leases(mounted, 1)
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write("\n")
        running.stdin.flush()
        assert running.stdout.readline() == "detached\n"
        wait_for_leases(mounted, 0)
