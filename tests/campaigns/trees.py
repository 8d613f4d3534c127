"""Copies trees of many small files in and out: contents, modes, times, links and attributes must survive."""

from __future__ import annotations

import os
from pathlib import Path

from support.data import noise
from support.processes import shell

from campaigns.harness import Place, need, program


def make_tree(base: Path, count: int) -> None:
    """``count`` files of 0 to 3,000 bytes, a few larger; every hundredth with a link, a symlink and an attribute."""
    block = noise(1 << 20, 1)
    for number in range(count):
        folder = base / f"{number % 97:02d}" / f"{number % 13:02d}"
        if number < 97 * 13:
            folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"file{number}"
        size = 300_000 if number % 5000 == 17 else number % 3001
        path.write_bytes(block[number : number + size])
        if number % 100 == 0:
            path.chmod(0o640)
            os.setxattr(path, "user.number", str(number).encode())
            os.link(path, f"{path}-hard")
            os.symlink(path.name, f"{path}-soft")
            os.utime(path, ns=(number * 10**9 + 1, number * 10**9 + 987_654_321))


def _same(one: Path, other: Path) -> None:
    left = program("rsync", "-aHXni", "--checksum", "--delete", f"{one}/", f"{other}/")
    if left.strip():
        raise AssertionError(f"{one} and {other} differ:\n{left[:2000]}")


def rsync(place: Place) -> str:
    need("rsync")
    count = 2_000 if place.quick else 50_000
    make_tree(place.host / "tree", count)
    there, back = place.root / "tree", place.host / "back"
    program("rsync", "-aHX", "--checksum", f"{place.host}/tree/", there)
    program("rsync", "-aHX", "--checksum", f"{there}/", back)
    _same(place.host / "tree", there)
    _same(place.host / "tree", back)
    program("diff", "-r", "--no-dereference", place.host / "tree", back)
    return f"{count} files in and out with checksums, links and attributes"


def tar(place: Place) -> str:
    need("tar", "rsync")
    count = 1_000 if place.quick else 20_000
    make_tree(place.host / "tree", count)
    copy = "mkdir {to} && tar -C {at} --xattrs -cf - . | tar -C {to} --xattrs -xpf -"
    one, two, back = place.root / "one", place.root / "two", place.host / "back"
    for at, to in ((place.host / "tree", one), (one, two), (two, back)):
        shell(copy.format(at=at, to=to), timeout=3600)
    _same(place.host / "tree", two)
    _same(place.host / "tree", back)
    return f"{count} files through tar | tar in, across and out"
