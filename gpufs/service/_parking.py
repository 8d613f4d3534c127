"""Parks files and brings them back at the request of a shell: programs that use them are asked to sleep and to wake."""

import functools
import logging
from collections.abc import Sequence
from contextlib import suppress
from errno import EBUSY, EPERM
from typing import Final

import trio

from gpufs.protocol import Asked
from gpufs.service import _checks
from gpufs.service._channel import ClientChannel, path_behind
from gpufs.service._scope import Descriptor
from gpufs.service._served_mount import Holder, ServedMount
from gpufs.syscalls import trusted
from gpufs.threads import run_to_the_end

_PAUSE: Final = 0.02  # between two looks whether programs sleep by now
_NAMED: Final = 5  # programs in a message


class Parking:
    """Serves Park, BringBack and Listen for all connections of a mount."""

    def __init__(self, served: ServedMount) -> None:
        self._served = served
        self._listeners: set[ClientChannel] = set()

    def listen(self, channel: ClientChannel) -> None:
        """Send this connection what is asked of its process, until leave()."""
        self._listeners.add(channel)

    def leave(self, channel: ClientChannel) -> None:
        """Send this connection nothing more."""
        self._listeners.discard(channel)

    async def park(self, channel: ClientChannel, descriptors: Sequence[Descriptor], wait: float) -> None:
        """Serve Park. OSError EPERM, EBUSY with the programs that do not sleep, and as ServedMount.park()."""
        ino = self._check(channel, descriptors)
        asked = self._ask(self._served.holders.awake_on(ino), Asked(ino, "sleep"))
        if asked:
            with trio.move_on_after(wait):
                await self._until_asleep(ino)
        if awake := self._served.holders.awake_on(ino):
            raise OSError(EBUSY, _who_is_awake(awake, asked, wait))
        work = functools.partial(self._served.park, ino)
        if await run_to_the_end(work, channel.user.calls):
            channel.log(logging.INFO, "parked inode %d", ino)

    async def _until_asleep(self, ino: int) -> None:
        # Leases go to sleep and end on threads, in several ways.
        while self._served.holders.awake_on(ino):  # noqa: ASYNC110
            await trio.sleep(_PAUSE)

    async def bring_back(self, channel: ClientChannel, descriptors: Sequence[Descriptor]) -> None:
        """Serve BringBack. OSError EPERM, and as Mount.inode_bring_back()."""
        ino = self._check(channel, descriptors)
        path = path_behind(descriptors[0].fd)
        await run_to_the_end(functools.partial(self._served.bring_back, ino), channel.user.calls)
        self._ask([holder for holder, _ in self._served.holders.leases_on(ino)], Asked(ino, "wake"))
        # A version that had the name before has none now. Programs that sleep on it take over the newest one.
        for older in self._served.holders.asleep_at(path):
            with suppress(OSError):  # gone by now
                if older.ino != ino and self._may_move(channel, older.ino):
                    self._ask([older], Asked(older.ino, "wake"))

    def _check(self, channel: ClientChannel, descriptors: Sequence[Descriptor]) -> int:
        ino = _checks.check_revocable(descriptors, self._served.st_dev)
        if not self._may_move(channel, ino):
            raise OSError(EPERM, "only the file's owner, root and the user who mounted may move it")
        return ino

    def _may_move(self, channel: ClientChannel, ino: int) -> bool:
        uid = channel.peer.uid
        return trusted(uid) or self._served.mount.inode_get(ino).uid == uid

    def _ask(self, holders: Sequence[Holder], message: Asked) -> set[int]:
        """Send a message to the programs of these holders that listen; returns their process numbers."""
        processes = {(holder.peer.pid, holder.peer.uid) for holder in holders}
        listening = [each for each in self._listeners if (each.peer.pid, each.peer.uid) in processes]
        for listener in listening:
            listener.send_if_possible(message)
        return {listener.peer.pid for listener in listening}


def _who_is_awake(awake: Sequence[Holder], asked: set[int], wait: float) -> str:
    texts = []
    for peer in dict.fromkeys(holder.peer for holder in awake):
        why = f"has not gone to sleep within {wait:g} s" if peer.pid in asked else "cannot be asked to sleep"
        texts.append(f"{peer} {why}")
    more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return "the file is in use: " + ", ".join(texts[:_NAMED]) + more
