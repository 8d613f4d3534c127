"""Mounts whose daemon is killed."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpufs import status
from support.cli import gpufs
from support.mounting import GPUFS
from support.processes import PATIENCE, run, wait_until

# Every Python of the mount runs it as it starts.
_FAILURE = """
import os, sys
if "--takeover-fd" in sys.orig_argv and os.path.exists({switch!r}):
{fault}
"""


def failing_takeovers(folder: Path, fault: str) -> tuple[dict[str, str], Path]:
    """Return an environment for a mount, and a file: while it exists, daemons that take over run ``fault`` first."""
    switch = folder / "broken"
    text = _FAILURE.format(switch=os.fspath(switch), fault=textwrap.indent(fault, "    "))
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([os.fspath(folder), os.environ.get("PYTHONPATH", "")])}, switch


class Survivor:
    """A mount in the background."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.device = path / "gpu0"

    @property
    def pid(self) -> int:
        """The daemon's process; 0 while there is none."""
        return int(status(self.path).pid or 0)

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / ".gpufs" / "status").read_bytes())
        return found

    def keepers(self) -> list[int]:
        """The keeper's process, in a list; more only by mistake."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if words[0].endswith(b"/gpufs-keeper") and words[1] == os.fsencode(self.path):
                    found.append(int(folder.name))
        return found

    def await_another(self, former: int) -> None:
        wait_until(lambda: self.pid not in (0, former), PATIENCE, "another daemon")

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Kills the daemon, and waits until another one answers."""
        former = wait_until(lambda: self.pid, PATIENCE, "a daemon")
        os.kill(former, number)
        self.await_another(former)
        (keeper,) = self.keepers()
        os.kill(keeper, signal.SIGUSR1)  # forgets the deaths: so many in a row look like a call that kills daemons


@contextmanager
def mounted(
    path: Path,
    *options: str,
    driver: str = "host",
    environment: dict[str, str] | None = None,
    launcher: tuple[str, ...] = (),
    memory: str | None = "512M",
) -> Iterator[Survivor]:
    """A mount in the background. launcher: a program and its options, which runs `gpufs mount`. memory: None for the
    default."""
    path.mkdir(exist_ok=True)
    words = ["--driver", driver, "--log-file", str(path.with_name("log"))]
    words += ["--memory", memory] if memory else []
    words += ["--devices", "1"] if driver == "host" else []
    command = [*launcher, *GPUFS, "mount", str(path), *words, *options]
    try:
        run(*command, env={**os.environ, **(environment or {})})
        try:
            yield Survivor(path)
        finally:
            gpufs("umount", "--force", path)
    except BaseException as error:
        with suppress(OSError):
            error.add_note(f"--- log\n{path.with_name('log').read_text(errors='replace')[-6000:]}")
        raise
