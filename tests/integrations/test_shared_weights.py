"""Weights that model servers share, without a server."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from errno import EBUSY
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.mounting import GpufsMount
from support.processes import NOBODY, PATIENCE, as_nobody, errno_of, wait_until

import gpufs
from gpufs.formats import FormatError
from gpufs.integrations._checkpoint import ModelFiles
from gpufs.integrations._shared_weights import OpenWeights, SharedWeights


def publish(weights: SharedWeights, *, seed: int = 0) -> OpenWeights:
    torch.manual_seed(seed)
    with weights.claim(PATIENCE, lambda: None) as claimed:
        assert claimed
        return weights.publish(torch.nn.Linear(256, 256), {})


@pytest.fixture
def checkpoint(shared_mount: GpufsMount, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file in a directory of its own."""
    folder = shared_mount.device / request.node.name
    folder.mkdir()
    file = folder / "model.safetensors"
    save_file({"a": torch.ones(100)}, file)
    yield file
    for left in folder.iterdir():
        left.unlink()
    folder.rmdir()


def test_words_that_have_changed_places_are_found(shared_mount: GpufsMount) -> None:
    weights = SharedWeights(shared_mount.device, "swapped", "model", {})
    with publish(weights).path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        for distance in (8, 4096, 128 << 10):  # in a row of the digest, and between rows
            pieces = []
            for start in (size - distance - 8, size - 8):
                file.seek(start)
                pieces.append((start, file.read(8)))
            for (start, _), (_, other) in zip(pieces, reversed(pieces), strict=True):
                file.seek(start)
                file.write(other)
            file.flush()
            with pytest.raises(FormatError):
                weights.open()
            for start, own in pieces:
                file.seek(start)
                file.write(own)
            file.flush()
            assert weights.open() is not None


def test_weights_are_found_under_another_name(shared_mount: GpufsMount) -> None:
    """As after the directory of the model was renamed."""
    path = publish(SharedWeights(shared_mount.device, "renamed", "before", {"one": 1})).path
    found = SharedWeights(shared_mount.device, "renamed", "after", {"one": 1}).open()
    assert found is not None
    assert found.path == path
    assert SharedWeights(shared_mount.device, "renamed", "before", {"one": 2}).open() is None


def test_each_user_has_a_directory_of_their_own(shared_mount: GpufsMount) -> None:
    """Nobody keeps others from sharing, nor puts files in the place of theirs."""
    device = shared_mount.device

    def weights_of(server: str, *trusted: str) -> SharedWeights:
        return SharedWeights(device, server, "model", {"one": 1}, trusted)

    published = publish(weights_of("users")).path

    def claim() -> str:
        weights = weights_of("users")
        with weights.claim(PATIENCE, lambda: None) as claimed:
            assert claimed
            assert weights.path.stat().st_uid == NOBODY
        return weights.path.parent.name

    assert published.parent.name == "users"
    assert as_nobody(claim) == f"users-{NOBODY}"

    for taken in ("owned", "writable", "link"):
        other = device / f"taken-{taken}"
        if taken == "link":
            other.symlink_to(device / "users")
        else:
            other.mkdir()
            (other / published.name).hardlink_to(published)
            other.chmod(0o777 if taken == "writable" else 0o755)
        if taken == "owned":
            os.chown(other, NOBODY, NOBODY)
        assert weights_of(other.name).open() is None, taken
        with pytest.raises(PermissionError), weights_of(other.name).claim(PATIENCE, lambda: None):
            pass

    own = device / f"users-{NOBODY}"
    published.rename(own / published.name)
    os.chown(own / published.name, NOBODY, NOBODY)
    assert weights_of("users").open() is None
    assert weights_of("users", "nobody").open() is not None
    assert weights_of("users", "*").open() is not None


@pytest.mark.parametrize(
    ("of_file", "of_directory", "expected"),
    [(0o644, 0o755, 0o644), (0o444, 0o711, 0o644), (0o640, 0o755, 0o600), (0o604, 0o755, 0o600), (0o644, 0o750, 0o600)],
)
def test_published_weights_have_no_more_readers_than_the_checkpoint(
    checkpoint: Path, shared_mount: GpufsMount, of_file: int, of_directory: int, expected: int
) -> None:
    checkpoint.chmod(of_file)
    checkpoint.parent.chmod(of_directory)
    mode = ModelFiles([str(checkpoint)], shared_mount.device).mode()
    assert mode == expected
    weights = SharedWeights(shared_mount.device, "readers", "m", {"readers": [of_file, of_directory]}, (), mode)
    assert stat.S_IMODE(publish(weights).path.stat().st_mode) == mode


def test_a_mode_that_is_changed_later_counts(shared_mount: GpufsMount) -> None:
    publish(SharedWeights(shared_mount.device, "narrower", "m", {}, ()))
    narrower = SharedWeights(shared_mount.device, "narrower", "m", {}, (), 0o600)
    assert narrower.open() is not None
    assert stat.S_IMODE(narrower.path.stat().st_mode) == 0o600


def test_an_access_list_closes_the_weights(checkpoint: Path, shared_mount: GpufsMount) -> None:
    entries = [(1, 6, -1), (2, 4, NOBODY), (4, 4, -1), (16, 4, -1), (32, 4, -1)]
    value = (2).to_bytes(4, "little")
    value += b"".join(
        kind.to_bytes(2, "little") + mode.to_bytes(2, "little") + (who & 0xFFFFFFFF).to_bytes(4, "little")
        for kind, mode, who in entries
    )
    os.setxattr(checkpoint, "system.posix_acl_access", value)
    assert ModelFiles([str(checkpoint)], shared_mount.device).mode() == 0o600


def test_what_identifies_a_checkpoint(checkpoint: Path, shared_mount: GpufsMount) -> None:
    """Its contents: neither its mode nor the name of its directory, and a time that was set back hides nothing."""

    def identity(file: Path) -> list[object]:
        return ModelFiles([str(file)], shared_mount.device).identities[str(file)]

    before = identity(checkpoint)
    checkpoint.chmod(0o600)
    renamed = checkpoint.parent.rename(checkpoint.parent.with_name("elsewhere"))
    assert identity(renamed / checkpoint.name) == before
    renamed.rename(checkpoint.parent)
    status = checkpoint.stat()
    with checkpoint.open("r+b") as file:
        file.write(file.read(1))
    os.utime(checkpoint, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert identity(checkpoint) != before


def test_a_checkpoint_with_a_writer_is_not_shared(checkpoint: Path, shared_mount: GpufsMount) -> None:
    def failure() -> int:
        return errno_of(ModelFiles, [str(checkpoint)], shared_mount.device)

    with gpufs.attach(checkpoint, "r"):
        assert failure() == 0
        with gpufs.attach(checkpoint, "r+"):
            assert failure() == EBUSY
        wait_until(lambda: failure() == 0, 1, "the end of the writer")


def test_what_may_be_removed_on_a_full_device(shared_mount: GpufsMount) -> None:
    """Published files that no program uses, and of which there is another copy."""
    shared = [SharedWeights(shared_mount.device, "full", f"model{number}", {"one": number}) for number in range(3)]
    used, free, only = (publish(weights) for weights in shared)
    only.keep()
    paths = used.path, free.path, only.path
    del free, only
    found = wait_until(shared[0].unused, 1, "the end of the leases")
    assert [str(path) in found for path in paths] == [False, True, False]
    del used
    wait_until(lambda: str(paths[0]) in shared[0].unused(), 1, "the end of the lease")
