"""How much clients may use."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """How much clients may use. Times in seconds."""

    connections: int = 1024  # of all users together except root and the mount's owner
    connections_per_user: int = 256  # a program that has files attached keeps one
    requests: int = 16  # in progress on one connection
    attachments: int = 4096  # of one connection
    attachments_per_user: int = 16384
    private_share: float = 0.5  # of a device's memory, for private copies of one user except root and the mount's owner
    threads: int = 4  # that one connection may block on its files
    hello: float = 15.0  # until the first message
    prepare: float = 30.0  # for a file's server to answer before a copy starts
    send: float = 10.0  # for a client to receive a result
    progress: float = 0.02  # the least time between two progress messages
    last_send: float = 1.0  # for a client to receive a result when the mount is ending
    abandoned: float = 1.0  # for a thread that still works for a copy that was cancelled before it started
    registrations_per_user: int = 256
    withdrawal: float = 5.0  # for what uses memory that a client withdraws
    grace: float = 5.0  # for a cancelled copy to end and its files to be closed
