"""What clients may take."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may take. Times in seconds."""

    connections: int = 128  # of all users together but root and the mount's owner
    connections_per_user: int = 32
    bad_connections: int = 20  # of a user within ten seconds: further ones are refused until they are over
    requests: int = 16  # under way on one connection
    threads: int = 4  # that one connection may have waiting for its files
    messages_per_second: int = 500  # of one connection; more are read later
    hello: float = 15.0  # until the first message
    idle: float = 300.0  # without a message or a request under way
    prepare: float = 30.0  # for a file's server to answer before a copy starts
    send: float = 10.0  # for a client to take a result
    progress: float = 0.02  # the least time between two progress messages
    last_send: float = 1.0  # the same when the mount is ending
    abandoned: float = 1.0  # for a thread that still works for a copy which was cancelled before it started
    grace: float = 5.0  # for a cancelled copy to end and its files to be closed
