"""A new daemon takes a mount over from one that has died: what that needs, and how it begins."""

import errno
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

from gpufs import config, engine, mounting
from gpufs.daemon import guard
from gpufs.daemon.keeper import Keeper, Key, MessageKind, new_memfd, receive_held
from gpufs.daemon.logs import Log
from gpufs.daemon.mountpoint import present
from gpufs.daemon.startup import DAEMON, MountRequest, StartFailure
from gpufs.drivers import HOST

_SOCKET: Final = 3  # where the keeper puts a new daemon's socket


@dataclass(frozen=True, slots=True)
class History:
    """The life of a mount before this daemon. Times in seconds since 1970.

    ``deaths``: of daemons, with the time and the cause of the last one, "" if it is not known.
    """

    began: float = field(default_factory=time.time)
    deaths: int = 0
    last_death: float | None = None
    cause: str = ""


def obstacle(values: dict[str, Any], opened: engine.Engine) -> str | None:
    """Return the reason why a mount with these values of the knobs does not survive its daemon; None if it does."""
    if not values["survive"]:
        return "the knob survive is off"
    if values["backing"]:
        return "it shows directories of the host (backing)"
    if values["foreground"]:
        return "it runs in the foreground, where something else watches its process"
    for device in opened.devices:
        if not device.info.keeps_memory:
            return f"memory of {device.info.directory} has no descriptors that another process could hold"
    return None


def prepare(
    keeper: Keeper,
    request: MountRequest,
    logs: Log,
    mount: engine.Mount,
    entry: mounting.MountEntry,
    *,
    connection: int,
    owner: int,
    began: float,
) -> None:
    """Give the keeper what the next daemon needs to begin, and the command that starts it.

    ``connection``: of /dev/fuse. ``owner``: a descriptor of the process with which the mount ends; -1 for none.
    ``began``: when the mount was made.
    """
    listed = {**entry._asdict(), "flags": sorted(entry.flags)}
    lasting = replace(request, config=request.config | _chosen(request, mount.engine))
    text = json.dumps({"request": lasting.encode().decode(), "entry": listed, "began": began}).encode()
    held: dict[int, int] = {
        Key.CONNECTION: connection,
        Key.REQUEST: new_memfd("gpufs-request", text),
    }
    if owner >= 0:
        held[Key.OWNER] = owner
    if logs.fd >= 0 and request.config["log_file"] is None:
        held[Key.LOG] = logs.fd
    keeper.hold(held)
    instruct(keeper, request, entry, survives=True)


def _chosen(request: MountRequest, opened: engine.Engine) -> dict[str, Any]:
    """Return the knobs whose defaults depend on the machine as it is now: files take of its memory."""
    chosen = {"driver": opened.driver, "metadata": config.metadata_memory(request.config["metadata"])}
    if opened.driver == HOST:
        chosen |= {
            "memory": opened.devices[0].info.total_bytes,
            "devices": sum(not each.info.host_tier for each in opened.devices),
        }
    return chosen


def instruct(keeper: Keeper, request: MountRequest, entry: mounting.MountEntry, survives: bool) -> None:
    """Set what the keeper starts after this daemon's death: another daemon if the mount survives, else the guard.

    What survives stays mounted if no daemon can be started: `gpufs restart` starts one later.
    """
    restart = [*DAEMON, "--takeover-fd", str(_SOCKET), request.mountpoint]
    unmount: list[str] = []
    if request.config["auto_unmount"]:
        unmount = guard.command(request.mountpoint, request.config["log_file"], entry.identity)
    keeper.instruct(MessageKind.GIVE_UP, [] if survives else unmount)
    keeper.instruct(MessageKind.RESTART, restart if survives else [])


@dataclass(frozen=True, slots=True)
class Takeover:
    """The state with which a new daemon begins."""

    request: MountRequest
    entry: mounting.MountEntry  # the mount's entry; the last one if it is not where it was mounted any more
    keeper: Keeper
    held: dict[int, int]  # the descriptors that the keeper holds, by :class:`Key`; those of memory are the engine's
    released: list[int]  # handles of files that were closed while there was no daemon
    died: int  # when the former daemon had ended, in nanoseconds of CLOCK_MONOTONIC
    history: History


def leave_to_the_keeper(code: int, logs: Log) -> NoReturn:
    """End this process, once its log is written, and take nothing apart: another daemon finds everything as it is."""
    logs.close()
    os._exit(code)


def reason_of(failure: BaseException) -> str:
    """Return one line about a failure, for a group about its first one."""
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    known = isinstance(failure, StartFailure | OSError)
    return str(failure) if known else f"{type(failure).__name__}: {failure}".rstrip(": ")


def begin(fd: int, mountpoint: str) -> Takeover:
    """Receive everything from the keeper at the other end of a socket. StartFailure if that is not enough."""
    try:
        held, released, died = receive_held(fd)
        if missing := [key.name.lower() for key in (Key.CONNECTION, Key.JOURNAL, Key.REQUEST) if key not in held]:
            raise StartFailure(errno.EINVAL, f"cannot take over: the keeper does not hold {' and '.join(missing)}")
        with open(held[Key.REQUEST], "rb", closefd=False) as file:
            file.seek(0)
            begun = json.load(file)
        keeper = Keeper(mountpoint, held, fd)
    except OSError as failure:
        raise StartFailure.of(failure, "cannot take over: ") from None
    former = mounting.MountEntry(**{**begun["entry"], "flags": frozenset(begun["entry"]["flags"])})
    # Without an entry here the mount may still be elsewhere: bound, in containers, or detached and in use.
    entry = present(former) or former
    request = MountRequest.decode(begun["request"].encode())
    history = _history(begun.get("began", time.time()), held.get(Key.DEATHS))
    return Takeover(request, entry, keeper, held, released, died, history)


def _history(began: float, deaths: int | None) -> History:
    """Return what the keeper has noted; nothing if it is of a version that notes no deaths."""
    if deaths is not None:
        with suppress(ValueError):
            count, last, cause = os.pread(deaths, 1 << 12, 0).decode(errors="replace").split("\n", 2)
            return History(began, int(count), float(last), cause.strip())
    return History(began)
