"""Programs that use a mount and know what they must see: ``python -m support.at_work NAME DIRECTORY STOP``.

Each works in a directory of its own on the mount until the file STOP exists. It exits with 0 if every call succeeded
and every byte was right.
"""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy

import gpufs
from support.exerciser import Exerciser
from support.mounting import REPOSITORY
from support.processes import PATIENCE

MIB = 1 << 20
_BLOCK = 64 << 10


def _until(stop: Path) -> Iterator[int]:
    number = 0
    while number == 0 or not stop.exists():  # however loaded the machine is
        yield number
        number += 1
    print(number, flush=True)  # what has been done


def write(directory: Path, stop: Path) -> None:
    """Writes at random places, appends, and reads what it has written."""
    size = int(os.environ.get("FILE_BYTES", 64 * MIB))
    chance = random.Random(1)
    model = bytearray(size)
    appended = bytearray()
    with open(directory / "file", "w+b", buffering=0) as file, open(directory / "log", "ab", buffering=0) as log:
        file.truncate(size)
        for _ in _until(stop):
            offset, data = chance.randrange(size - _BLOCK), chance.randbytes(chance.randrange(1, _BLOCK))
            assert os.pwrite(file.fileno(), data, offset) == len(data)
            model[offset : offset + len(data)] = data
            assert log.write(data[:100]) == len(data[:100])
            appended += data[:100]
            offset = chance.randrange(size - _BLOCK)
            assert os.pread(file.fileno(), _BLOCK, offset) == model[offset : offset + _BLOCK]
    assert (directory / "file").read_bytes() == model
    assert (directory / "log").read_bytes() == appended


def read(directory: Path, stop: Path) -> None:
    """Reads a file that does not change."""
    data = random.Random(2).randbytes(16 * MIB)
    (directory / "file").write_bytes(data)
    for _ in _until(stop):
        assert (directory / "file").read_bytes() == data


def store(directory: Path, stop: Path) -> None:
    """Stores into a shared mapping, and reads by calls."""
    with open(directory / "file", "w+b", buffering=0) as file:
        file.truncate(4 * MIB)
        with mmap.mmap(file.fileno(), 4 * MIB) as memory:
            for number in _until(stop):
                place = number * 4099 % (4 * MIB - 8)
                memory[place : place + 8] = number.to_bytes(8, "little")
                assert os.pread(file.fileno(), 8, place) == number.to_bytes(8, "little")


def attach(directory: Path, stop: Path) -> None:
    """Stores into attached memory, and reads by calls; attaches another file again and again."""
    (directory / "file").write_bytes(bytes(4 * MIB))
    (directory / "other").write_bytes(b"x" * 3 * MIB)
    array = gpufs.attach(directory / "file", "r+")
    view = numpy.asarray(array)
    with open(directory / "file", "rb", buffering=0) as file:
        for number in _until(stop):
            view[number % view.size] = number % 251
            assert os.pread(file.fileno(), 1, number % view.size) == bytes([number % 251])
            if number % 10 == 0:
                with gpufs.attach(directory / "other") as other:
                    assert bytes(numpy.asarray(other)[:1000]) == b"x" * 1000


def register(directory: Path, stop: Path) -> None:
    """Changes memory that is registered, and reads the file."""
    shared = SharedMemory(create=True, size=4 * MIB)
    try:
        view: numpy.ndarray = numpy.ndarray(shared.size, numpy.uint8, shared.buf)
        with gpufs.register(view, directory / "file"), open(directory / "file", "rb", buffering=0) as file:
            for number in _until(stop):
                view[number % view.size] = number % 251
                assert os.pread(file.fileno(), 1, number % view.size) == bytes([number % 251])
        assert not os.listdir(directory)
    finally:
        shared.unlink()
        os._exit(0)  # the array keeps the memory mapped, about which its end would complain


def registrations(directory: Path, stop: Path) -> None:
    """Registers memory again and again where files come and go: the name is gone when the registration has ended."""
    shared = SharedMemory(create=True, size=MIB)
    try:
        view: numpy.ndarray = numpy.ndarray(shared.size, numpy.uint8, shared.buf)
        for number in _until(stop):
            with gpufs.register(view, directory / "file") as made:
                assert (directory / "file").stat().st_size == made.nbytes
                (directory / f"other-{number % 20}").touch()
            assert not os.path.lexists(directory / "file")
            os.unlink(directory / f"other-{number % 20}")
        assert not os.listdir(directory)
    finally:
        shared.unlink()
        os._exit(0)


def share(directory: Path, stop: Path) -> None:
    """Attaches and writes a file of which a mapping shows the bytes."""
    path = directory / "file"
    path.write_bytes(bytes(8 * MIB))
    with open(path, "rb") as file:
        for number in _until(stop):
            with gpufs.attach(path, "r+") as array:
                numpy.asarray(array)[:: mmap.PAGESIZE] = number % 251
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
                assert memory[:: mmap.PAGESIZE] == bytes([number % 251]) * (len(memory) // mmap.PAGESIZE)


def look(directory: Path, stop: Path) -> None:
    """Works from another mount namespace, through a bind mount: on bytes and on names."""
    place = Path(os.environ["BIND_PLACE"])
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", directory, place], check=True)
    for number in _until(stop):
        text = str(number).encode() * 1000
        (place / "file").write_bytes(text)
        assert (directory / "file").read_bytes() == text
        os.rename(place / "file", place / "renamed")
        os.unlink(directory / "renamed")


def listing(directory: Path, stop: Path) -> None:
    """Lists a directory slowly: each name comes once."""
    names = {f"name-{number}" for number in range(2000)}
    for name in names:
        (directory / name).touch()
    for number in _until(stop):
        found: list[str] = []
        with os.scandir(directory) as entries:
            for entry in entries:
                found.append(entry.name)
                if number > 0 and len(found) % 500 == 0 and stop.exists():
                    break
            else:
                assert len(found) == len(names)
                assert set(found) == names


def git(directory: Path, stop: Path) -> None:
    """Commits, in a repository on the mount."""

    def call(*words: str) -> str:
        return subprocess.run(["git", "-C", directory, *words], check=True, capture_output=True, text=True).stdout

    call("init", "-q")
    call("config", "user.email", "a@example.org")
    call("config", "user.name", "A")
    done = 0
    for number in _until(stop):
        (directory / f"file-{number % 20}").write_text(f"{number}\n" * 100)
        call("add", "-A")
        call("commit", "-qm", str(number))
        done = number + 1
    call("fsck", "--strict")
    assert int(call("rev-list", "--count", "HEAD")) == done


def sqlite(directory: Path, stop: Path) -> None:
    """Transactions of the sqlite3 command on a database on the mount."""

    def call(text: str) -> str:
        words = ["sqlite3", "-bail", str(directory / "base")]
        return subprocess.run(words, input=text, check=True, capture_output=True, text=True).stdout

    call("CREATE TABLE t (number INTEGER PRIMARY KEY, text TEXT);")
    done = 0
    for number in _until(stop):
        rows = "".join(f"INSERT INTO t VALUES ({number * 10 + row}, hex(randomblob(50)));" for row in range(10))
        call(f"BEGIN; {rows} COMMIT;")
        done = number + 1
    assert call("PRAGMA integrity_check; SELECT count(*) FROM t;").split() == ["ok", str(done * 10)]


def exercise(directory: Path, stop: Path) -> None:
    """Changes files in every way, while they move to the host's memory and back."""
    seed = sum(directory.name.encode())
    Exerciser(directory, stop.with_name(f"{directory.name}-scratch"), seed).run(_until(stop))


PROGRAMS: dict[str, Callable[[Path, Path], None]] = {
    work.__name__: work
    for work in (write, read, store, attach, register, registrations, share, look, listing, git, sqlite, exercise)
}


@contextmanager
def at_work(
    device: Path, folder: Path, names: Iterable[str] = tuple(PROGRAMS), **environment: str
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """These programs, each in a directory of its own. At the end they must have seen nothing wrong.

    names: of the directories. They begin with those of the programs.
    """
    stop, place = folder / "stop", folder / "bound"
    place.mkdir()
    path = os.pathsep.join([str(REPOSITORY / "tests"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, "BIND_PLACE": str(place), **environment}
    running = {}
    try:
        for name in names:
            directory = device / name
            directory.mkdir()
            words = [sys.executable, "-m", "support.at_work", name.split("-")[0], str(directory), str(stop)]
            if name == "look":
                words = ["unshare", "--mount", *words]
            running[name] = subprocess.Popen(
                words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        yield running
        stop.touch()
        for name, program in running.items():
            said, _ = program.communicate(timeout=PATIENCE)
            assert program.returncode == 0, f"{name}: {said}"
            assert int(said.split()[0]) > 0, name
    finally:
        for program in running.values():
            program.kill()
            program.wait()


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
