"""The manifest of a save: a line of JSON for each name, with what the saved file itself does not have.

A save is a directory with the manifest and `tree`, which has the files under their names. docs/save.md has the format.
Whoever reads a manifest trusts nothing in it: every line is checked before it is used.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import threading
import time
from contextlib import ExitStack, suppress
from typing import IO, Annotated, Final, Literal, Self, TypeAlias
from urllib.parse import unquote_to_bytes

import msgspec

from gpufs import safe_path
from gpufs.copying.checksums import Sums
from gpufs.syscalls import closed_after, trusted

MANIFEST: Final = "manifest.jsonl"
TREE: Final = "tree"
VERSION: Final = 1
# The longest line: what a file may have of extended attributes, and the sums of the largest file.
_LINE_BYTES: Final = 32 << 20
# The bytes that a path and each of its names may have, for the system calls that find it.
PATH_BYTES: Final = 4095
_NAME_BYTES: Final = 255
_LARGEST_ID: Final = (1 << 32) - 2
_LARGEST_FILE: Final = 1 << 46
_SET_ID: Final = stat.S_ISUID | stat.S_ISGID

Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST_ID)]
# Whole seconds since 1970, rounded down, and nanoseconds.
Time: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^-?[0-9]{1,12}\.[0-9]{9}\Z")]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST_FILE)]
Mode: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-7]{3,4}\Z")]
Sum: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Offset: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,15}\Z")]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=3 * PATH_BYTES)]


class _Line(msgspec.Struct, tag_field="type", omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Limit(msgspec.Struct, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """A limit of a directory, or of a user (``uid``) on a device."""

    path: Text
    limit_bytes: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    uid: Id | None = None


class Header(_Line, tag="gpufs-save", kw_only=True):
    """The first line. ``mount``: a whole mount was saved, and the first directories are its devices."""

    version: int
    source: Text
    saved: str
    mount: bool = False
    limits: list[Limit] = []

    @classmethod
    def of(cls, source: str, limits: list[Limit], *, mount: bool) -> Self:
        saved = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(version=VERSION, source=encoded(source), saved=saved, mount=mount, limits=limits)


class Named(_Line, kw_only=True):
    """An entry, unless it is a further name of a file. Modes are octal; values of extended attributes are Base64."""

    path: Text
    mode: Mode
    uid: Id
    gid: Id
    atime: Time
    mtime: Time
    xattrs: dict[str, bytes] = {}

    def status(self, in_tree: os.stat_result | None, *, trusted: bool) -> os.stat_result:
        """Return the attributes of what is restored. Without ``trusted`` it is the caller's, and gives no rights.

        ``in_tree``: those of its file in the tree, which has the content, if there is one.
        """
        kind = SPECIAL_KINDS[self.kind] if isinstance(self, Special) else _KINDS[type(self)]
        mode, owner = int(self.mode, 8), (self.uid, self.gid)
        if not trusted:
            mode, owner = mode & ~_SET_ID, (os.geteuid(), os.getegid())
        place, size, others = (0, 0), 0, {"st_blocks": 0, "st_rdev": 0}
        if in_tree is not None:
            place, size = (in_tree.st_ino, in_tree.st_dev), in_tree.st_size
            others["st_blocks"] = in_tree.st_blocks
        if isinstance(self, Special):
            others["st_rdev"] = os.makedev(self.major, self.minor)
        others |= {"st_atime_ns": _ns_of_time(self.atime), "st_mtime_ns": _ns_of_time(self.mtime)}
        return os.stat_result((kind | mode, *place, 1, *owner, size, 0, 0, 0), others)


class Directory(Named, tag="directory", kw_only=True):
    """A directory. It comes after all that it contains."""


class File(Named, tag="file", kw_only=True):
    """A regular file; of one with several parts ``parts`` has the sums of those with data, by their offsets."""

    size: Size
    sha256: Sum | None = None
    parts: dict[Offset, Sum] = {}

    def sums(self) -> Sums:
        """Return the sums by offset."""
        return {int(offset): text for offset, text in self.parts.items()} if self.sha256 is None else {0: self.sha256}


class Symlink(Named, tag="symlink", kw_only=True):
    target: Text


class Special(Named, tag="special", kw_only=True):
    """A FIFO, a socket or a device node, which the tree does not have."""

    kind: Literal["fifo", "socket", "char", "block"]
    major: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    minor: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0


class HardLink(_Line, tag="hardlink", kw_only=True):
    """Another name of a file that has come before."""

    path: Text
    to: Text


class End(_Line, tag="end", kw_only=True):
    """The last line. ``sha256``: of all lines before."""

    lines: int
    sha256: Sum


Record: TypeAlias = Directory | File | Symlink | Special | HardLink
_AnyLine: TypeAlias = Header | Record | End

SPECIAL_KINDS: Final = {"fifo": stat.S_IFIFO, "socket": stat.S_IFSOCK, "char": stat.S_IFCHR, "block": stat.S_IFBLK}
_KINDS: Final = {Directory: stat.S_IFDIR, File: stat.S_IFREG, Symlink: stat.S_IFLNK}

_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(_AnyLine)


def _ns_of_time(text: str) -> int:
    seconds, nanoseconds = text.split(".")
    return int(seconds) * 10**9 + int(nanoseconds)


def encoded(name: str) -> str:
    """Return a path as a manifest has it: % and bytes that are not UTF-8 are written %XX."""
    text = name.replace("%", "%25")
    return re.sub("[\udc80-\udcff]", lambda found: f"%{ord(found[0]) - 0xDC00:02X}", text)


def decoded(text: str) -> str:
    """Return the path that a manifest means."""
    return os.fsdecode(unquote_to_bytes(text))


def _checked_path(text: str) -> str:
    """Return a path below the save. ValueError for one that could lead elsewhere."""
    path = decoded(text)
    raw = os.fsencode(path)
    is_name = [0 < len(name) <= _NAME_BYTES and name not in (b".", b"..") for name in raw.split(b"/")]
    if path != "." and (not all(is_name) or len(raw) > PATH_BYTES or b"\0" in raw):
        raise ValueError(f"{text!r} is not a path below the save")
    return path


class ManifestWriter:
    """Writes a manifest. Any thread may call write()."""

    def __init__(self, directory: int, header: Header) -> None:
        fd = os.open(MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
        self._file: IO[bytes] = os.fdopen(fd, "wb", buffering=1 << 20)
        self._checksum = hashlib.sha256()
        self._lines = 0
        self._lock = threading.Lock()  # guards all of these
        self.write(header)

    def write(self, line: Header | Record | End) -> None:
        """Add a line. OSError if it, or its path, is longer than readers accept."""
        if isinstance(line, Named | HardLink) and len(os.fsencode(decoded(line.path))) > PATH_BYTES:
            text = f"its path below the save would be longer than {PATH_BYTES} bytes: leave it out by --exclude"
            raise OSError(errno.ENAMETOOLONG, text)
        data = _encoder.encode(line) + b"\n"
        if len(data) > _LINE_BYTES:
            raise OSError(errno.E2BIG, "has too many extended attributes or parts for a save")
        with self._lock:
            self._file.write(data)
            self._checksum.update(data)
            self._lines += 1

    def finish(self) -> None:
        self.write(End(lines=self._lines, sha256=self._checksum.hexdigest()))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Manifest:
    """The manifest of a save that exists, as a whole. OSError, with the line's number, for what is not one.

    ``records``: by their paths in the tree, which is open as ``tree``. ``trusted``: it belongs to root or the caller,
    and nobody else may write there. Then it may give owners, devices and rights.
    """

    def __init__(self, path: str, shown: str | None = None) -> None:
        self.path = shown or path
        self.records: dict[str, Record] = {}
        with closed_after(safe_path.open_path(path, os.O_RDONLY | os.O_DIRECTORY)) as directory, ExitStack() as opened:
            try:
                file = opened.enter_context(_open_lines(directory))
                self.tree = os.open(TREE, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
                opened.callback(os.close, self.tree)
                self.trusted = all(map(_is_ours, (directory, file.fileno(), self.tree)))
                self._read(file)
            except OSError as error:
                raise OSError(error.errno, error.strerror, os.path.join(self.path, error.filename)) from None
            self._closing = opened.pop_all()

    def close(self) -> None:
        self._closing.close()

    def _read(self, file: IO[bytes]) -> None:
        """Read all lines. OSError EINVAL for the first one that is not allowed."""
        checksum, number = hashlib.sha256(), 0
        while data := file.readline(_LINE_BYTES + 1):
            number += 1
            try:
                if not data.endswith(b"\n"):
                    raise ValueError("it is too long or cut off")
                line = _decoder.decode(data)
                _check(line)
                if isinstance(line, End):
                    if line.sha256 != checksum.hexdigest() or line.lines != number - 1 or file.read(1):
                        raise ValueError("the lines before do not have its checksum")
                    return
                if isinstance(line, Header) != (number == 1):
                    raise ValueError("only the first line must have the type gpufs-save")
                if isinstance(line, Header):
                    self.header = line
                elif self.records.setdefault(decoded(line.path), line) is not line:
                    raise ValueError("another line has this path")
            except (ValueError, RecursionError) as error:  # msgspec's are, too
                raise OSError(errno.EINVAL, f"cannot be used: line {number}: {error}", MANIFEST) from None
            checksum.update(data)
        raise OSError(errno.EINVAL, "is damaged: its last line is missing", MANIFEST)


def is_save(directory: int) -> bool:
    """Return whether an open directory looks as a save."""
    with suppress(OSError, ValueError, RecursionError), _open_lines(directory) as file:
        return isinstance(_decoder.decode(file.readline(_LINE_BYTES)), Header)
    return False


def _open_lines(directory: int) -> IO[bytes]:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(MANIFEST, flags, dir_fd=directory)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return os.fdopen(fd, "rb", buffering=1 << 20)
    os.close(fd)
    raise OSError(errno.EINVAL, "is not a file", MANIFEST)


def _check(line: _AnyLine) -> None:
    """Raise ValueError for what could lead out of the save, or is not possible."""
    if isinstance(line, Header):
        if line.version != VERSION:
            raise ValueError(f"it is of version {line.version} of the format, and this gpufs reads version {VERSION}")
        for limit in line.limits:
            _checked_path(limit.path)
    if isinstance(line, Named | HardLink) and _checked_path(line.path) == "." and not isinstance(line, Directory):
        raise ValueError("only a directory is the saved directory itself")
    if isinstance(line, Named) and any("\0" in name for name in line.xattrs):
        raise ValueError("the name of an extended attribute is wrong")
    if isinstance(line, HardLink):
        _checked_path(line.to)
    if isinstance(line, Symlink):
        target = os.fsencode(decoded(line.target))
        if not target or len(target) > PATH_BYTES or b"\0" in target:
            raise ValueError("the target of a symbolic link is wrong")


def _is_ours(fd: int) -> bool:
    status = os.fstat(fd)
    return trusted(status.st_uid) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def find_save(path: str) -> tuple[str, str]:
    """Return the save that a path names, and the part of it: "" for all of it.

    The path is that of the save, or of a directory in its tree. OSError ENOENT if it is neither.
    """
    names = safe_path.real(path).split("/")
    for count in range(len(names), 0, -1):
        root = "/".join(names[:count]) or "/"
        if names[count:][:1] in ([], [TREE]) and os.path.lexists(os.path.join(root, MANIFEST)):
            return root, "/".join(names[count + 1 :])
    with suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(os.path.join(path, MANIFEST))  # raises PermissionError if this user may not know
    os.stat(path)
    raise OSError(errno.ENOENT, f"is not a save, nor a directory of one: it has no {MANIFEST}", path)
