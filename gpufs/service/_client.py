"""One client: the messages of its connection, and what it has begun."""

import errno
import functools
import logging
import math
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import trio

from gpufs import protocol, threads
from gpufs._version import __version__
from gpufs.protocol import ClientMessage, Done, FinalAnswer, ProtocolError, Request
from gpufs.service import rights
from gpufs.service._channel import ClientChannel, ClientProcess, path_behind
from gpufs.service._client_copies import ClientCopies
from gpufs.service._client_leases import ClientLeases
from gpufs.service._client_registrations import ClientRegistrations
from gpufs.service._kept import KeptClient, Record
from gpufs.service._parking import Parking
from gpufs.service._scope import RequestScope
from gpufs.service._served_mount import ServedMount
from gpufs.service._user import Users
from gpufs.syscalls import trusted

log = logging.getLogger(__name__)


class ClientConnection:
    """Serves one connection until it ends. Owns its socket."""

    def __init__(
        self,
        served: ServedMount,
        users: Users,
        parking: Parking,
        sock: socket.socket,
        peer: ClientProcess,
        number: int,
        kept: KeptClient | None = None,
    ) -> None:
        """``number``: names the connection in logs; ``kept``: what it had in the former daemon."""
        self.peer = peer
        self._sock = sock
        self._served = served
        self._channel = ClientChannel(sock, peer, number, served.limits, users.of(peer.uid))
        self._record = Record(served.keeper, number, sock) if kept is None else kept.record
        self._registrations = ClientRegistrations(self._channel, served, self._record)
        self._leases = ClientLeases(self._channel, served, self._record)
        self._copies = ClientCopies(self._channel, served)
        self._parking = parking
        self._parks = False  # a Park is in progress
        self._adopted = kept is not None
        self._come = 0, 0  # then the first request that has come from the client, and the last one
        if kept is not None:
            for entry, lease in kept.leases:
                self._leases.adopt(entry, lease)
            for registration in kept.registrations:
                self._registrations.adopt(registration)

    @property
    def running(self) -> int:
        """How many copies are in progress."""
        return len(self._copies)

    def copies(self, uid: int) -> list[dict[str, Any]]:
        """The copies in progress that a user may see, for ``.gpufs/activity``."""
        return self._copies.as_list() if trusted(uid) or uid == self.peer.uid else []

    async def run(self) -> None:
        """Returns when the connection has ended; the client's copies are cancelled and its leases end then."""
        limits, channel = self._served.limits, self._channel
        try:
            await self._serve()
        except (BrokenPipeError, ConnectionResetError):
            pass
        except ProtocolError as violation:
            channel.log(logging.INFO, "ended: %s", violation.strerror)
            channel.say_goodbye(violation.errno or errno.EPROTO, str(violation.strerror))
        except trio.TooSlowError:
            channel.log(logging.INFO, "ended: too slow")
            channel.say_goodbye(errno.ETIMEDOUT, "too slow")
        except BaseException:
            # Cancelled comes alone, or as a group from the copies' nursery.
            if trio.current_effective_deadline() == -math.inf:
                channel.say_goodbye(errno.ESHUTDOWN, "the mount is ending")
            raise
        finally:
            if self._record.held:
                with trio.CancelScope(shield=True):
                    await threads.run_to_the_end(self._record.close)
            else:
                self._record.close()
            self._parking.leave(channel)
            self._sock.close()
            channel.leave_place()
            ending = trio.current_effective_deadline() == -math.inf
            await self._registrations.close(limits.last_send if ending else limits.withdrawal)
            with trio.CancelScope(shield=True):
                await self._leases.close(limits.grace)

    async def _greet(self) -> bool:
        """Answer the first message. False if the client has gone."""
        channel = self._channel
        with trio.fail_after(self._served.limits.hello):
            received = None
            while received is None:
                await channel.wait_for_message()
                received = channel.receive()
            message, scope = received
            scope.discard()
            if message is None:
                return False
            rights.of(message, len(scope.descriptors))
            if not isinstance(message, protocol.Hello):
                raise ProtocolError("the first message is not hello")
            if protocol.VERSION not in message.versions:
                raise ProtocolError(f"only version {protocol.VERSION} is spoken here", errno.EPROTONOSUPPORT)
            channel.log(logging.DEBUG, "%r", message.program)
            driver = self._served.mount.engine.driver
            await channel.answer(
                protocol.Welcome(protocol.VERSION, f"gpufs {__version__}", self._served.limits.requests, driver)
            )
        return True

    async def _serve(self) -> None:
        if self._adopted:
            await self._channel.answer(protocol.Replaced())
        elif not await self._greet():
            return
        violation = None
        async with trio.open_nursery() as nursery:
            try:
                await self._read(nursery)
            except (ProtocolError, BrokenPipeError, ConnectionResetError) as error:
                violation = error  # raised outside the nursery, which would wrap it
            nursery.cancel_scope.cancel()
        if violation is not None:
            raise violation

    async def _read(self, nursery: trio.Nursery) -> None:
        channel = self._channel
        while True:
            await channel.wait_for_message()
            async with channel.user.turns:
                received = channel.receive()
                if received is None:
                    continue
                message, scope = received
                if message is None:
                    scope.discard()
                    return
                if self._adopted and isinstance(message, Request) and self._has_come(message):
                    scope.discard()
                    continue
                await self._begin(message, scope, nursery)

    def _has_come(self, request: Request) -> bool:
        """Whether a request was in the queue of an adopted connection already, before the client sent it again."""
        if isinstance(request, protocol.Cancel):
            return False
        first, last = self._come
        self._come = first or request.id, max(last, request.id)
        return 0 < first <= request.id <= last

    async def _begin(self, message: ClientMessage, scope: RequestScope, nursery: trio.Nursery) -> None:
        """Serve a message, or begin to. Its scope ends with it, whatever comes of it."""
        user = self._channel.user
        try:
            right = rights.of(message, len(scope.descriptors))
            sender = rights.Sender(self.peer.uid, self._served, [each.fd for each in scope.descriptors])
            permit = functools.partial(right.check, sender, message)
            match message:
                case protocol.Copy():
                    nursery.start_soon(self._serve_request, message, scope, self._copies.accept(message, scope, permit))
                    return
                case protocol.Attach() | protocol.Refresh() | protocol.Detach() | protocol.Sleep() | protocol.Wake():
                    work = self._leases.accept(message, scope, permit)
                    nursery.start_soon(self._serve_request, message, scope, work, user.turns)
                    return
                case protocol.Park():
                    if self._parks:
                        raise ProtocolError("too many requests at once")
                    parking = functools.partial(self._park, message, scope, permit)
                    self._parks = True
                    nursery.start_soon(self._serve_request, message, scope, parking, user.waits)
                    return
                case protocol.Declined():
                    self._parking.declined(self._channel, message)
                    scope.discard()
                    return
                case protocol.Request():
                    change = functools.partial(self._change, message, scope, permit)
                case _:
                    raise ProtocolError("a second hello")
        except BaseException:
            scope.discard()
            raise
        await self._serve_request(message, scope, change)

    async def _park(self, message: protocol.Park, scope: RequestScope, permit: Callable[[], Any]) -> Done:
        try:
            await self._parking.park(self._channel, scope, message, permit)
        finally:
            self._parks = False
        return Done(message.id)

    async def _change(self, message: Request, scope: RequestScope, permit: Callable[[], Any]) -> Done | None:
        """Serve a request during which no other one of this connection is received."""
        match message:
            case protocol.Cancel():
                self._copies.cancel(message.id)
                return None
            case protocol.Check():
                await self._leases.check(message, scope)
            case protocol.Register():
                await self._registrations.add(message, scope, permit)
            case protocol.Unregister():
                await self._registrations.remove(message.registration)
            case protocol.BringBack():
                await self._parking.bring_back(self._channel, scope, permit)
            case protocol.Listen():
                self._parking.listen(self._channel)
            case protocol.Revoke():
                await self._leases.revoke(permit())
            case protocol.SetQuota():
                self._served.set_limit(permit(), message.uid, message.limit)
                self._channel.log(logging.INFO, "%s of %s", message, path_behind(scope.descriptors[0].fd))
            case _:
                raise ProtocolError(f"nothing serves {type(message).__name__}")
        return Done(message.id)

    async def _serve_request(
        self,
        request: Request,
        scope: RequestScope,
        work: Callable[[], Awaitable[FinalAnswer | None]],
        turns: trio.CapacityLimiter | None = None,
    ) -> None:
        """Do the work of a request in its turn, end its scope, and answer it.

        ``work``: returns the answer, or None if it has sent that itself or there is none.
        """
        try:
            async with turns or nullcontext():
                answer = await work()
        except OSError as failure:
            answer = self._refusal(request, failure)
        except Exception:
            # Not the client's fault, and its leases go on.
            log.exception("a request of %s failed", self.peer, extra={"user": self.peer.uid})
            answer = self._refusal(request, OSError(errno.EIO, "the daemon has failed, and its log says how"))
        finally:
            scope.discard()
        if answer is not None:
            await self._channel.answer(answer)

    def _refusal(self, request: Request, failure: OSError) -> FinalAnswer:
        error = failure.errno or errno.EIO
        text = failure.strerror or os.strerror(error)
        self._channel.log(
            logging.INFO, "%s refused: %s %s", type(request).__name__, errno.errorcode.get(error, error), text
        )
        return request.answer(request.id, error, protocol.shorten(text))
