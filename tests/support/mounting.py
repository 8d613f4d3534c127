"""Real mounts for tests: a daemon in a process group of its own that never outlives its test."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from errno import EACCES
from pathlib import Path
from types import TracebackType
from typing import Any

from gpufs.mounting import mounts
from support import watchdog
from support.data import GIB, MIB, remove_tree
from support.processes import NOBODY, PATIENCE, PATIENT, SESSION_VARIABLE, stop_process, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
PREFIX = "gpufs-tests-"
GPUFS = (str(Path(sys.executable).with_name("gpufs")),)


def default_memory() -> int:
    """Bytes for each of two simulated devices: room for the large files, and no more than the machine can spare."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    spare = int(fields["MemAvailable"].split()[0]) * 1024
    return max(256 * MIB, min(3 * GIB, spare // 4) // (2 * MIB) * 2 * MIB)


class Session:
    """One run of pytest: its watchdog process, its scratch directory and its name."""

    def __init__(self) -> None:
        self.name = f"{os.getpid()}-{int(time.time())}"
        self.scratch = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{self.name}-", dir="/tmp"))
        self.scratch.chmod(0o755)
        self.report = self.scratch / "watchdog.log"
        self.report.touch()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.watchdog", str(self.report), self.name],
            cwd=REPOSITORY / "tests",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.environ[SESSION_VARIABLE] = self.name
        # The repository must be importable wherever a test's daemon is started from, also as another user.
        os.environ["PYTHONPATH"] = str(REPOSITORY)
        os.environ.update(PATIENT)

    def tell(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> str:
        """Ends the watchdog, which removes what is left. Returns its report, empty if nothing went wrong."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        text = self.report.read_text()
        if not text:
            shutil.rmtree(self.scratch, ignore_errors=True)
        return text


class GpufsMount:
    """A mounted gpufs with its daemon in the foreground of a process group of its own; also a context manager.

    options: more words for `gpufs mount`. user: mounts as nobody with this command and environment, see
    support.cli.user_gpufs.
    """

    def __init__(
        self,
        session: Session,
        *options: str,
        driver: str = "host",
        devices: int = 1,
        memory: int | None = None,
        allow_other: bool = False,
        user: tuple[Sequence[str], Mapping[str, str]] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.session = session
        self.path = Path(tempfile.mkdtemp(prefix="mnt-", dir=session.scratch))
        self.log = self.path.with_name(self.path.name + ".log")
        self.output = self.path.with_name(self.path.name + ".out")
        self.user = user
        self._checked_log = 0
        self._device_number = ""
        words = ["--driver", driver, "--foreground", "--log-file", str(self.log), "--log-level", "info"]
        if driver == "host":
            words += ["--devices", str(devices), "--memory", str(256 * MIB if memory is None else memory)]
        elif memory is not None:
            words += ["--memory", str(memory)]
        if allow_other:
            words.append("--allow-other")
        program, base = user or (GPUFS, os.environ)
        self.command: Sequence[str] = [*program, "mount", str(self.path), *words, *options]
        self.environment = {"PYTHONPATH": str(REPOSITORY), **base, **(environment or {})}
        self.environment |= {SESSION_VARIABLE: session.name, "GPUFS_CONFIG": "/dev/null"}
        if user is not None:
            self.log.touch()
            for path in (self.path, self.log):
                os.chown(path, NOBODY, NOBODY)
        self.daemon = self._start()

    @property
    def device(self) -> Path:
        """The directory of the first device."""
        return self.path / "gpu0"

    @property
    def pid(self) -> int:
        return self.daemon.pid

    def _start(self) -> subprocess.Popen[bytes]:
        identity: dict[str, Any] = {} if self.user is None else {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        with open(self.output, "wb") as output:
            daemon = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=self.environment,
                cwd="/",
                **identity,
            )
        self.session.tell(do="mount", path=str(self.path), group=daemon.pid)
        self.daemon = daemon
        try:
            wait_until(lambda: self.mounted() or daemon.poll() is not None, 60, f"mount at {self.path}")
            if daemon.poll() is not None:
                raise AssertionError(f"the daemon ended with {daemon.returncode} instead of mounting")
            (entry,) = (entry for entry in mounts() if entry.mountpoint == str(self.path))
            self._device_number = entry.device
            if self.user is None:
                wait_until(lambda: (self.path / ".gpufs" / "version").read_text(), 30, "the mount to answer")
        except BaseException as error:
            error.add_note(self.words())
            self.rescue()
            raise
        return daemon

    def mounted(self) -> bool:
        return bool(watchdog.mounted_at(str(self.path)))

    def alive(self) -> bool:
        """Mounted, its daemon runs, and its connection has not been cut."""
        if self.daemon.poll() is not None or not self.mounted():
            return False
        try:
            os.statvfs(self.path)
        except OSError as error:
            return error.errno == EACCES  # a plain user's mount, not open to us
        return True

    def words(self) -> str:
        """The last words of the daemon, for the message of a failure."""
        texts = []
        for path in (self.output, self.log):
            if path.exists() and path.stat().st_size:
                texts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}")
        return "\n".join(texts) or "--- the daemon wrote nothing"

    def status(self) -> dict[str, Any]:
        """What the mount reports about itself."""
        found: dict[str, Any] = json.loads((self.path / ".gpufs" / "status").read_text())
        return found

    def stats(self) -> dict[str, Any]:
        """The mount's counters and gauges."""
        found: dict[str, Any] = json.loads((self.path / ".gpufs" / "stats").read_text())
        return found

    def gauge(self, name: str) -> int:
        """One of the mount's gauges."""
        return int(self.stats()["gauges"][name])

    def count(self, name: str) -> int:
        """One of the mount's counters."""
        return int(self.stats()["counters"][name])

    def moved(self, flow: str, device: int = 0) -> dict[str, Any]:
        """What each backend of a device has counted in a direction, and more about its transfers."""
        found = self.stats()["devices"][device]
        return {**{name: flows[flow] for name, flows in found["backends"].items()}, **found["transfers"][flow]}

    def wait_for_log(self, text: str) -> None:
        """Waits until the log has this text."""
        wait_until(
            lambda: self.log.exists() and text in self.log.read_text(errors="replace"), 5, f"{text!r} in the log"
        )

    def complaints(self, *, wait: bool = True) -> list[str]:
        """The log's warnings and errors, whole, since this was last asked. What was logged just now may still come.

        wait: for that also where nothing has been logged since.
        """
        if not self.log.exists():
            return []
        size = -1 if wait else self._checked_log
        while size != (size := self.log.stat().st_size):  # the daemon writes its log behind what it does
            time.sleep(0.05)
        with open(self.log, errors="replace") as log:
            log.seek(self._checked_log)
            text = log.read()
            self._checked_log = log.tell()
        entries = (entry.rstrip("\n") for entry in re.split(r"^(?=\d{4}-\d\d-\d\d )", text, flags=re.MULTILINE))
        return [x for x in entries if any(y in x for y in ("WARNING", "ERROR", "CRITICAL", "Traceback"))]

    def unmount(self, seconds: float = 30) -> None:
        """The system's own umount, then waits for the daemon's clean end."""
        command = ["umount", str(self.path)]
        identity: dict[str, Any] = {}
        if self.user is not None:
            command = ["fusermount3", "-u", str(self.path)]
            identity = {"user": NOBODY, "group": NOBODY, "extra_groups": []}

        def tried() -> subprocess.CompletedProcess[str] | None:
            """None while somebody has it open: whoever lists all mounts of this machine does, for a moment."""
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, **identity)
            return None if "busy" in done.stderr else done

        done = wait_until(tried, 0, f"nobody uses {self.path}")
        if done.returncode:
            raise AssertionError(f"{command}: {done.stderr}")
        self.wait_ended(seconds)

    def wait_ended(self, seconds: float = 30, code: int | None = 0) -> None:
        """Waits until the daemon has ended with this exit code (None: any) and the mount is gone."""
        seconds = max(seconds, PATIENCE)
        try:
            found = self.daemon.wait(seconds)
        except subprocess.TimeoutExpired:
            stand = watchdog.where_threads_stand(self.pid)
            raise AssertionError(f"the daemon did not end within {seconds} s\n{stand}\n{self.words()}") from None
        assert code is None or found == code, f"the daemon ended with {found}\n{self.words()}"
        assert not self.mounted()

    def rescue(self) -> None:
        """Removes the mount and the daemon by force; harmless when they are gone already."""
        watchdog.rescue(str(self.path), self.pid if self.daemon.poll() is None else None)
        self.daemon.wait(PATIENCE)
        wait_until(lambda: not self.mounted(), 10, "the rescue of a mount")
        self.session.tell(do="gone", path=str(self.path))

    def close(self) -> None:
        """Unmounts cleanly; whatever happens, nothing is left."""
        try:
            if self.alive():
                self.unmount()
        finally:
            self.rescue()

    def empty(self) -> None:
        """Remove all files, and wait until their memory is free."""
        for device in self.path.glob("gpu*"):
            for path in device.iterdir():
                if path.is_dir() and not path.is_symlink():
                    remove_tree(path)
                else:
                    path.unlink()
        wait_until(
            lambda: not any(device["held_bytes"] for device in self.status()["devices"]), 20, "all memory to be free"
        )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the daemon. After SIGSTOP it takes no request any more."""
        if number == signal.SIGSTOP:
            stop_process(self.pid)
        else:
            os.kill(self.pid, number)

    def __enter__(self) -> GpufsMount:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.words())
            self.rescue()
        else:
            self.close()


Mounter = Callable[..., GpufsMount]


class SharedMount:
    """The mount that most tests share. A test that breaks it breaks itself alone: the next one gets a new mount."""

    def __init__(self, make: Mounter) -> None:
        self._make = make
        self._mount: GpufsMount | None = None

    def get(self) -> GpufsMount:
        if self._mount is not None and not self._mount.alive():
            self._mount.rescue()
            self._mount = None
        if self._mount is None:
            self._mount = self._make()
        return self._mount

    def check(self) -> None:
        """After each test: the daemon lives, and has not complained."""
        mount = self._mount
        if mount is None:
            return
        if not mount.alive():
            words = mount.words()
            mount.rescue()
            self._mount = None
            raise AssertionError(f"the mount did not survive the test\n{words}")
        complaints = mount.complaints(wait=False)  # what comes later is found after the next test
        assert not complaints, "the daemon logged:\n" + "\n".join(complaints)

    def close(self) -> None:
        if self._mount is not None:
            self._mount.close()
            self._mount = None
