"""The options of `gpufs cp`, and its everyday command lines, which are read without click.

click and what it needs take longer to load than a small file takes to copy. It reads all other command lines, and its
declarations in cp.py are what users see: help, completions and errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from gpufs.client._copy_types import Fastpath


class CpOptions(NamedTuple):
    """The options of the command. ``archive`` implies recursive and preserve. ``progress`` None: on a terminal.

    ``shell`` and ``remote_gpufs``: of the other machine, None for ssh and gpufs.
    """

    recursive: bool = False
    dereference: bool = False
    preserve: bool = False
    archive: bool = False
    no_clobber: bool = False
    partial: bool = False
    verify: bool = False
    fsync: bool = False
    jobs: int = 4
    fastpath: Fastpath = "auto"
    verbose: bool = False
    json: bool = False
    progress: bool | None = None
    shell: str | None = None
    remote_gpufs: str | None = None


_LETTERS: Final = {
    "r": "recursive",
    "R": "recursive",
    "L": "dereference",
    "p": "preserve",
    "a": "archive",
    "n": "no_clobber",
    "v": "verbose",
}


def read_plain(words: Sequence[str]) -> tuple[list[str], CpOptions] | None:
    """Return the names and options of a command line that has at least two names, and options of one letter alone.

    None for any other command line.
    """
    names: list[str] = []
    letters = ""
    for word in words:
        if word.startswith("-") and word != "-":
            letters += word[1:]
        else:
            names.append(word)
    if len(names) < 2 or not _LETTERS.keys() >= set(letters):
        return None
    chosen: dict[str, Any] = {_LETTERS[letter]: True for letter in letters}
    return names, CpOptions(**chosen)
