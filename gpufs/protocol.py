"""The messages between a mount's daemon and its clients; docs/protocol.md describes them.

A message is one SOCK_SEQPACKET packet: a msgpack map, at most MAX_MESSAGE bytes, its kind under "type". Every field of
a kind is there, and no other: both sides know the version they speak.

A new message is a class here, with the bounds of its fields, and, if it is a Request whose answer is not Done, with its
``answer``; a row with the allowed senders in service/rights.py and docs/security.md; a case in service/_client.py; a
method in client/_connection.py; a row in docs/protocol.md.
"""

import errno
import itertools
import os
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, TypeVar, Union

import msgspec
from msgspec import Meta

from gpufs.modes import Mode
from gpufs.syscalls import close_all

VERSION: Final = 1
MAX_MESSAGE: Final = 16384
MAX_DESCRIPTORS: Final = 2  # in a client's message
MAX_PIECES: Final = 253  # descriptors in one message of the daemon; the kernel takes no more (SCM_MAX_FD)
MAX_MEMORY_PIECES: Final = 1024  # of one registration
MAX_FILES: Final = 1500  # files in one request, which moves all of them or none
MAX_TEXT: Final = 1024  # characters of a text in a message
MAX_OFFSET: Final = (1 << 63) - 1

Direction: TypeAlias = Literal["load", "store"]  # from the host's file into the buffer, or back
Fastpath: TypeAlias = Literal["auto", "off", "require"]
Sync: TypeAlias = Literal["none", "data", "full"]
# How a client passes on its memory: a file in memory, descriptors of a GPU's physical memory, the vendor's handle.
ShareKind: TypeAlias = Literal["file", "descriptor", "ipc"]
Move: TypeAlias = Literal["sleep", "wake"]
HANDLE_BYTES: Final = 64
NO_LIMIT: Final = -1  # instead of bytes
DEFAULT_LIMIT: Final = -2  # as for users without a limit of their own; directories have none then

AnyMessage = TypeVar("AnyMessage", bound="Message")
_INT = struct.Struct("@i")

# Types of fields, each with its bounds. A number of msgpack is at most 2^64 - 1.
Id = Annotated[int, Meta(ge=1, le=(1 << 32) - 1)]
Count = Annotated[int, Meta(ge=0)]
Offset = Annotated[int, Meta(ge=0, le=MAX_OFFSET)]
Errno = Annotated[int, Meta(ge=0, le=4095)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Texts = Annotated[list[Text], Meta(max_length=64)]
Counts = Annotated[dict[Text, Count], Meta(max_length=16)]
# A file's first byte lies so many bytes behind the start of its memory, so that what follows a header is aligned.
PLACEMENT_END: Final = 256
HOST_TIER: Final = "host"  # instead of a PCI address: the host's memory of a mount of GPUs
Placement = Annotated[int, Meta(ge=0, lt=PLACEMENT_END)]
Sizes = Annotated[list[Count], Meta(max_length=MAX_PIECES)]
Inodes = Annotated[list[Count], Meta(min_length=1, max_length=MAX_FILES)]
Leases = Annotated[list[Id], Meta(min_length=1, max_length=MAX_FILES)]


class ProtocolError(OSError):
    """The other side sent what the protocol does not allow; nothing more can be said to it."""

    def __init__(self, message: str, error: int = errno.EPROTO) -> None:
        super().__init__(error, message)


class Message(msgspec.Struct, forbid_unknown_fields=True, tag_field="type"):
    """A message, whose kind is the class's tag. A default is for the sender's code: every field is sent."""


class ServerMessage(Message):
    """A message of the daemon."""


class Answer(ServerMessage):
    """A message about the request with this ``id``."""

    id: Id


class FinalAnswer(Answer):
    """The last message about a request, except for pieces: ``error`` is 0, or ``message`` says why it has failed."""

    error: Errno = 0
    message: Text = ""


# ---- messages of the daemon ----


class Welcome(ServerMessage, tag="welcome"):
    """The daemon's answer to Hello: the version that is spoken from now on, and what the client needs to know of it.

    ``requests``: how many may be in progress. ``driver``: of the mount's devices.
    """

    version: Id
    server: Text
    requests: Count
    driver: Text


class Progress(Answer, tag="progress"):
    """The progress of a copy. ``moved``: bytes anywhere in the range; ``paths``: the same by path."""

    total: Count
    moved: Count
    paths: Counts


class Result(FinalAnswer, tag="result"):
    """The end of a copy, exactly one for each. ``done``: bytes from the start without a gap, also after a failure."""

    device_code: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    done: Count = 0
    paths: Counts = {}
    refusals: Texts = []
    seconds: Annotated[float, Meta(ge=0)] = 0.0


class Attached(FinalAnswer, tag="attached"):
    """The answer to Attach and Refresh; ``pieces`` pieces of memory follow in Pieces messages unless ``error`` is set.

    ``size``: of the file in bytes. ``driver``, ``pci_address``: the device; ``device``: its number in the mount.
    ``private``: the memory is a copy of the file's contents, for this client alone. ``placement``: where in the memory
    of the pieces the file's first byte lies, whether or not that is what the client asked for.
    """

    driver: Text = ""
    pci_address: Text = ""
    device: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    size: Offset = 0
    private: bool = False
    placement: Placement = 0
    pieces: Annotated[int, Meta(ge=0, le=1 << 32)] = 0


class Pieces(Answer, tag="pieces"):
    """Pieces of the file's memory, in order, each with a descriptor. Offsets and sizes in bytes of that memory."""

    offsets: Sizes
    sizes: Sizes


class Done(FinalAnswer, tag="done"):
    """The answer to the other requests about leases, memory and limits."""


class Asked(ServerMessage, tag="asked"):
    """Somebody wants the memory of files, or has brought it back; for a connection that listens.

    ``inodes``: of the files, all of one request on which this process has leases. ``what``: "sleep" if these should
    sleep, "wake" if they can wake. ``question``: its number, for Declined.
    """

    question: Id
    inodes: Inodes
    what: Move


class Replaced(ServerMessage, tag="replaced"):
    """Another daemon serves the connection from now on; for a connection with leases or registrations.

    It knows nothing of requests that the one before has received. Those that came with descriptors have failed. The
    client sends all others again, as they were.
    """


class Goodbye(ServerMessage, tag="goodbye"):
    """The daemon's last message on a connection that it ends, and why."""

    error: Errno
    message: Text


# ---- messages of a client ----


class ClientMessage(Message):
    """A message of a client."""


class Request(ClientMessage):
    """A request. Each of a connection has a larger ``id`` than those before, which is also that of what it begins.

    ``answer``: the kind of message that ends it.
    """

    answer: ClassVar[type[FinalAnswer]] = Done

    id: Id


class Hello(ClientMessage, tag="hello"):
    """The client's first message: the versions it speaks and who it is, for logs."""

    versions: Annotated[list[Annotated[int, Meta(ge=1, le=1 << 16)]], Meta(min_length=1, max_length=16)]
    program: Text


class Copy(Request, tag="copy"):
    """Ask for a copy between the two descriptors that come with it: the host's file, then the file on the mount.

    Offsets and size in bytes; size None: up to the end of the source. ``fastpath`` None: as the mount is configured.
    ``sync`` is for the host's file, after a store. ``progress``: seconds between two progress messages, 0 for none.
    """

    answer = Result

    direction: Direction
    host_offset: Offset = 0
    offset: Offset = 0
    size: Offset | None = None
    fastpath: Fastpath | None = None
    sync: Sync = "none"
    progress: Annotated[float, Meta(ge=0, le=3600)] = 0.0


class Cancel(Request, tag="cancel"):
    """End the copy with this id. Its result still comes; one that has just ended is not an error."""


class Attach(Request, tag="attach"):
    """Ask for the memory behind the file on the mount whose descriptor comes with it. The lease has the number ``id``.

    ``mode``: READ; READ_WRITE, for which the descriptor must be open for reading and writing; or COPY_ON_WRITE: the
    memory of a GPU is then always a copy, and the client maps memory of the host privately. ``placement``: where in
    that memory the file's first byte should lie, so that its tensors are aligned; None: it does not matter.
    """

    answer = Attached

    mode: Mode
    placement: Placement | None = None


class Refresh(Request, tag="refresh"):
    """Ask for the memory from ``start`` on that the file of a lease has by now. Answered as Attach is."""

    answer = Attached

    lease: Id
    start: Offset


class Detach(Request, tag="detach"):
    """End a lease. The end of the connection ends all of them."""

    lease: Id


class Sleep(Request, tag="sleep"):
    """Put a lease to sleep: the client has unmapped its memory. The file leaves its device with the last awake lease.

    One that sleeps is not an error. After a failure it is as it was.
    """

    lease: Id


class Wake(Request, tag="wake"):
    """Wake a lease: its file comes back to its device. Answered as Attach is; one that is awake is not an error."""

    answer = Attached

    lease: Id


class Check(Request, tag="check"):
    """Ask whether these leases can sleep, or wake, all of them now. Done with the error that one of them would get.

    It changes nothing, and promises nothing for the time after the answer.
    """

    leases: Leases
    what: Move


class Park(Request, tag="park"):
    """Move files to the host's memory, all of them or none. Files that have no memory of a device stay.

    Programs that use them are asked to sleep, and have so many seconds for that.
    """

    inodes: Inodes
    wait: Annotated[float, Meta(ge=0, le=3600)] = 0.0


class BringBack(Request, tag="bring_back"):
    """Move files that are parked back to their devices, all or none. Programs that sleep get Asked, and can wake."""

    inodes: Inodes


class Listen(Request, tag="listen"):
    """From now on this connection gets Asked messages about files that this process has leases on."""


class Declined(ClientMessage, tag="declined"):
    """The answer to Asked of a program that cannot do it, and why. There is none to this one."""

    question: Id
    message: Text


class Revoke(Request, tag="revoke"):
    """End all leases on the file whose descriptor comes with it."""


class Register(Request, tag="register"):
    """Make memory of the client the contents of a file that it has just created.

    Its descriptor comes with it, open for writing. Then comes for "file" that of the memory, and for "descriptor" a
    socket from which the daemon takes the memory's pieces (:func:`send_pieces`); "ipc" has a ``handle``. The memory
    begins ``offset`` bytes into what these stand for. ``pci_address``: of the GPU, "" for memory of the host.
    """

    kind: ShareKind
    offset: Offset
    size: Annotated[int, Meta(ge=1, le=MAX_OFFSET)]
    writable: bool = True
    pci_address: Text = ""
    handle: bytes = b""

    def __post_init__(self) -> None:
        if len(self.handle) not in (0, HANDLE_BYTES):
            raise ValueError(f"Expected `bytes` of length 0 or {HANDLE_BYTES} - at `$.handle`")


class Unregister(Request, tag="unregister"):
    """End a registration: the file loses its names, and its contents are gone."""

    registration: Id


class SetQuota(Request, tag="set_quota"):
    """Set a limit, in bytes, NO_LIMIT or DEFAULT_LIMIT. The descriptor of a directory comes with it.

    ``uid``: a user's limit on the device of that directory, or with the root of the mount on every device. None: a
    limit for all files below the directory.
    """

    uid: Annotated[int, Meta(ge=0, le=(1 << 32) - 2)] | None
    limit: Annotated[int, Meta(ge=DEFAULT_LIMIT, le=MAX_OFFSET)]


# ---- packets ----


def kinds(base: type[AnyMessage]) -> list[type[AnyMessage]]:
    """The kinds of messages below ``base``."""
    return [kind for below in base.__subclasses__() for kind in kinds(below) or [below]]


_CLIENT: Final = msgspec.msgpack.Decoder(Union[tuple(kinds(ClientMessage))])  # noqa: UP007
_SERVER: Final = msgspec.msgpack.Decoder(Union[tuple(kinds(ServerMessage))])  # noqa: UP007
_MAP: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """The packet of a message."""
    return _ENCODER.encode(message)


def _decode(data: bytes, decoder: Any) -> Any:
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"a message of more than {MAX_MESSAGE} bytes")
    try:
        message = decoder.decode(data)
        complete = len(_MAP.decode(data)) == len(message.__struct_fields__) + 1  # the kind, too
    except (ValueError, RecursionError) as error:
        raise ProtocolError(shorten(f"an invalid message: {error}")) from None
    if not complete:
        raise ProtocolError(f"an invalid message: {type(message).__name__} without all of its fields")
    return message


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


def send(sock: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one message, with copies of the descriptors. Waits as the socket does."""
    ancillary = []
    if descriptors:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(map(_INT.pack, descriptors)))]
    sock.sendmsg([encode(message)], ancillary, socket.MSG_NOSIGNAL)


# ---- the pieces of a client's memory, which wait in a socket of their own ----


def send_pieces(sock: socket.socket, offset: int, pieces: Sequence[tuple[int, int]]) -> int:
    """Put pieces of memory into a socket, for the daemon to take. Returns the end of the last one.

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
    pieces: list[tuple[int, int, int]] = []
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
                    return pieces
                message = decode_server(data)
                if (
                    not isinstance(message, Pieces)
                    or not descriptors  # packets without any could follow each other for ever
                    or not len(message.offsets) == len(message.sizes) == len(descriptors)
                ):
                    raise OSError(errno.EINVAL, bad)
                pieces += zip(message.offsets, message.sizes, descriptors, strict=True)
                if len(pieces) > MAX_MEMORY_PIECES:
                    raise OSError(errno.E2BIG, f"the memory is in more than {MAX_MEMORY_PIECES} pieces")
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EPROTO):
            raise OSError(errno.EINVAL, bad) from None
        raise
