"""The options of `gpufs cp`."""

from __future__ import annotations

from typing import NamedTuple

from gpufs.copying.types import CopyOptions, Fastpath


class CpOptions(NamedTuple):
    """The options of the command. ``archive`` implies recursive and preserve. ``progress`` None: on a terminal.

    ``shell`` and ``remote_gpufs``: of the other machine, None for ssh and gpufs.
    """

    recursive: bool
    dereference: bool
    preserve: bool
    archive: bool
    no_clobber: bool
    partial: bool
    verify: bool
    fsync: bool
    jobs: int
    fastpath: Fastpath
    verbose: bool
    json: bool
    progress: bool | None
    shell: str | None = None
    remote_gpufs: str | None = None

    @property
    def of_each_copy(self) -> CopyOptions:
        """Those that concern single files."""
        return CopyOptions(self.fastpath, self.fsync, self.verify, self.preserve, self.partial)
