"""The messages of a copy between two machines. One side sends files, the other receives them.

After its HostHello, the side that runs the command sends a HostRequest. The sender then sends a Plan, and for each
source a File, a Link, or a directory: an Enter, what is in it, and a Leave. A File is followed by its bytes and Holes,
and by an End or an Abandon. The receiver answers each File with a FileResult, which comes early if the file cannot be
stored. FilesDone ends the files, Finished the results. Alive is sent every few seconds by both sides. Failed and
Refused can come at any time.

If both sides have NIXL and the copy is large, an Offer follows the Plan. The receiver answers how fast it reads, and
then, after some blocks of bytes, a Measure, which shows how fast the pipe is. The sender then sends what it has Chosen.
By NIXL, a Slot stands for bytes of a file, and the receiver answers each with a Free. Within a large file the
sender can ask for a Window, the memory of the receiver's file. It writes there, and says what is Written.

In a chain each receiver sends what it receives to the next machine, as the sender of that connection, and passes the
answers back with ``hop`` increased: 0 is the machine that sends the message, 1 the next one. Lost is the end of the
chain behind a machine. If the side that runs the command has no files itself, the first machine sends a HostRequest to
the others, and answers with a Plan, Moved, and a FileResult for each file.

A side ignores fields that it does not know, so a new field needs no new version. Names are bytes, as in the kernel.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

VERSION: Final = 1  # of this protocol, which both sides must speak

_MOST: Final = 4096  # bytes of a path, characters of a text
# What the other side sends is checked against these types, and nowhere else if they can say it.
Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Rate: TypeAlias = Annotated[float, Meta(ge=0, le=1e18)]
Errno: TypeAlias = Annotated[int, Meta(ge=1, le=4095)]
Text: TypeAlias = Annotated[str, Meta(max_length=_MOST)]
Path: TypeAlias = Annotated[bytes, Meta(max_length=_MOST)]
Way: TypeAlias = Annotated[str, Meta(pattern=r"^(pipe|nixl|direct|hole)\Z")]
Owner: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 32) - 2)]
Time: TypeAlias = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class HostHello(msgspec.Struct, tag="Hello"):
    """The first message of each side."""

    version: Count
    program: Text  # the version of gpufs, for messages
    nixl: bool = False  # whether NIXL is installed

    def check(self, host: str) -> None:
        """Raise OSError EPROTONOSUPPORT for another version."""
        if self.version != VERSION:
            text = f"gpufs {self.program} there speaks version {self.version} of the protocol, and this one {VERSION}"
            raise OSError(errno.EPROTONOSUPPORT, f"{text}: install the same gpufs on both", host)


class FileAttributes(msgspec.Struct):
    """The attributes of a file that a copy can keep, named as in os.stat_result."""

    st_mode: Annotated[int, Meta(ge=0, le=0xFFFF)]
    st_uid: Owner
    st_gid: Owner
    st_atime_ns: Time
    st_mtime_ns: Time

    @classmethod
    def of(cls, status: os.stat_result) -> FileAttributes:
        return cls(status.st_mode, status.st_uid, status.st_gid, status.st_atime_ns, status.st_mtime_ns)

    @property
    def permissions(self) -> int:
        """The mode without the type."""
        return stat.S_IMODE(self.st_mode)


class HostRequest(msgspec.Struct, tag="Request"):
    """Asks the other side to send ``sources``, or to receive them as ``destination``.

    ``forward``: HOST:PATH of the machines that get the files from the other side, each from the one before it.
    What reaches them is not in it: a peer names files, and never a command.
    """

    sends: bool
    sources: Annotated[list[Path], Meta(min_length=1)]
    destination: Path = b""
    in_directory: bool = False  # the destination must be a directory
    recursive: bool = False
    dereference: bool = False
    preserve: bool = False
    no_clobber: bool = False
    verify: bool = False
    fsync: bool = False
    forward: list[Path] = []
    exact: bool = False  # the destination is the copy itself
    include: list[Path] = []
    exclude: list[Path] = []
    update: bool = False
    checksum: bool = False  # update compares contents
    delete: bool = False  # at last remove what the source does not have

    def __post_init__(self) -> None:
        _check_names(self.destination, *self.sources)

    @property
    def patterns(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return tuple(map(os.fsdecode, self.include)), tuple(map(os.fsdecode, self.exclude))


class Plan(msgspec.Struct, tag=True):
    """Announces the bytes of all files, and those of them that take space.

    ``sizes``: by the bits of files' sizes, without holes, how many such files there are, and their bytes.
    """

    size: Count
    data: Count
    sizes: dict[Annotated[int, Meta(ge=0, le=63)], tuple[Count, Count]] = {}


class Offer(msgspec.Struct, tag=True):
    """How the receiver reads the slots of the sender by NIXL."""

    metadata: Annotated[bytes, Meta(max_length=1 << 19)]
    address: Count


class Measure(msgspec.Struct, tag=True):
    """Asks for an answer once the bytes before it have come."""


class Measured(msgspec.Struct, tag=True):
    """The bytes a second by NIXL; 0 if it has failed, with the reason, or if that was not asked."""

    rate: Rate = 0.0
    failure: Text = ""
    in_place: bool = False  # whether the receiver answers InPlace


class Chosen(msgspec.Struct, tag=True):
    """Whether the bytes of all files move by NIXL, or a line that says why not."""

    nixl: bool
    text: Text = ""


class Slot(msgspec.Struct, tag=True):
    """The next bytes of a file are in this slot of the sender."""

    number: Count
    size: Count


class Free(msgspec.Struct, tag=True):
    """The receiver has used the bytes of a slot."""

    number: Count


class InPlace(msgspec.Struct, tag=True):
    """Asks for a Window, to write what follows the bytes of the current file that have been sent."""


class Window(msgspec.Struct, tag=True):
    """The memory of the current file; ``metadata`` is empty if it cannot be written. ``device``: -1 for host memory."""

    metadata: Annotated[bytes, Meta(max_length=1 << 19)] = b""
    address: Count = 0
    device: Annotated[int, Meta(ge=-1, le=1023)] = -1


class Written(msgspec.Struct, tag=True):
    """The offset up to which the sender has written. ``last``: it writes nothing more."""

    offset: Count
    last: bool


class Enter(msgspec.Struct, tag=True):
    """A directory: ``source`` itself, or one of this name in the current directory, which it becomes."""

    source: Count
    name: Path
    path: Path
    on_mount: bool
    attributes: FileAttributes


class Leave(msgspec.Struct, tag=True):
    """The end of the current directory."""


class Link(msgspec.Struct, tag=True):
    """A symbolic link."""

    source: Count
    name: Path
    path: Path
    target: Path
    attributes: FileAttributes

    def __post_init__(self) -> None:
        _check_names(self.target)


class File(msgspec.Struct, tag=True):
    """A regular file, or a block device. ``path``: for messages. ``on_mount``: whether it is on a gpufs mount.

    ``checksum``: its SHA-256, if the request asks for it.
    """

    number: Count
    source: Count
    name: Path
    path: Path
    size: Count
    data: Count
    on_mount: bool
    attributes: FileAttributes
    checksum: Text = ""

    def __post_init__(self) -> None:
        if self.data > self.size:
            raise ValueError("a file has more data than bytes")


class Hole(msgspec.Struct, tag=True):
    """Bytes of a file that are zero and take no space."""

    size: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


class End(msgspec.Struct, tag=True):
    """The end of a file, and, with ``verify``, the SHA-256 of its bytes."""

    checksum: Text = ""


class Abandon(msgspec.Struct, tag=True):
    """The end of a file that could not be read, or that the receiver has refused."""

    error: Errno
    text: Text


class FileResult(msgspec.Struct, tag="Result"):
    """The result of one file. ``error``: 0, or why it has not been stored. ``path``: of the copy.

    A machine that was asked to send its files to others names the ``source`` in place of the number, and the seconds.
    """

    number: Count
    path: Path
    error: Annotated[int, Meta(ge=0, le=4095)] = 0
    text: Text = ""
    skipped: bool = False
    size: Count = 0
    paths: dict[Way, Count] = {}  # the bytes by each
    checksum: Text = ""  # SHA-256, if verified
    hop: Count = 0
    source: Path = b""
    seconds: Rate = 0.0


class Failed(msgspec.Struct, tag=True):
    """A failure that concerns no File, after which the others are copied."""

    error: Errno
    text: Text
    path: Path
    hop: Count = 0


class Deleted(msgspec.Struct, tag=True):
    """Lists what the receiver has removed, since the source does not have it."""

    path: Path


class Lost(msgspec.Struct, tag=True):
    """The machine ``hop`` of a chain gets nothing more, nor do those after it. ``name``: for messages."""

    hop: Count
    error: Errno
    text: Text
    name: Path


class Notice(msgspec.Struct, tag=True):
    """A line for the user."""

    text: Text


class Moved(msgspec.Struct, tag=True):
    """How many bytes of a source have been sent to the chain."""

    source: Path
    size: Count


class Refused(msgspec.Struct, tag=True):
    """Why nothing, or nothing more, is copied. No message follows."""

    error: Errno
    text: Text
    path: Path


class FilesDone(msgspec.Struct, tag="Done"):
    """The end of the files."""


class Finished(msgspec.Struct, tag=True):
    """The end of the results."""


class Alive(msgspec.Struct, tag=True):
    """The sender of this message is running."""


OfSender: TypeAlias = Plan | Enter | Leave | Link | File | Hole | End | Abandon | Failed | FilesDone
_OfReceiver: TypeAlias = FileResult | Deleted | Finished
_OfNixl: TypeAlias = Offer | Measure | Measured | Chosen | Slot | Free | InPlace | Window | Written
_OfChain: TypeAlias = Lost | Notice | Moved
Message: TypeAlias = HostHello | HostRequest | OfSender | _OfReceiver | _OfNixl | _OfChain | Refused | Alive


def plain(text: str) -> str:
    """Return a text that a message can have: file names in it may be no text."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")[:_MOST]


def shown(path: str) -> bytes:
    """Return a path that a message can have: its end, if it is longer than the kernel takes at once."""
    return os.fsencode(path)[-_MOST:]


def _check_names(*names: bytes) -> None:
    if any(b"\0" in name for name in names):
        raise ValueError("a name has a null byte")
