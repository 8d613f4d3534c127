"""The messages of a copy between two machines. One side sends files, the other receives them.

After the greeting of gpufs, the side that runs the command sends a HostRequest. The sender then sends a Plan, and for
each source a Found: a file, a link, or a directory, which has what is in it up to a Leave. A file is followed by its
bytes and Holes, and by an End. The receiver answers each file with a FileResult, which comes early if the file cannot
be stored. FilesDone ends the files, Finished the results. Alive is sent every few seconds by both sides. Failed and
Refused can come at any time.

If the Plan says so, an Offer follows it, or Chosen. The receiver answers how fast it reads by NIXL, and then, after
some blocks of bytes, a Measure, which shows how fast the pipe is. The sender then sends what it has Chosen. By NIXL, a
Slot stands for bytes of a file, and the receiver answers each with a Free. Within a large file the sender can ask for a
Window, the memory of the receiver's file. It writes there, and says what is Written.

In a chain each receiver sends what it receives to the next machine, as the sender of that connection, and passes the
reports back with ``hop`` increased: 0 is the machine that sends the message, 1 the next one. Lost is the end of the
chain behind a machine. If the side that runs the command has no files itself, the first machine sends a HostRequest to
the others, and passes on its Plan and what they report.

A side ignores fields that it does not know, so a new field needs no new version. Names are bytes, as in the kernel.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Annotated, Any, Final, Self, TypeAlias

import msgspec
from msgspec import Meta

from gpufs.exceptions import text_of

VERSION: Final = 1  # of this protocol, which both sides must speak

_MOST: Final = 4096  # bytes of a path, characters of a text
# What the other side sends is checked against these types, and nowhere else if they can say it.
Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Rate: TypeAlias = Annotated[float, Meta(ge=0, le=1e18)]
Errno: TypeAlias = Annotated[int, Meta(ge=0, le=4095)]
Text: TypeAlias = Annotated[str, Meta(max_length=_MOST)]
Path: TypeAlias = Annotated[bytes, Meta(max_length=_MOST)]
Way: TypeAlias = Annotated[str, Meta(pattern=r"^(pipe|nixl|direct|hole)\Z")]
Owner: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 32) - 2)]
Time: TypeAlias = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


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

    ``sizes``: by the bits of files' sizes, without holes, how many such files there are, and their bytes. ``nixl``: the
    sender has NIXL, and finds out next whether it is the faster way.
    """

    size: Count
    data: Count
    sizes: dict[Annotated[int, Meta(ge=0, le=63)], tuple[Count, Count]] = {}
    nixl: bool = False


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


class Found(msgspec.Struct, tag=True):
    """A file, a symbolic link, or a directory, which becomes the current one: see the mode.

    It is ``source`` itself, or has this name in the current directory. ``path``: for messages. ``on_mount``: whether it
    is on a gpufs mount. ``target``: of a link. Of a file, ``number`` counts it, and ``checksum`` is its SHA-256 if the
    request asks for it. A block device counts as a file.
    """

    source: Count
    name: Path
    path: Path
    attributes: FileAttributes
    on_mount: bool = False
    target: Path = b""
    number: Count = 0
    size: Count = 0
    data: Count = 0
    checksum: Text = ""

    def __post_init__(self) -> None:
        _check_names(self.target)
        if self.data > self.size:
            raise ValueError("a file has more data than bytes")

    @property
    def status(self) -> os.stat_result:
        """What stat(2) would return, as far as a copy needs it."""
        here = self.attributes
        fields = (here.st_mode, 0, 0, 1, here.st_uid, here.st_gid, self.size, 0, 0, 0)
        times = {"st_atime_ns": here.st_atime_ns, "st_mtime_ns": here.st_mtime_ns}
        return os.stat_result(fields, times)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.attributes.st_mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.attributes.st_mode)


class Leave(msgspec.Struct, tag=True):
    """The end of the current directory."""


class Hole(msgspec.Struct, tag=True):
    """Bytes of a file that are zero and take no space."""

    size: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


class End(msgspec.Struct, tag=True):
    """The end of a file, and, with ``verify``, the SHA-256 of its bytes.

    ``error``: 0, or why it was not sent to its end; ECANCELED if the receiver has refused it.
    """

    checksum: Text = ""
    error: Errno = 0
    text: Text = ""


class Report(msgspec.Struct, kw_only=True):
    """What the command hears of a copy."""

    hop: Count = 0


class FileResult(Report, tag="Result"):
    """The result of one file. ``error``: 0, or why it has not been stored. ``path``: of the copy.

    The sender adds the path of the source, and the seconds.
    """

    number: Count
    path: Path
    error: Errno = 0
    text: Text = ""
    skipped: bool = False
    size: Count = 0
    paths: dict[Way, Count] = {}  # the bytes by each
    checksum: Text = ""  # SHA-256, if verified
    source: Path = b""
    seconds: Rate = 0.0


class Failure(Report):
    """Why something failed. ``path``: of the copy, or what else it concerns; empty for a source alone."""

    error: Annotated[int, Meta(ge=1, le=4095)]
    text: Text
    path: Path = b""

    @classmethod
    def of(cls, error: OSError, path: str, **more: Any) -> Self:
        return cls(error.errno or errno.EIO, plain(text_of(error)), shown(path), **more)


class Failed(Failure, tag=True):
    """A failure that concerns no file that is sent, after which the others are copied. ``source``: as of FileResult."""

    source: Path = b""


class Lost(Failure, tag=True):
    """The machine ``hop`` of a chain gets nothing more, nor do those after it."""


class Refused(Failure, tag=True):
    """Why nothing, or nothing more, is copied. No message follows."""


class Deleted(Report, tag=True):
    """Lists what the receiver has removed, since the source does not have it."""

    path: Path


class Notice(Report, tag=True):
    """A line for the user."""

    text: Text


class Moved(Report, tag=True):
    """How many bytes of a source have been copied, or sent to a chain."""

    source: Path
    size: Count


class FilesDone(msgspec.Struct, tag="Done"):
    """The end of the files."""


class Finished(msgspec.Struct, tag=True):
    """The end of the results."""


class Alive(msgspec.Struct, tag=True):
    """The sender of this message is running."""


OfSender: TypeAlias = Plan | Found | Leave | Hole | End | Failed | FilesDone
_OfNixl: TypeAlias = Offer | Measure | Measured | Chosen | Slot | Free | InPlace | Window | Written
_Reports: TypeAlias = FileResult | Deleted | Lost | Notice | Moved
Message: TypeAlias = HostRequest | OfSender | _OfNixl | _Reports | Finished | Refused | Alive


def plain(text: str) -> str:
    """Return a text that a message can have: file names in it may be no text."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")[:_MOST]


def shown(path: str) -> bytes:
    """Return a path that a message can have: its end, if it is longer than the kernel takes at once."""
    return os.fsencode(path)[-_MOST:]


def _check_names(*names: bytes) -> None:
    if any(b"\0" in name for name in names):
        raise ValueError("a name has a null byte")
