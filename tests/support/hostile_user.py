"""A plain user who changes what is at a few names, all the time and as fast as possible, until standard input ends.

The words are the levels of its deep trees, with colons between them the names of others' directories and files, to
which its links lead, and then the directories in which it does so, each its own; where it may, also beside them.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
from contextlib import suppress

# What commands of root are given, and what they meet below it. Others are names that privileged programs use.
NAMES = ("a", "b", "model")
BESIDE = ("u2", "csi", ".save.gpufs-part", ".gpufs-part-0123456789abcdef", "csi.new")
ODD = (b"\xff\xfe", b"-rf", b" ", b"a\nb", b"\x1b[31m", b"..gone", "\u202e".encode(), b"%41", b"x" * 255)
SLEEPS = 2 << 20  # bytes of a file that root may put to sleep


class Hostile:
    """One of its directories."""

    def __init__(self, directory: str, levels: int, targets: list[str], chooser: random.Random) -> None:
        self._levels = levels
        self._targets = targets
        self._chooser = chooser
        os.chdir(directory)  # in a process of its own: whatever becomes of the names above it

    def step(self) -> None:
        """Put something else at one of the names."""
        choose = self._chooser.choice
        place = choose(NAMES + tuple(f"../{name}" for name in BESIDE))
        with suppress(OSError):
            os.rename(place, f".old-{self._chooser.randrange(40)}")
        with suppress(OSError):
            choose((self._tree, self._tree, self._link, self._link, self._file, self._fifo, self._socket))(place)
        if self._chooser.random() < 0.02:
            self._remove_old()

    def _tree(self, place: str) -> None:
        os.mkdir(place, self._chooser.choice((0o700, 0o755, 0o777)))
        for name in NAMES:
            if self._chooser.random() < 0.5:
                self._chooser.choice((self._link, self._file, self._fifo, self._hard_link))(f"{place}/{name}")
        for odd in self._chooser.sample(ODD, 2):
            os.close(os.open(os.fsencode(place) + b"/" + odd, os.O_CREAT | os.O_WRONLY))
        os.makedirs(f"{place}/.gpufs/run")
        self._chooser.choice((self._link, self._file, self._fifo))(f"{place}/.gpufs/source")
        with open(f"{place}/.gpufs/model.json", "wb") as file:
            file.write(self._chooser.choice((b"{", b"\xff", b'{"model":[],"files":{"../../x":1}}', b"[" * 5000)))
        if self._chooser.random() < 0.2:
            self._deep(place)

    def _deep(self, place: str) -> None:
        above = os.open(place, os.O_RDONLY)
        for _ in range(self._levels):
            os.mkdir("d", dir_fd=above)
            below = os.open("d", os.O_RDONLY, dir_fd=above)
            os.close(above)
            above = below
        os.close(above)

    def _link(self, place: str) -> None:
        os.symlink(self._chooser.choice((*self._targets, "loop", "/dev/zero")), place)

    def _hard_link(self, place: str) -> None:
        os.link(self._chooser.choice(self._targets), place)  # refused for what is not its own

    def _file(self, place: str) -> None:
        with open(place, "wb") as file:
            file.truncate(self._chooser.choice((0, 10, SLEEPS)))
            file.write(b"mine")

    def _fifo(self, place: str) -> None:
        os.mkfifo(place)

    def _socket(self, place: str) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(place)

    def _remove_old(self) -> None:
        os.system("rm -rf .old-* 2>/dev/null")


def main(levels: str, others: str, *directories: str) -> None:
    targets = others.split(":")
    children = []
    for number, directory in enumerate(directories):
        child = os.fork()
        if child == 0:
            hostile = Hostile(directory, int(levels), targets, random.Random(number))
            while True:
                hostile.step()
        children.append(child)
    sys.stdin.read()
    for child in children:  # all are still there
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


if __name__ == "__main__":
    main(*sys.argv[1:])
