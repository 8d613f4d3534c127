"""The leases of mounts, as the mounts report them."""

import os
from collections.abc import Sequence
from errno import EPROTO
from typing import Any, Final

from gpufs import mounting
from gpufs.cli import _mounts
from gpufs.cli._output import bytes_text
from gpufs.cli._untrusted import SIZE, TIME, items, parse, record, text

_LEASES_FILE: Final = ".gpufs/leases"
LEASES: Final = record(
    leases=items(
        record(
            path=text,
            inode=SIZE,
            pid=SIZE,
            uid=SIZE,
            program=text,
            mode=text,
            private=lambda value: isinstance(value, bool),
            bytes=SIZE,
            since=TIME,
        )
    )
)


def collect(entries: Sequence[mounting.MountEntry], timeout: float) -> list[list[dict[str, Any]] | OSError]:
    """The leases of each mount, at most ``timeout`` seconds later; OSError for one that does not answer."""
    files = _mounts.read_files([os.path.join(entry.mountpoint, _LEASES_FILE) for entry in entries], timeout)
    return [_parsed(content) if isinstance(content, bytes) else content for content in files]


def _parsed(content: bytes) -> list[dict[str, Any]] | OSError:
    try:
        leases: list[dict[str, Any]] = parse(content, LEASES)["leases"]
    except ValueError as error:
        return OSError(EPROTO, f"{_LEASES_FILE} is not understood: {error}")
    return leases


def named(lease: dict[str, Any]) -> str:
    """A lease, for people: "python3 (1234), 1.5G of /mnt/gpu0/file"."""
    return f"{lease['program'] or 'a program'} ({lease['pid']}), {bytes_text(lease['bytes'])} of {lease['path']}"
