"""The files of a model: what identifies them, and how they free their tensors once an engine has published the weights.

A file that has freed its tensors keeps its name and its header. The metadata in the header have the identity that the
file had before, so it still leads to the published weights. Every reader of safetensors refuses it: data are missing.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from errno import EBUSY, ENODATA, EOPNOTSUPP
from pathlib import Path
from typing import Any

from gpufs.formats import FormatError, safetensors
from gpufs.formats.budget import BoundedFile
from gpufs.integrations._shared_weights import SharedWeights, Version, hash_of
from gpufs.integrations._sharing import Loaded, ModelServer, is_on_mount
from gpufs.torch._tensor_file import TensorFile
from gpufs.units import bytes_text


class ModelFiles:
    """The files of a model as they are now. directory: where its weights will be shared.

    OSError EBUSY if a program has one attached for writing: what identifies it does not change with its contents then.
    """

    def __init__(self, files: Iterable[str], directory: Path) -> None:
        self._directory = directory
        before = {file: _identity_before(file) for file in sorted(files)}
        # By file what changes whenever its contents do. Two copies of a model have different ones.
        self.identities = {file: identity or _identity(file, directory) for file, identity in before.items()}
        self.released = [file for file, identity in before.items() if identity is not None]  # have freed their tensors
        for file in before:
            if _attribute(file, "writers"):
                raise OSError(EBUSY, "a program has it attached for writing", file)

    @property
    def version(self) -> Version:
        """What weights of a group are called that are made of these files."""
        return Version(hash_of([*self.identities.values()]), os.path.dirname(next(iter(self.identities))))

    def shared_as(self, group: str | None) -> tuple[list[Any], Version | None]:
        """Return what stands for these files in the key of shared weights, and what version they are of a group."""
        if group is None:
            return [*self.identities.values()], None
        return [["group", group]], self.version

    def check_unchanged(self) -> None:
        """Raise OSError EBUSY if one of the files has changed since."""
        for file, identity in ModelFiles(self.identities, self._directory).identities.items():
            if identity != self.identities[file]:
                raise OSError(EBUSY, "has changed while it was loaded: update again", file)

    def mode(self) -> int:
        """Return a mode that lets nobody read a file who cannot read all of these."""
        files = {Path(os.path.realpath(file)) for file in self.identities}
        above = {parent for file in files for parent in file.parents}
        above -= {self._directory, *self._directory.parents}  # of the published file, too
        places = [*((path, 0o044) for path in files), *((path, 0o011) for path in above)]
        all_may = all(path.stat().st_mode & bits == bits and not _has_access_list(path) for path, bits in places)
        return 0o644 if all_may else 0o600

    def check(self, shared: SharedWeights) -> None:
        """Raise FormatError, with the remedy, if the model cannot be loaded because tensors are freed."""
        for file in self.released:
            raise FormatError(
                f'{file} has freed its tensors ("keep_checkpoint": false), and no published weights are good for this '
                f"engine: they would be {shared.path}. Copy the model to {os.path.dirname(file)} again (gpufs cp -rL), "
                f"or start the engine with the settings of weights in {shared.path.parent}"
            )

    def free_tensors(self) -> tuple[int, str | None]:
        """Free the tensors in all files. Programs that have a file open or attached keep the old one.

        Return the bytes, and why the first of the files that keep their tensors does.
        """
        freed = 0
        reason = None
        for file, identity in self.identities.items():
            if file in self.released:
                continue
            try:
                freed += _free_tensors(Path(file), identity, self._directory)
            except (OSError, FormatError) as error:
                reason = reason or str(error)
        return freed, reason


def release(server: ModelServer, loaded: Loaded, checkpoint: ModelFiles | None, obstacle: str | None) -> None:
    """Free the tensors of a checkpoint if all ranks use published weights. All ranks call this.

    ``checkpoint``: None if the engine does not share its weights. ``obstacle``: why others still need the tensors.
    """
    if not server.all_agree(loaded.shared is not None):
        obstacle = "the weights of this engine are its own"
    if obstacle is None and loaded.shared is not None:
        loaded.shared.keep()
    if server.ranks.rank_in_group != 0:
        return
    freed = 0
    if obstacle is None and checkpoint is not None:
        freed, obstacle = checkpoint.free_tensors()
    if obstacle is not None:
        server.logger.warning("The checkpoint keeps its tensors: %s", obstacle)
    if freed:
        server.logger.info(
            "Freed the tensors of the checkpoint (%s), since its weights are published. An engine with other settings "
            "needs the checkpoint again",
            bytes_text(freed),
        )


def _identity(path: str, directory: Path) -> list[Any]:
    status = os.stat(path)
    # A new mode or name sets the change time, too, and leaves the contents. A mount counts how often these change, and
    # gives no file the inode number of another one.
    changes = _attribute(path, "changes") if status.st_dev == os.stat(directory).st_dev else 0
    changed = f"{changes} changes" if changes else status.st_ctime_ns
    return [os.path.basename(path), status.st_ino, status.st_size, status.st_mtime_ns, changed]


def _attribute(path: str, name: str) -> int:
    try:
        return int(os.getxattr(path, f"user.gpufs.{name}"))
    except OSError:  # not on a mount
        return 0


def _has_access_list(path: Path) -> bool:
    try:
        return bool(os.getxattr(path, "system.posix_acl_access"))
    except OSError as error:
        return error.errno not in (ENODATA, EOPNOTSUPP)


def _identity_before(path: str) -> list[Any] | None:
    """Return the identity that a file had before it freed its tensors; None if it has them."""
    status = os.stat(path)
    size = status.st_size
    if (
        not stat.S_ISREG(status.st_mode)
        or size % safetensors.DATA_ALIGNMENT
        or size > safetensors.LENGTH_BYTES + safetensors.MAX_HEADER_BYTES
    ):
        return None  # as of nearly all files with tensors: these are not read
    try:
        with open(path, "rb", buffering=0) as file:
            length = safetensors.header_bytes(file.read(safetensors.LENGTH_BYTES), size)
            if safetensors.LENGTH_BYTES + length < size:
                return None
            metadata = safetensors.parse_json(file.read(length))["__metadata__"]
            identity = safetensors.parse_json(metadata[safetensors.RELEASED_KEY].encode())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the server reports what is wrong with it
    return identity if type(identity) is list else None


def _free_tensors(path: Path, identity: list[Any], directory: Path) -> int:
    """Replace a file by its header; return the bytes that this frees. FormatError if it must stay as it is."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{path} is a link")
    if not is_on_mount(path):
        raise FormatError(f"{path} does not lie on a mount")
    if status.st_uid != os.geteuid():
        raise FormatError(f"{path} belongs to user {status.st_uid}")
    with path.open("rb", buffering=0) as file:
        _, header = safetensors.read_header(BoundedFile.of(file.fileno()))
    metadata = {**(header.metadata or {}), safetensors.RELEASED_KEY: json.dumps(identity)}
    with TensorFile(path) as new:
        new.write(safetensors.build_header(header.entries.items(), metadata))
        if _identity(str(path), directory) != identity:
            raise FormatError(f"{path} has changed since it was loaded")
        new.take_name()
    return status.st_size
