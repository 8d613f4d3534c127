"""The messages between a mount's daemon and its clients; docs/protocol.md describes them.

A message is one SOCK_SEQPACKET packet: a msgpack map, at most MAX_MESSAGE bytes, its kind under "type". Every field of
a kind is there, and no other: both sides know the version they speak.
"""

import errno
import itertools
import math
import os
import socket
import stat
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeAlias, cast, get_args

import msgpack

from gpufs.modes import MODES

Check: TypeAlias = Callable[[Any], bool]

VERSION: Final = 1
MAX_MESSAGE: Final = 16384
MAX_DESCRIPTORS: Final = 2  # in a client's message
MAX_PIECES: Final = 253  # descriptors in one message of the daemon; the kernel takes no more (SCM_MAX_FD)
MAX_MEMORY_PIECES: Final = 1024  # of one registration
MAX_TEXT: Final = 1024  # characters of a text in a message
MAX_OFFSET: Final = (1 << 63) - 1

LOAD: Final = "load"  # from the host's file into the buffer
STORE: Final = "store"  # from the buffer into the host's file
FASTPATH: Final = ("auto", "off", "require")
SYNC: Final = ("none", "data", "full")
# How a client passes on its memory: a file in memory, descriptors of a GPU's physical memory, the vendor's handle.
ShareKind: TypeAlias = Literal["file", "descriptor", "ipc"]
SHARE_KINDS: Final[tuple[ShareKind, ...]] = ("file", "descriptor", "ipc")
HANDLE_BYTES: Final = 64
NO_LIMIT: Final = -1  # instead of bytes
DEFAULT_LIMIT: Final = -2  # as for users without a limit of their own; directories have none then

_INT = struct.Struct("@i")


class ProtocolError(OSError):
    """The other side sent what the protocol does not allow; nothing more can be said to it."""

    def __init__(self, message: str, error: int = errno.EPROTO) -> None:
        super().__init__(error, message)


def _integer(least: int, most: int) -> Check:
    return lambda value: type(value) is int and least <= value <= most


def _one_of(*values: str) -> Check:
    return lambda value: type(value) is str and value in values


def _text(value: Any) -> bool:
    return type(value) is str and len(value) <= MAX_TEXT


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _number(most: float) -> Check:
    return lambda value: type(value) in (int, float) and 0 <= value <= most


def _list(least: int, most: int, check: Check) -> Check:
    return lambda value: type(value) is list and least <= len(value) <= most and all(map(check, value))


def _counts(value: Any) -> bool:
    return type(value) is dict and len(value) <= 16 and all(_text(key) and _count(item) for key, item in value.items())


_count = _integer(0, (1 << 64) - 1)
_offset = _integer(0, MAX_OFFSET)

# Types of fields, each with what a received value must fulfil.
Id = Annotated[int, _integer(1, (1 << 32) - 1)]
Count = Annotated[int, _count]
Counts = Annotated[dict[str, int], _counts]
Offset = Annotated[int, _offset]
Errno = Annotated[int, _integer(0, 4095)]
Text = Annotated[str, _text]
Texts = Annotated[list[str], _list(0, 64, _text)]
Sizes = Annotated[list[int], _list(0, MAX_PIECES, _count)]
Flag = Annotated[bool, lambda value: type(value) is bool]


@dataclass(frozen=True)
class Hello:
    """The client's first message: the versions it speaks and who it is, for logs."""

    TYPE: ClassVar[str] = "hello"
    versions: Annotated[list[int], _list(1, 16, _integer(1, 1 << 16))]
    program: Text


@dataclass(frozen=True)
class Welcome:
    """The daemon's answer: the version that is spoken from now on and how many requests may be under way."""

    TYPE: ClassVar[str] = "welcome"
    version: Id
    server: Text
    requests: Count


@dataclass(frozen=True)
class Copy:
    """Asks for a copy between the two descriptors that come with it: the host's file, then the file on the mount.

    Offsets and size in bytes; size None: up to the end of the source. ``sync`` is for the host's file, after a store.
    ``progress``: seconds between two progress messages, 0 for none.
    """

    TYPE: ClassVar[str] = "copy"
    id: Id
    direction: Annotated[str, _one_of(LOAD, STORE)]
    host_offset: Offset = 0
    offset: Offset = 0
    size: Annotated[int | None, _optional(_offset)] = None
    fastpath: Annotated[str | None, _optional(_one_of(*FASTPATH))] = None
    sync: Annotated[str, _one_of(*SYNC)] = "none"
    progress: Annotated[float, _number(3600)] = 0.0


@dataclass(frozen=True)
class Cancel:
    """Ends a copy; its result comes as ever. One that is not under way is not an error: it may just have ended."""

    TYPE: ClassVar[str] = "cancel"
    id: Id


@dataclass(frozen=True)
class Register:
    """Makes memory of the client the contents of a file that it has just created.

    Its descriptor comes with it, open for writing. Then comes for "file" that of the memory, and for "descriptor" a
    socket from which the daemon takes the memory's pieces (:func:`send_pieces`); "ipc" has a ``handle``. The memory
    begins ``offset`` bytes into what these stand for. ``pci_address``: of the GPU, "" for memory of the host.
    """

    TYPE: ClassVar[str] = "register"
    id: Id
    kind: Annotated[ShareKind, _one_of(*SHARE_KINDS)]
    offset: Offset
    size: Annotated[int, _integer(1, MAX_OFFSET)]
    writable: Flag = True
    pci_address: Text = ""
    handle: Annotated[bytes, lambda value: type(value) is bytes and len(value) in (0, HANDLE_BYTES)] = b""


@dataclass(frozen=True)
class Unregister:
    """Ends a registration: the file loses its names, and its contents are gone."""

    TYPE: ClassVar[str] = "unregister"
    id: Id


@dataclass(frozen=True)
class SetQuota:
    """Sets a limit, in bytes, NO_LIMIT or DEFAULT_LIMIT. The descriptor of a directory comes with it.

    ``uid``: a user's limit on the device of that directory, or with the root of the mount on every device. None: a
    limit for all files below the directory.
    """

    TYPE: ClassVar[str] = "set_quota"
    id: Id
    uid: Annotated[int | None, _optional(_integer(0, (1 << 32) - 2))]
    limit: Annotated[int, _integer(DEFAULT_LIMIT, MAX_OFFSET)]


@dataclass(frozen=True)
class Progress:
    """How far a copy is. ``moved``: bytes anywhere in the range; ``paths``: those bytes by the path that moved them."""

    TYPE: ClassVar[str] = "progress"
    id: Id
    total: Count
    moved: Count
    paths: Counts


@dataclass(frozen=True)
class Result:
    """The end of a copy, exactly one for each. ``done``: bytes from the start without a gap, also after a failure."""

    TYPE: ClassVar[str] = "result"
    id: Id
    error: Errno
    device_code: Annotated[int, _integer(-(1 << 31), (1 << 31) - 1)]
    message: Text
    done: Count
    paths: Counts
    refusals: Texts
    seconds: Annotated[float, _number(math.inf)]


@dataclass(frozen=True)
class Attach:
    """Asks for the memory behind the file on the mount whose descriptor comes with it. The lease has the number ``id``.

    ``mode``: READ; READ_WRITE, for which the descriptor must be open for reading and writing; or COPY_ON_WRITE: the
    memory of a GPU is then always a copy, and the client maps memory of the host privately.
    """

    TYPE: ClassVar[str] = "attach"
    id: Id
    mode: Annotated[str, _one_of(*MODES)]


@dataclass(frozen=True)
class Refresh:
    """Asks for the memory from ``start`` on that the file of a lease has by now. Answered as Attach is."""

    TYPE: ClassVar[str] = "refresh"
    id: Id
    start: Offset


@dataclass(frozen=True)
class Detach:
    """Ends a lease. The end of the connection ends all of them."""

    TYPE: ClassVar[str] = "detach"
    id: Id


@dataclass(frozen=True)
class Revoke:
    """Ends all leases on the file whose descriptor comes with it. Only for its owner, root and the mount's owner."""

    TYPE: ClassVar[str] = "revoke"
    id: Id


@dataclass(frozen=True)
class Attached:
    """The answer to Attach and Refresh; ``pieces`` pieces of memory follow in Pieces messages unless ``error`` is set.

    ``size``: of the file in bytes. ``driver``, ``pci_address``: the device; ``device``: its number in the mount.
    ``private``: the memory is a copy of the file's contents, for this client alone.
    """

    TYPE: ClassVar[str] = "attached"
    id: Id
    error: Errno = 0
    message: Text = ""
    driver: Text = ""
    pci_address: Text = ""
    device: Annotated[int, _integer(0, 1 << 16)] = 0
    size: Offset = 0
    private: Flag = False
    pieces: Annotated[int, _integer(0, 1 << 32)] = 0


@dataclass(frozen=True)
class Pieces:
    """Pieces of memory, in the file's order, each with a descriptor. Offsets and sizes in bytes of the file."""

    TYPE: ClassVar[str] = "pieces"
    id: Id
    offsets: Sizes
    sizes: Sizes


@dataclass(frozen=True)
class Done:
    """The answer to the other requests about leases, memory and limits: ``error`` is 0, or ``message`` says why not."""

    TYPE: ClassVar[str] = "done"
    id: Id
    error: Errno = 0
    message: Text = ""


@dataclass(frozen=True)
class Goodbye:
    """The daemon's last message on a connection that it ends, and why."""

    TYPE: ClassVar[str] = "goodbye"
    error: Errno
    message: Text


ClientMessage = Hello | Copy | Cancel | Attach | Refresh | Detach | Register | Unregister | SetQuota | Revoke
ServerMessage = Welcome | Progress | Result | Attached | Pieces | Done | Goodbye


class _Kind(NamedTuple):
    message: type
    checks: dict[str, Check]  # by field


def _kinds(messages: Any) -> dict[str, _Kind]:
    return {
        kind.TYPE: _Kind(kind, {field.name: cast(Any, field.type).__metadata__[0] for field in fields(kind)})
        for kind in get_args(messages)
    }


_CLIENT: Final = _kinds(ClientMessage)
_SERVER: Final = _kinds(ServerMessage)


def encode(message: ClientMessage | ServerMessage) -> bytes:
    """The packet of a message."""
    packed: bytes = msgpack.packb({"type": message.TYPE, **vars(message)})
    return packed


def _decode(data: bytes, kinds: Mapping[str, _Kind]) -> Any:
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"a message of more than {MAX_MESSAGE} bytes")
    try:
        content = msgpack.unpackb(data)
    except ValueError:
        raise ProtocolError("a message that is not msgpack") from None
    if type(content) is not dict:
        raise ProtocolError("a message that is not a map")
    name = content.pop("type", None)
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError("a message of an unknown type")
    if content.keys() != kind.checks.keys():
        raise ProtocolError(f"a {name} message with missing or unknown fields")
    for field, check in kind.checks.items():
        if not check(content[field]):
            raise ProtocolError(f"a {name} message whose {field} is not allowed")
    return kind.message(**content)


def decode_client(data: bytes) -> ClientMessage:
    """The message in a client's packet. ProtocolError when it is none."""
    message: ClientMessage = _decode(data, _CLIENT)
    return message


def decode_server(data: bytes) -> ServerMessage:
    """The message in the daemon's packet. ProtocolError when it is none."""
    message: ServerMessage = _decode(data, _SERVER)
    return message


def shorten(text: str) -> str:
    """A text that fits into a message."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def close_all(descriptors: Sequence[int]) -> None:
    """Closes descriptors, whatever their closing says. May block as their file systems do."""
    for fd in descriptors:
        try:
            os.close(fd)
        except OSError:
            pass


def receive(
    sock: socket.socket, most: int = MAX_DESCRIPTORS, discard: Callable[[list[int]], None] = close_all
) -> tuple[bytes, list[int]]:
    """One packet and the descriptors that came with it, which are the caller's and close on exec; b"" at the end.

    Waits as the socket does. ProtocolError for a packet that is too large or has more than ``most`` descriptors, EMFILE
    if this process has no space for them; ``discard`` closes all that had come then.
    """
    space = socket.CMSG_SPACE(most * _INT.size)
    data, ancillary, flags, _ = sock.recvmsg(MAX_MESSAGE + 1, space, socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = content[: len(content) - len(content) % _INT.size]
            descriptors += [number for (number,) in _INT.iter_unpack(whole)]
    problem = None
    if flags & socket.MSG_TRUNC or len(data) > MAX_MESSAGE:
        problem = ProtocolError(f"a message of more than {MAX_MESSAGE} bytes")
    elif flags & socket.MSG_CTRUNC and len(descriptors) < most:
        problem = ProtocolError("no descriptor is free to take those of a message", errno.EMFILE)
    elif flags & socket.MSG_CTRUNC:
        problem = ProtocolError(f"a message with more than {most} descriptors")
    if problem:
        discard(descriptors)
        raise problem
    return data, descriptors


def send(sock: socket.socket, message: ClientMessage | ServerMessage, descriptors: Sequence[int] = ()) -> None:
    """Sends one message, with copies of the descriptors. Waits as the socket does."""
    ancillary = []
    if descriptors:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(map(_INT.pack, descriptors)))]
    sock.sendmsg([encode(message)], ancillary, socket.MSG_NOSIGNAL)


# ---- the pieces of a client's memory, which wait in a socket of their own ----


def send_pieces(sock: socket.socket, offset: int, pieces: Sequence[tuple[int, int]]) -> int:
    """Puts pieces of memory into a socket, for the daemon to take. Returns the end of the last one.

    ``pieces``: descriptor and size in bytes of each, at most MAX_PIECES; the first is at ``offset``. OSError E2BIG if
    the socket takes no more of them.
    """
    sizes = [size for _, size in pieces]
    offsets = list(itertools.accumulate(sizes, initial=offset))
    try:
        send(sock, Pieces(1, offsets[:-1], sizes), [fd for fd, _ in pieces])
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS):
            raise
        text = "more pieces than may be under way: raise the limit of open files (ulimit -n)"
        raise OSError(errno.E2BIG, text) from None
    return offsets[-1]


def receive_pieces(fd: int, taken: list[int]) -> list[tuple[int, int, int]]:
    """The pieces in such a socket, which the client has filled and closed: offset, size and descriptor of each.

    All descriptors that came are in ``taken`` afterwards, also after a failure; the caller closes them. Never waits.
    OSError EINVAL for anything else than such a socket, E2BIG for more than MAX_MEMORY_PIECES.
    """
    bad = "the pieces of the memory are not as they should be"
    found: list[tuple[int, int, int]] = []
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):  # socket.socket() would leave the duplicate open
        raise OSError(errno.EINVAL, bad)
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            if (sock.family, sock.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
                raise OSError(errno.EINVAL, "the memory does not come in a socket of packets")
            sock.setblocking(False)
            while True:
                data, descriptors = receive(sock, MAX_PIECES, taken.extend)
                taken += descriptors
                if not data and not descriptors:
                    return found
                message = decode_server(data)
                if (
                    not isinstance(message, Pieces)
                    or not descriptors  # packets without any could follow each other for ever
                    or not len(message.offsets) == len(message.sizes) == len(descriptors)
                ):
                    raise OSError(errno.EINVAL, bad)
                found += zip(message.offsets, message.sizes, descriptors, strict=True)
                if len(found) > MAX_MEMORY_PIECES:
                    raise OSError(errno.E2BIG, f"the memory is in more than {MAX_MEMORY_PIECES} pieces")
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EPROTO):
            raise OSError(errno.EINVAL, bad) from None
        raise
