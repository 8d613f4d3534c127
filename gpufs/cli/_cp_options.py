"""The options of `gpufs cp`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gpufs.client._copy_types import Fastpath


class CpOptions(NamedTuple):
    """The options of the command. ``archive`` implies recursive and preserve. ``progress`` None: on a terminal.

    ``shell`` and ``remote_gpufs``: of the other machine, None for ssh and gpufs.
    """

    recursive: bool = False
    dereference: bool = False
    preserve: bool = False
    archive: bool = False
    no_clobber: bool = False
    partial: bool = False
    verify: bool = False
    fsync: bool = False
    jobs: int = 4
    fastpath: Fastpath = "auto"
    verbose: bool = False
    json: bool = False
    progress: bool | None = None
    shell: str | None = None
    remote_gpufs: str | None = None
