"""Which files a copy is of: the patterns of --include and --exclude, which mean what they mean to rsync."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from contextlib import closing
from typing import Final

from gpufs.copying.walk import Steps

_WILD: Final = re.compile(r"[*?[]")
# In patterns with a wildcard: stars, and a class of characters, in which a ] that comes first is one of them.
_TOKEN: Final = re.compile(r"\*+|\?|\[[!^]?(?:\]|\\.)?(?:\[:\w+:\]|\\.|[^\]\\])*\]|\\?.", re.DOTALL)
_CLASSES: Final = {
    "alnum": "A-Za-z0-9",
    "alpha": "A-Za-z",
    "blank": " \\t",
    "cntrl": "\\x00-\\x1f\\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": "!-/:-@\\[-`{-~",
    "space": "\\s",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}


class Pattern:
    """One pattern.

    With a slash, or ``**``, it is compared with the path below the source: a slash at its start stands for the source,
    otherwise the path may begin in any directory. Else it is compared with the name. ``*`` and ``?`` match no slash,
    ``**`` does. A slash at its end leaves directories alone; ``/***`` there is a directory and all below it.
    """

    def __init__(self, text: str) -> None:
        if not text:
            raise OSError(errno.EINVAL, "an empty pattern matches no name: leave it out")
        self.text = text
        self.has_matched = False
        self._of_directories = len(text) > 1 and text.endswith("/")
        text = text[:-1] if self._of_directories else text
        wild = _WILD.search(text) is not None
        deep = "**" in text
        self._of_names = "/" not in text and not deep
        self._above = "/" if text.startswith("**") else ""  # so **/x matches at the top, too
        self._ends_deep = deep and text.endswith("***")
        start = "" if self._of_names or self._above or text.startswith("/") else "(?:.*/)?"
        text = text.removeprefix("/")
        self._match = re.compile(start + (_expression(text) if wild else re.escape(text)), re.DOTALL).fullmatch

    def matches(self, path: str, *, is_directory: bool) -> bool:
        """Return whether it matches a file or directory of this path below the source."""
        if self._of_directories and not is_directory:
            return False
        compared = path.rpartition("/")[2] if self._of_names else self._above + path
        found = self._match(compared + "/" if is_directory and self._ends_deep else compared) is not None
        self.has_matched |= found
        return found


def _expression(text: str) -> str:
    found = []
    for token in _TOKEN.findall(text):
        if token.startswith("*"):
            found.append(".*" if len(token) > 1 else "[^/]*")
        elif token == "?":
            found.append("[^/]")
        elif len(token) > 1 and token.startswith("["):
            found.append(_class_of(token))
        elif token == "[":
            return "(?!)"  # a class without an end matches nothing
        else:
            found.append(re.escape(token[-1]))
    return "".join(found)


def _class_of(token: str) -> str:
    negated = token[1] in "!^"
    inner = ""
    for part in re.findall(r"\[:(\w+):\]|(\\.|[^\\])", token[1 + negated : -1], re.DOTALL):
        name, character = part
        inner += _CLASSES.get(name, "") if name else character if character == "-" else re.escape(character[-1])
    return f"(?!/)[{'^' * negated}{inner}]"


class Selection:
    """What --include and --exclude leave of a walk."""

    def __init__(self, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> None:
        self._include = [Pattern(text) for text in include]
        self._exclude = [Pattern(text) for text in exclude]

    def of(self, steps: Steps) -> Steps:
        """Leave out files and directories that are excluded, and files that are not included if anything is."""
        return self._chosen(steps) if self._include or self._exclude else steps

    def unmatched(self) -> list[str]:
        """Return the patterns that have matched nothing in all walks."""
        return [pattern.text for pattern in (*self._include, *self._exclude) if not pattern.has_matched]

    def _chosen(self, steps: Steps) -> Steps:
        with closing(steps):
            for step in steps:
                if step.kind == "file" and step.folder is not None:
                    path = step.below
                    if _any(self._exclude, path) or (self._include and not _any(self._include, path)):
                        continue
                elif step.parent is not None and step.folder is not None:
                    if step.kind == "enter" and _any(self._exclude, step.folder.below, is_directory=True):
                        step.folder.wanted = False
                    if not step.folder.wanted:
                        continue
                yield step


def _any(patterns: Iterable[Pattern], path: str, *, is_directory: bool = False) -> bool:
    return any(pattern.matches(path, is_directory=is_directory) for pattern in patterns)
