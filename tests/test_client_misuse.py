"""gpufs.copy and its objects in the hands of a program that uses them wrongly, or in another process."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest
from support.copying import MIB, FakeMount
from support.processes import in_child

from gpufs import client, mounting
from gpufs.client import Cancellation, Copier, CopyError


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMount]:
    mount = FakeMount()
    monkeypatch.setattr(mounting, "listed", lambda: [mount.entry()])
    yield mount
    mount.close()


def test_names_as_bytes(fake: FakeMount) -> None:
    name = b"caf\xe9"
    source = os.path.join(os.fsencode(fake.host), name)
    with open(source, "wb") as file:
        file.write(bytes(MIB))
    for target in (str(fake.folder), os.fsencode(fake.folder), fake.folder):
        result = client.copy(source, target)
        assert os.fsencode(result.destination) == os.path.join(os.fsencode(fake.folder), name)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"cancel": 5}, TypeError),
        ({"progress": 5}, TypeError),
        ({"fastpath": "perhaps"}, ValueError),
        ({"fastpath": []}, ValueError),
    ],
)
def test_wrong_arguments_touch_nothing(fake: FakeMount, wrong: dict[str, Any], error: type[Exception]) -> None:
    source, target = fake.file("source", bytes(MIB)), fake.file("target", b"precious", fake.folder)
    with pytest.raises(error, match=next(iter(wrong))):
        client.copy(source, target, **wrong)
    assert target.read_bytes() == b"precious"


def test_cancelled_before_it_began(fake: FakeMount) -> None:
    source, target = fake.file("source", bytes(MIB)), fake.file("target", b"precious", fake.folder)
    cancel = Cancellation()
    cancel.cancel()
    cancel.cancel()
    for _ in range(2):
        with pytest.raises(CopyError) as cancelled:
            client.copy(source, target, cancel=cancel)
        assert cancelled.value.errno == errno.ECANCELED
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("names", [("", "x"), ("x", "")])
def test_empty_names(fake: FakeMount, names: tuple[str, str]) -> None:
    fake.file("x", bytes(MIB))
    with pytest.raises(CopyError) as refused:
        client.copy(*(str(fake.host / name) if name else name for name in names))
    assert refused.value.errno == errno.ENOENT


def test_a_forked_child_has_connections_of_its_own(fake: FakeMount) -> None:
    """Two processes on one connection would take each other's answers."""
    source = fake.file("source", os.urandom(3 * MIB))
    with Copier() as copier:
        copier.copy_file(str(source), str(fake.folder / "first"))

        def copy_again() -> int:
            return copier.copy_file(str(source), str(fake.folder / "childs")).bytes

        assert in_child(copy_again) == 3 * MIB
        assert copier.copy_file(str(source), str(fake.folder / "parents")).bytes == 3 * MIB
    assert fake.backend.requests
    for name in ("first", "childs", "parents"):
        assert (fake.folder / name).read_bytes() == source.read_bytes()
