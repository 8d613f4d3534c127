"""Parks files and brings them back at the request of a shell: programs that use them are asked to sleep and to wake."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import EBUSY
from typing import Final

import trio

from gpufs import protocol
from gpufs.protocol import Asked, Declined, Park
from gpufs.service._channel import ClientChannel, ClientProcess
from gpufs.service._kept import Holder
from gpufs.service._scope import RequestScope
from gpufs.service._served_mount import ServedMount

_PAUSE: Final = 0.02  # between two looks whether programs sleep by now
_NAMED: Final = 5  # programs in a message


@dataclass(slots=True)
class _Question:
    """What a request has asked programs. ``declined``: why the first one cannot do it, "" so far."""

    asked: Sequence[ClientChannel]
    declined: str = ""


class Parking:
    """Serves Park, BringBack, Listen and Declined for all connections of a mount."""

    def __init__(self, served: ServedMount) -> None:
        self._served = served
        self._listeners: set[ClientChannel] = set()
        self._numbers = itertools.cycle(range(1, 1 << 32))
        self._questions: dict[int, _Question] = {}  # those that wait, by their numbers

    def listen(self, channel: ClientChannel) -> None:
        """Send this connection what is asked of its process, until leave()."""
        self._listeners.add(channel)

    def leave(self, channel: ClientChannel) -> None:
        """Send this connection nothing more."""
        self._listeners.discard(channel)

    def declined(self, channel: ClientChannel, message: Declined) -> None:
        """Serve Declined."""
        question = self._questions.get(message.question)
        if question is not None and channel in question.asked and not question.declined:
            question.declined = f"the files are in use: {channel.peer} has not gone to sleep: {message.message}"

    async def park(
        self, channel: ClientChannel, scope: RequestScope, message: Park, permit: Callable[[], list[int]]
    ) -> None:
        """Serve Park. OSError EBUSY with the programs that do not sleep, and as ServedMount.move()."""
        served = self._served

        def check() -> tuple[list[int], list[Holder]]:
            inodes = permit()
            served.check_space(inodes, parks=True)  # before anybody is asked
            return inodes, [holder for holder in served.holders.leases_on(inodes) if not holder.asleep]

        inodes, awake = await scope.in_thread(check)
        listening = {_process_of(listener.peer) for listener in self._listeners}
        if deaf := [holder for holder in awake if _process_of(holder.peer) not in listening]:
            raise OSError(EBUSY, _in_use(deaf, "cannot be asked to sleep"))
        number, question = self._ask(awake, "sleep")
        self._questions[number] = question
        try:
            if question.asked:
                with trio.move_on_after(message.wait):
                    await self._until_asleep(inodes, question)
            if question.declined:
                raise OSError(EBUSY, question.declined)
            if busy := [holder for holder in served.holders.leases_on(inodes) if not holder.asleep]:
                raise OSError(EBUSY, _in_use(busy, f"has not gone to sleep within {message.wait:g} s"))
            # If the client ends in between, the thread goes on: all of the files move.
            await scope.in_thread(functools.partial(served.move, inodes, parks=True))
            channel.log(logging.INFO, "parked files")
        except BaseException:
            self._ask(awake, "wake")  # also those that go to sleep later
            raise
        finally:
            del self._questions[number]

    async def _until_asleep(self, inodes: Iterable[int], question: _Question) -> None:
        # Leases go to sleep and end on threads, in several ways. Only the first file in use is looked at again.
        for ino in inodes:
            while self._served.holders.awake_on(ino) and not question.declined:  # noqa: ASYNC110
                await trio.sleep(_PAUSE)

    async def bring_back(self, channel: ClientChannel, scope: RequestScope, permit: Callable[[], list[int]]) -> None:
        """Serve BringBack. OSError as ServedMount.move()."""
        served = self._served

        def move() -> list[Holder]:
            inodes = permit()
            served.move(inodes, parks=False)
            found = [holder for holder in served.holders.leases_on(inodes) if holder.asleep]
            # A version that had the name before has none now. Programs that sleep on it take over the newest one.
            names = tuple(f"/{name}" for ino in inodes if (name := served.name_of(ino)))
            for older in served.holders.asleep():
                with suppress(OSError):  # gone by now
                    if served.name_of(older.ino) is None and older.path.endswith(names):
                        found += [older] if served.owned_by(channel.peer.uid, older.ino) else []
            return found

        self._ask(await scope.in_thread(move), "wake")

    def _ask(self, holders: Iterable[Holder], what: protocol.Move) -> tuple[int, _Question]:
        """Ask the programs of these holders that listen, each once for all of its files."""
        number = next(self._numbers)
        by_process: dict[tuple[int, int], list[int]] = {}
        for holder in holders:
            by_process.setdefault(_process_of(holder.peer), []).append(holder.ino)
        asked = [listener for listener in self._listeners if _process_of(listener.peer) in by_process]
        for listener in asked:
            inodes = list(dict.fromkeys(by_process[_process_of(listener.peer)]))
            listener.send_if_possible(Asked(number, inodes[: protocol.MAX_FILES], what))
        return number, _Question(asked)


def _process_of(peer: ClientProcess) -> tuple[int, int]:
    return peer.pid, peer.uid


def _in_use(awake: Sequence[Holder], why: str) -> str:
    peers = list(dict.fromkeys(holder.peer for holder in awake))
    more = f" and {len(peers) - _NAMED} more" if len(peers) > _NAMED else ""
    return "the files are in use: " + ", ".join(f"{peer} {why}" for peer in peers[:_NAMED]) + more
