"""Whether a file can take the place of another one under programs that use its memory: it needs the same layout."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Self

from gpufs.formats import FormatError
from gpufs.formats.budget import BoundedFile
from gpufs.formats.layout import Layout, TensorPlace
from gpufs.formats.safetensors import RECORDS_KEY
from gpufs.formats.table import NotInPlace, read_layout

_REMEDY: Final = "Give the new version another name, and load that"


@dataclass(frozen=True, slots=True)
class FileLayout:
    """What has to be the same in each version of a file.

    ``layout``: None for a file whose tensors gpufs does not find. Then the size alone counts.
    """

    size: int
    layout: Layout | None

    @classmethod
    def read(cls, name: str, file: BoundedFile) -> Self:
        """Read the layout of a file, as :func:`read_layout` does. FormatError if its header is damaged."""
        try:
            return cls(file.size, read_layout(name, file))
        except NotInPlace:
            return cls(file.size, None)

    @classmethod
    def of_file(cls, fd: int, name: str, called: str | None = None) -> Self:
        """Read the layout of an open file. ``name``: its ending may decide the format; ``called``: in an error."""
        try:
            return cls.read(name, BoundedFile.of(fd))
        except FormatError as error:
            raise FormatError(f"{called or name}: {error}") from None

    @property
    def metadata(self) -> dict[str, str]:
        """What the file says about itself, without what gpufs itself has noted there."""
        noted = (self.layout.metadata if self.layout else None) or {}
        return {key: value for key, value in noted.items() if key != RECORDS_KEY}

    @property
    def first_tensor(self) -> int:
        """The offset of the first tensor; 0 if there is none."""
        return self.layout.tensors[0].offset if self.layout and self.layout.tensors else 0

    def check(self, new: FileLayout, name: str) -> None:
        """Raise FormatError unless ``new`` can take the place of this file, which is called ``name``."""
        if (difference := self.difference(new)) is not None:
            raise FormatError(f"{name} cannot be replaced in place: {difference}. {_REMEDY}")

    def difference(self, new: FileLayout) -> str | None:
        """Return the first difference in words; None if ``new`` can take the place of this file."""
        kinds = [each.layout.format if each.layout else "a file of an unknown format" for each in (self, new)]
        if kinds[0] != kinds[1]:
            return f"it is {kinds[0]}, and the new version {kinds[1]}"
        if self.layout is not None and new.layout is not None:
            for ours, theirs in zip_longest(self.layout.tensors, new.layout.tensors):
                if ours != theirs:
                    return self._of_tensors(new, ours, theirs)
            if self._records() != new._records():
                return "the new version has other strides, ties or attributes of tensors"
        if self.size != new.size:
            return f"it has {self.size} bytes, and the new version {new.size}"
        return None

    def _records(self) -> str | None:
        return ((self.layout.metadata if self.layout else None) or {}).get(RECORDS_KEY)

    def _of_tensors(self, new: FileLayout, ours: TensorPlace | None, theirs: TensorPlace | None) -> str:
        if ours is None or theirs is None:
            return f"only {'the new version' if ours is None else 'it'} has {_described(ours or theirs)}"
        if self.first_tensor != new.first_tensor and self._from_first() == new._from_first():
            return (
                f"its tensors begin at byte {self.first_tensor}, and in the new version at byte {new.first_tensor}, "
                "because the header is longer or shorter: gpufs.torch.publish(replace=True) keeps its length"
            )
        return f"it has {_described(ours)}, and the new version {_described(theirs)}"

    def _from_first(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        assert self.layout is not None
        return [(each.name, each.dtype, each.shape, each.offset - self.first_tensor) for each in self.layout.tensors]


def _described(place: TensorPlace | None) -> str:
    assert place is not None
    shape = "x".join(map(str, place.shape)) or "scalar"
    return f"tensor {place.name!r}, {place.dtype} {shape}, at byte {place.offset}"
