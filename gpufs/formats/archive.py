"""Zip archives whose members are stored as they are: npz files of numpy, and files of torch.save()."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpufs.formats import FormatError

MAGIC: Final = b"PK\x03\x04"
_LOCAL_HEADER_BYTES: Final = 30
# Where a member's local header has the lengths of the name and of the extra field, which come between it and the data.
_NAME_LENGTH: Final = slice(26, 28)
_EXTRA_LENGTH: Final = slice(28, 30)
_MAX_MEMBERS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """A stored member: its bytes are ``bytes`` bytes of the archive from ``offset`` on."""

    name: str
    offset: int
    bytes: int


class _Reader(io.RawIOBase):
    """A file for zipfile, over the function that reads."""

    def __init__(self, size: int, read: Callable[[int, int], bytes]) -> None:
        self._size = size
        self._read = read
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("a position before the start of the file")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._position, 0)
        data = self._read(self._position, left if size < 0 else min(size, left)) if left else b""
        self._position += len(data)
        return data


def read_members(size: int, read: Callable[[int, int], bytes]) -> dict[str, Member]:
    """Find the members of a zip archive.

    Parameters
    ----------
    size
        Of the archive, in bytes.
    read
        ``read(offset, count)`` returns bytes of the archive.

    Returns
    -------
    dict of str to Member
        By name, in the order of the archive's directory.

    Raises
    ------
    FormatError
        The archive is damaged, a member is compressed or encrypted, or two members overlap.
    """
    try:
        with zipfile.ZipFile(_Reader(size, read)) as archive:
            listed = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, OverflowError, UnicodeError, NotImplementedError) as error:
        raise FormatError(f"the zip archive is damaged: {error}") from None
    if len(listed) > _MAX_MEMBERS:
        raise FormatError(f"the zip archive has {len(listed)} members; at most {_MAX_MEMBERS} are read")
    members: dict[str, Member] = {}
    for info in listed:
        if info.is_dir():
            continue
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            how = "encrypted" if info.flag_bits & 1 else "compressed"
            raise FormatError(f"member {info.filename!r} is {how}, so its bytes are not in the file as they are")
        if info.filename in members:
            raise FormatError(f"member {info.filename!r} appears twice")
        header = read(info.header_offset, _LOCAL_HEADER_BYTES) if info.header_offset < size else b""
        if len(header) < _LOCAL_HEADER_BYTES or not header.startswith(MAGIC):
            raise FormatError(f"no member begins at offset {info.header_offset}, where {info.filename!r} should be")
        between = sum(int.from_bytes(header[place], "little") for place in (_NAME_LENGTH, _EXTRA_LENGTH))
        member = Member(info.filename, info.header_offset + _LOCAL_HEADER_BYTES + between, info.file_size)
        if member.offset + member.bytes > size:
            raise FormatError(
                f"member {member.name!r} ends at {member.offset + member.bytes}, and the archive has {size} bytes"
            )
        members[member.name] = member
    end = 0
    for member in sorted(members.values(), key=lambda one: one.offset):
        if member.offset < end:
            raise FormatError(f"member {member.name!r} overlaps the one before it")
        end = member.offset + member.bytes
    return members
