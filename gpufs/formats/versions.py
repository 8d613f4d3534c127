"""Whether a file can take the place of another one under programs that use its memory: it needs the same layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from gpufs.formats import FormatError
from gpufs.formats.budget import BoundedFile, Budget
from gpufs.formats.layout import Layout
from gpufs.formats.records import parse_records
from gpufs.formats.safetensors import PADDING_NAME, RECORDS_KEY
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

    @property
    def starts(self) -> dict[str, int]:
        """Where each tensor begins, counted from the first one."""
        places = self.layout.tensors if self.layout else ()
        return {place.name: place.offset - self.first_tensor for place in places}

    def check(self, new: FileLayout, name: str) -> None:
        """Raise FormatError unless ``new`` can take the place of this file, which is called ``name``."""
        if (difference := self.difference(new)) is not None:
            raise FormatError(f"{name} cannot be replaced in place: {difference}. {_REMEDY}")

    def difference(self, new: FileLayout) -> str | None:
        """Return the first difference in words; None if ``new`` can take the place of this file."""
        kinds = [each.layout.format if each.layout else "a file of an unknown format" for each in (self, new)]
        if kinds[0] != kinds[1]:
            return f"it is {kinds[0]}, and the new version {kinds[1]}"
        ours, theirs = self._described(), new._described()
        for parts in (1, 2):  # what a tensor is comes first: where it lies depends on those before it
            for name in [*ours, *theirs]:
                here, there = (each.get(name, ("missing",))[:parts] for each in (ours, theirs))
                if here != there:
                    return f"tensor {name!r} is {' '.join(here)}, and in the new version {' '.join(there)}"
        if self.first_tensor != new.first_tensor:
            return (
                f"its tensors begin at byte {self.first_tensor}, and in the new version at byte {new.first_tensor}, "
                "because the header is longer or shorter: a first version that gpufs.torch.publish(replace=True) has "
                "written has space for longer metadata"
            )
        if self.size != new.size:
            return f"it has {self.size} bytes, and the new version {new.size}"
        return None

    def _described(self) -> dict[str, tuple[str, ...]]:
        """Return all tensors and what decides about their layout in words: what each is, and where it lies."""
        if self.layout is None:
            return {}
        described: dict[str, tuple[str, ...]] = {}
        for place in self.layout.tensors:
            if not place.name.startswith(PADDING_NAME):
                kind = f"{place.dtype} {_shown(place.shape)}{' in Fortran order' if place.fortran_order else ''}"
                described[place.name] = kind, f"at byte {place.offset - self.first_tensor} of the tensors"
        for name, record in parse_records(self.layout.metadata, Budget()).items():
            # Attributes, and whether it is a parameter, are the program's: those of each version may be others.
            if (owner := record.same_as or record.entry) is not None:
                view = "all" if record.strides is None else f"{_shown(record.shape or ())}, strides {[*record.strides]}"
                described[name] = (f"{view} of the bytes of {owner!r}",)
        return described


def _shown(shape: Sequence[object]) -> str:
    return "x".join(map(str, shape)) or "scalar"
