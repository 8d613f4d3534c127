"""The same scenarios on all routes of a copy: docs/design/routes.md has a row for each route, a column for each one.

A cell with "yes" is a test here. Other cells have the number of the reason why the route does not have the property.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import random
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.copying import wait_for_no_copies
from support.data import MIB, SELECTED, SELECTION, contents, directory, make_model, noise
from support.hosts import script
from support.mounting import REPOSITORY, GpufsMount, Session
from support.processes import PATIENCE, Snapshot, children_of, links_of, run, wait_until
from support.routes import BUCKET, ROUTES, Route, World
from support.stores import s3_server, web_server

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, and sets owners")

PAGE = (REPOSITORY / "docs/design/routes.md").read_text()
TABLE = re.findall(r"^\|.*", PAGE[PAGE.index("| Route") : PAGE.index("| Property")], re.M)
HEAD, _, *ROWS = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in TABLE]
SIZE = 3 * MIB + 5
LARGE = 20 * MIB  # an upload of several parts
SPACE = 48 * MIB  # where copies go: for two versions, which a restore needs


def on_all(property_: str) -> pytest.MarkDecorator:
    """The routes whose row has "yes" in this column."""
    column = HEAD.index(property_)
    return pytest.mark.parametrize("route", [row[0] for row in ROWS if row[column] == "yes"], indirect=True)


@pytest.fixture(scope="module")
def world(session: Session, driver: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """At its end the daemon holds what it held at its beginning."""
    with ExitStack() as stack:
        made = [GpufsMount(session, driver=driver, devices=2, memory=size) for size in (4 * SPACE, SPACE)]
        sources, mount = map(stack.enter_context, made)
        files, disk = (stack.enter_context(directory("/dev/shm")) for _ in range(2))
        run("mount", "-t", "tmpfs", "-o", f"size={SPACE}", "tmpfs", disk)
        stack.callback(run, "umount", disk)
        s3 = stack.enter_context(s3_server(tmp_path_factory.mktemp("s3")))
        s3.client.create_bucket(Bucket=BUCKET)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
            patch.delenv(name, raising=False)
        shell = script(session.scratch / "rsh-of-routes", '#!/bin/sh\nshift\nexec "$@"\n')
        before = [Snapshot.of(one.pid).descriptors for one in made]
        yield World(sources, files, mount, disk, s3, stack.enter_context(web_server()), shell)
        for one, descriptors in zip(made, before, strict=True):
            wait_until(lambda: not any(device["held_bytes"] for device in one.status()["devices"]), 10, "free memory")  # noqa: B023
            # The first copies start threads, and names that the kernel knows have a descriptor each.
            wait_until(lambda: Snapshot.of(one.pid).descriptors <= descriptors + 16, 10, "closed descriptors")  # noqa: B023
            assert not one.complaints()


_numbers = itertools.count()


@pytest.fixture
def route(request: pytest.FixtureRequest, world: World) -> Iterator[Route]:
    found = ROUTES[request.param](world, f"r{next(_numbers)}")
    yield found
    wait_for_no_copies(world.mount)
    found.remove()


def version(route: Route, number: int, size: int = SIZE) -> dict[str, bytes]:
    """The files of a version, all of one size."""
    small = {} if route.one_file else {"deep/small": b"%d" % number, "deep/empty": b""}
    return {"model": noise(size, number), **small}


def good(route: Route, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command, which must succeed."""
    done = route.run(*options)
    assert done.returncode == 0, done
    return done


def copied(route: Route) -> int:
    """Copy, and return how many files each copy has got."""
    return int(json.loads(good(route, "--json").stdout)["files"]) // len(route.copies())


def all_are(route: Route, files: dict[str, bytes]) -> bool:
    return all(copy == files for copy in route.copies())


def test_each_route_and_each_property_is_in_the_table() -> None:
    scenarios = [name.removeprefix("test_") for name, one in vars(sys.modules[__name__]).items() if _takes_route(one)]
    assert HEAD[1:] == scenarios
    assert [row[0] for row in ROWS] == list(ROUTES)
    reasons = set(re.findall(r"^(\d+)\. ", PAGE, re.M))
    assert {cell for row in ROWS for cell in row[1:]} == {"yes", *reasons}


def _takes_route(found: object) -> bool:
    return inspect.isfunction(found) and found.__name__.startswith("test_") and "route" in found.__annotations__


@on_all("identity")
def test_identity(route: Route) -> None:
    """What is there is skipped. A version of equal size and an older time is another one."""
    files = version(route, 1)
    route.put(files)
    assert copied(route) == len(files)
    assert all_are(route, files)
    assert copied(route) == 0
    files = {**files, "model": noise(SIZE, 2)}
    route.put(files)
    assert copied(route) == 1
    assert all_are(route, files)


@on_all("incomplete")
def test_incomplete(route: Route) -> None:
    """A new file takes the place of an old one: readers keep that, and nothing is written through a link."""
    route.put(version(route, 1))
    good(route)
    names = [path for top in route.directories for path in top.rglob("model")]
    held = [path.open("rb") for path in names]
    route.put(version(route, 2))
    good(route)
    assert all_are(route, version(route, 2))
    for file in held:
        with file:
            assert file.read() == noise(SIZE, 1)
    outside = route.files / "outside"
    outside.write_bytes(b"precious")
    for path in names:
        path.unlink()
        path.symlink_to(outside)
    route.put(version(route, 3))
    good(route)
    assert all_are(route, version(route, 3))
    assert outside.read_bytes() == b"precious"


def tree_of(pid: int) -> list[int]:
    """A process and all that it has started."""
    try:
        return [pid, *(found for child in children_of(pid) for found in tree_of(child))]
    except FileNotFoundError:
        return []


def is_at_work(route: Route, pid: int) -> bool:
    """Whether a process, or one that it has started, has a file of the source or of a copy open."""
    tops = tuple(f"{path}/" for path in route.tops)
    try:
        found = [link for process in tree_of(pid) for link in links_of(process).values() if link.startswith(tops)]
    except FileNotFoundError:
        return False
    return any("model" in link or "(deleted)" in link for link in found)


def ended(route: Route, number: signal.Signals) -> None:
    """End a copy in the middle, and wait until nothing works for it any more."""
    route.put(version(route, 2, LARGE))
    with route.start() as child:
        wait_until(lambda: child.poll() is not None or is_at_work(route, child.pid), PATIENCE, "the copy")
        time.sleep(random.Random(route.name).uniform(0, 0.05))
        others = tree_of(child.pid)
        child.send_signal(number)
        _, errors = child.communicate(timeout=PATIENCE)
    assert child.returncode in (0, -number, 128 + number), errors
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in others), PATIENCE, "the end of the others")
    wait_for_no_copies(route.world.mount)
    wait_until(lambda: route.world.mount.gauge("open_files") == 0, 10, "closed files")


@on_all("cancel")
def test_cancel(route: Route) -> None:
    """A signal leaves no file that is not complete, and nothing besides."""
    ended(route, random.Random(route.name).choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
    new = version(route, 2, LARGE)
    assert all(copy.items() <= new.items() for copy in route.copies())
    assert not route.leftovers()


@on_all("kill")
def test_kill(route: Route) -> None:
    """After kill -9 each file is the old or the new one, except what the next copy removes, or a rule of the store."""
    old, new = version(route, 1), version(route, 2, LARGE)
    route.put(old)
    good(route)
    ended(route, signal.SIGKILL)
    for copy in route.copies():
        assert not route.is_whole or copy in (old, new)
        for name, data in copy.items():
            assert ".gpufs-part" in name or data in (old[name], new[name]), name
    route.leftovers()
    good(route)
    assert all_are(route, new)
    assert not route.leftovers()


@on_all("full")
def test_full(route: Route) -> None:
    """What does not fit changes nothing."""
    route.put(version(route, 1))
    if route.replaces:
        good(route)
    before = route.copies()
    route.put({**version(route, 1), "model": noise(SPACE + MIB)})
    done = route.run()
    assert done.returncode == 1, done
    assert "No space left on device" in done.stderr
    assert route.copies() == before
    assert not route.leftovers()


@on_all("patterns")
def test_patterns(route: Route) -> None:
    make_model(route.files / "model")
    files = contents(route.files / "model")
    route.put(files)
    good(route, *SELECTION)
    assert all_are(route, {name: files[name] for name in SELECTED})


NAMES = ("a", "b", "d", "d/a", "d/e", "d/e/c", "g", "g/a", "h.bin")


@on_all("delete")
def test_delete(route: Route) -> None:
    """Both sides are equal after random changes of the source, where files become directories, and the reverse."""
    chance = random.Random(5)
    options = () if isinstance(route, ROUTES["save"]) else ("--delete",)
    files: dict[str, bytes] = {}
    for _ in range(3):
        for name in chance.sample(NAMES, 4):
            above = [str(path) for path in Path(name).parents]
            files = {
                other: data for other, data in files.items() if other not in above and not other.startswith(f"{name}/")
            }
            files[name] = chance.randbytes(chance.choice([0, 5, 5, 4096, 200_000]))
        for name in chance.sample(sorted(files), len(files) // 3):
            del files[name]
        route.put(files)
        gone = sorted({name for copy in route.copies() for name in copy} - files.keys())
        deleted = json.loads(good(route, "--json", *options).stdout).get("deleted", [])
        assert all_are(route, files)
        assert not options or [name for name in gone if any(path.endswith(f"/{name}") for path in deleted)] == gone


def attributes(top: Path) -> dict[str, object]:
    """Of all that a directory has, and of itself."""
    found: dict[str, object] = {}
    for path in (top, *top.rglob("*")):
        status = path.lstat()
        target = os.readlink(path) if stat.S_ISLNK(status.st_mode) else status.st_mtime_ns
        found[str(path.relative_to(top))] = (status.st_mode, status.st_uid, status.st_gid, target)
    return found


@on_all("attributes")
def test_attributes(route: Route) -> None:
    route.put(version(route, 1))
    (route.source / "link").symlink_to("model")
    os.mkdir(route.source / "empty")
    for name, mode in (("model", 0o640), ("deep/small", 0o4755), ("deep", 0o2750), ("empty", 0o555)):
        os.chown(route.source / name, 1234, 5678)
        os.chmod(route.source / name, mode)
        os.utime(route.source / name, ns=(10**18 + 1, 10**18 + 123_456_789))
    good(route, *route.keep)
    assert [attributes(path) for path in route.directories] == [attributes(route.source)] * len(route.directories)


@on_all("progress")
def test_progress(route: Route) -> None:
    """The line ends with all of all, and JSON has the same bytes."""
    files = version(route, 1, 20 * MIB)
    route.put(files)
    done = good(route, "--progress", "--json")
    assert re.search(r"(\d\d\.0 MiB) of \1", done.stderr)
    assert json.loads(done.stdout)["bytes"] == sum(map(len, files.values())) * len(route.copies())
