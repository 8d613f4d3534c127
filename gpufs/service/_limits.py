"""How much clients may use."""

import resource
from dataclasses import dataclass
from typing import Final

_DESCRIPTORS_OF_A_MESSAGE: Final = 4  # of this process, at most: the two that came with it, and the engine's own
_SHARE_OF_DESCRIPTORS: Final = 8  # a user may take one of so many parts


@dataclass(frozen=True, slots=True)
class Limits:
    """How much clients may use. Times in seconds. Root and the mount's owner have four times the shares of a user."""

    connections: int = 1024  # of all users together except root and the mount's owner
    connections_per_user: int = 256  # a program that has files attached keeps one
    requests: int = 16  # in progress on one connection
    attachments: int = 4096  # of one connection
    attachments_per_user: int = 16384
    private_share: float = 0.5  # of a device's memory, for private copies of one user except root and the mount's owner
    threads: int = 4  # that one connection may block on its files
    threads_per_user: int = 16
    closers_per_user: int = 4  # threads that close what came with a user's messages
    ends_per_user: int = 2  # threads that end the leases and registrations of a user's closed connections
    turns: int = 4  # requests of a user that the loop works on at a time
    messages: int = 512  # of a user, whose descriptors are open here
    hello: float = 15.0  # until the first message
    prepare: float = 30.0  # for a file's server to answer before a copy starts
    send: float = 10.0  # for a client to receive a result
    progress: float = 0.02  # the least time between two progress messages
    last_send: float = 1.0  # for a client to receive a result when the mount is ending
    abandoned: float = 1.0  # for a thread that still works for a copy that was cancelled before it started
    registrations_per_user: int = 256
    withdrawal: float = 5.0  # for what uses memory that a client withdraws
    grace: float = 5.0  # for a cancelled copy to end and its files to be closed

    def messages_per_user(self) -> int:
        """``messages``, or fewer where this process may have few descriptors."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(min(self.messages, most // (_SHARE_OF_DESCRIPTORS * _DESCRIPTORS_OF_A_MESSAGE)), self.requests)
