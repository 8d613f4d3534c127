"""What the service needs of the engine and of a mount, and how the real ones give it."""

import os
import stat
import time
from dataclasses import dataclass, field
from errno import EINVAL, EISDIR, ENOENT
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

if TYPE_CHECKING:
    from gpufs import engine

# What the client says to what the engine calls it: its "auto" is "as the mount is configured".
_FASTPATH: Final[dict[str | None, Literal["auto", "on", "off", "require"]]] = {
    None: "auto",
    "auto": "on",
    "off": "off",
    "require": "require",
}
# As long as a write through the mount waits for the memory of files that were removed just now.
_SPACE_SECONDS: Final = 3.0
_SPACE_LOOK: Final = 0.002


class Closable(Protocol):
    """Something that is held and has to be given back."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class State:
    """How far a transfer is. Bytes; ``done``: from the start without a gap; ``error``: errno, once it has ended."""

    total: int = 0
    moved: int = 0
    done: int = 0
    paths: dict[str, int] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    error: int = 0
    device_code: int = 0
    message: str = ""
    ended: bool = True


class Transfer(Closable, Protocol):
    """A copy under way."""

    @property
    def event_fd(self) -> int:
        """A descriptor of the transfer's that is readable once it has ended."""

    def state(self) -> State: ...

    def cancel(self) -> None:
        """Ends it soon; does not block."""


class Backend(Protocol):
    """The engine, as the service sees it. Any thread may call; all may block, except where it says otherwise."""

    def open_host(self, fd: int) -> Closable:
        """The host's file behind a descriptor, which stays the caller's. OSError when it cannot be used."""

    def open_buffer(self, ino: int) -> Closable:
        """The buffer of an inode of the mount, which lives until it is closed. OSError EINVAL where there is none."""

    def start(
        self,
        direction: str,
        host: Any,
        buffer: Any,
        *,
        host_offset: int,
        offset: int,
        size: int | None,
        fastpath: str | None,
        sync: str,
        client: int,
    ) -> Transfer:
        """Starts a transfer between what open_host() and open_buffer() gave. OSError when it is not possible."""

    def await_space(self, buffer: Any, size: int) -> None:
        """Before a load of so many bytes: waits a little for the memory of files that were removed just now."""

    def written(self, ino: int) -> None:
        """The contents of an inode change: sets its times, takes its set-id bits, tells the kernel without waiting."""


class _EngineTransfer:
    """A transfer of the engine."""

    def __init__(self, transfer: "engine.Transfer") -> None:
        self._transfer = transfer
        self.event_fd = transfer.event_fd

    def state(self) -> State:
        now = self._transfer.progress()
        failure = self._transfer.failure() if now.error else None
        paths = {
            "fastpath": now.fastpath_bytes,
            "fallback": now.fallback_bytes,
            "hole": now.hole_bytes,
        }
        return State(
            now.total,
            now.moved,
            now.prefix,
            {path: count for path, count in paths.items() if count},
            list(now.refusals),
            now.error,
            now.device_code,
            str(failure.strerror) if failure else "",
            now.state == "done",
        )

    def cancel(self) -> None:
        self._transfer.cancel()

    def close(self) -> None:
        self._transfer.close()


class EngineBackend:
    """A mount of the engine."""

    def __init__(self, mount: "engine.Mount") -> None:
        self._mount = mount

    def open_host(self, fd: int) -> Closable:
        # The engine is loaded by whoever mounts; clients and their tests do without it.
        from gpufs.engine import BackingFile

        return BackingFile(self._mount.engine, fd)

    def open_buffer(self, ino: int) -> Closable:
        try:
            return self._mount.buffer(ino)
        except OSError as error:
            # The engine knows nothing of control files and files below backing/. What a client has open is never gone.
            if error.errno in (ENOENT, EINVAL, EISDIR):
                raise OSError(EINVAL, "the file on the mount holds no device memory") from None
            raise

    def start(
        self,
        direction: str,
        host: Any,
        buffer: Any,
        *,
        host_offset: int,
        offset: int,
        size: int | None,
        fastpath: str | None,
        sync: str,
        client: int,
    ) -> Transfer:
        from gpufs.engine import Transfer as EngineTransfer

        transfer = EngineTransfer(
            cast(Any, direction),
            host,
            buffer,
            file_offset=host_offset,
            buffer_offset=offset,
            size=size,
            fastpath=_FASTPATH[fastpath],
            sync=cast(Any, sync),
            sparse=True,
            client=client,
        )
        return _EngineTransfer(transfer)

    def await_space(self, buffer: Any, size: int) -> None:
        deadline = time.monotonic() + _SPACE_SECONDS
        # In this order: what is not to come any more is free.
        while (
            self._mount.statistics()["table"]["orphan_bytes"]
            and buffer.engine.devices[buffer.info.device].memory().free_bytes < size
            and time.monotonic() < deadline
        ):
            time.sleep(_SPACE_LOOK)

    def written(self, ino: int) -> None:
        self._mount.inode_written(ino)


def without_set_id(mode: int) -> int:
    """The mode after a write; set-gid without group execution is mandatory locking's old sign and stays."""
    mode &= ~stat.S_ISUID
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP else mode


def drop_set_id(fd: int) -> None:
    """Takes the set-id bits of the host's file behind a descriptor, as the client's own write would have."""
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if without_set_id(mode) != mode:
        os.fchmod(fd, without_set_id(mode))
