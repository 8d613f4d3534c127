"""The daemon's memory for names and attributes, and its limit (--metadata)."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from support.data import MIB
from support.mounting import GpufsMount, Mounter
from support.processes import errno_of, wait_until

pytestmark = pytest.mark.driver


def metadata(mounted: GpufsMount) -> tuple[int, int]:
    """Bytes in use, and the limit."""
    gauges = mounted.stats()["gauges"]
    return gauges["metadata_bytes"], gauges["metadata_limit_bytes"]


def resident(mounted: GpufsMount) -> int:
    """Private memory of the daemon, without the devices'."""
    (line,) = (x for x in Path(f"/proc/{mounted.pid}/status").read_text().splitlines() if x.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def until_full(action: Callable[[int], object]) -> int:
    """Counts how often action(n) succeeds before ENOSPC."""
    for n in itertools.count():
        code = errno_of(action, n)
        if code:
            assert code == errno.ENOSPC
            return n
    raise AssertionError


def long_names(directory: Path, n: int) -> None:
    os.close(os.open(directory / f"{n:0255}", os.O_CREAT | os.O_WRONLY))


def symlinks(directory: Path, n: int) -> None:
    os.symlink("x" * 4000, directory / f"link{n}")


def attributes(directory: Path, n: int) -> None:
    """A new file after each 200 KiB of them."""
    file = directory / f"file{n // 4}"
    file.touch()
    os.setxattr(file, f"user.{n}", bytes(50 << 10))


KINDS = [long_names, symlinks, attributes]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_metadata_limit_holds(mount: Mounter, kind: Callable[[Path, int], None]) -> None:
    """The daemon grows by no more than the limit, and removed entries free their memory."""
    mounted = mount("--metadata", "2M")
    assert metadata(mounted)[1] == 2 * MIB
    place = mounted.device / "place"
    place.mkdir()
    (mounted.device / "there").write_bytes(b"before")
    used, before = metadata(mounted)[0], resident(mounted)
    count = until_full(lambda n: kind(place, n))
    assert count > 20
    assert metadata(mounted)[0] <= 2 * MIB
    assert resident(mounted) - before < 16 * MIB
    # What is there is used as ever.
    (mounted.device / "there").write_bytes(bytes(MIB))
    os.rename(mounted.device / "there", mounted.device / "here")
    (mounted.device / "here").chmod(0o600)

    for name in os.listdir(place):
        if stat.S_ISDIR(os.lstat(place / name).st_mode):
            os.rmdir(place / name)
        else:
            os.unlink(place / name)
    wait_until(lambda: metadata(mounted)[0] <= used, 20, "all memory to be released")
    kind(place, 0)
    mounted.close()


def test_the_log_says_what_the_limit_is(mount: Mounter) -> None:
    mounted = mount("--metadata", "1M")
    until_full(lambda n: (mounted.device / f"{n}").touch())
    mounted.close()
    assert "--metadata" in mounted.log.read_text()


def test_replaced_attributes_free_their_memory(mount: Mounter) -> None:
    mounted = mount("--metadata", "1M")
    file = mounted.device / "file"
    file.touch()
    used = metadata(mounted)[0]
    for n in range(200):
        os.setxattr(file, "user.same", bytes(n * 300))
    os.removexattr(file, "user.same")
    assert errno_of(os.removexattr, file, "user.same") == errno.ENODATA
    assert metadata(mounted)[0] == used
    mounted.close()


def test_df_shows_how_many_more_files_fit(mount: Mounter) -> None:
    mounted = mount("--metadata", "4M")
    before = os.statvfs(mounted.device)
    assert 0 < before.f_ffree < 4 * MIB // 1024
    assert before.f_ffree == until_full(lambda n: os.mknod(mounted.device / f"file{n}"))
    assert os.statvfs(mounted.device).f_ffree == 0
    mounted.close()
