"""The kinds of values that knobs have: how each is parsed from text, and what is allowed."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Final, SupportsIndex

MOST_DEVICES: Final = 64

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value. ``parse`` takes a text, and raises ValueError for one that is not allowed."""

    allowed: str  # ends the sentence "... is not allowed: "
    metavar: str
    parse: Callable[[str], Any]
    choices: tuple[str, ...] = ()  # if only these words are allowed
    join: Callable[[Sequence[str]], str] | None = None  # makes one text of a list, where lists are allowed

    def coerce(self, value: object) -> Any:
        """Return the value for a text, or what a program or a TOML file gives. ValueError if it is not allowed."""
        return self.parse(self.text_of(value))

    def text_of(self, value: object) -> str:
        """Return the text for a value of Python's types. ValueError for types that no kind has."""
        if isinstance(value, (str, os.PathLike)):
            return os.fsdecode(value)
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, float):
            return f"{value:f}"  # without an exponent
        if isinstance(value, SupportsIndex):
            return str(index(value))
        if self.join is not None and isinstance(value, Sequence) and all(map(_is_word, value)):
            return self.join([str(word) for word in value])
        raise ValueError(value)


def _is_word(value: object) -> bool:
    return isinstance(value, (str, SupportsIndex)) and not isinstance(value, bool)


def size_text(size: int) -> str:
    """Return a size in bytes as the shortest exact text that a size knob reads, for example "512M"."""
    for unit in ("T", "G", "M", "K"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)


def parse_size(text: str) -> int:
    """Return the bytes in "4096", "512M", "1.5G", "4GiB"; K to T are powers of 1024. ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:iB|B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if not match:
        raise ValueError(text)
    factor = _UNITS[match[2].upper()]
    whole, _, fraction = match[1].partition(".")
    # Exact, whatever the number of digits.
    return int(whole) * factor + (int(fraction) * factor // 10 ** len(fraction) if fraction else 0)


def size(least: int, most: int, multiple: int = 1, *, power_of_two: bool = False) -> Kind:
    """Return the kind of a size in bytes within these bounds."""

    def parse(text: str) -> int:
        value = parse_size(text)
        if not least <= value <= most or value % multiple or (power_of_two and value & (value - 1)):
            raise ValueError(text)
        return value

    allowed = f"a size such as 4096, 512M or 1.5G, from {size_text(least)} to {size_text(most)}"
    if multiple > 1:
        allowed += f", a multiple of {size_text(multiple)}"
    if power_of_two:
        allowed += ", a power of two"
    return Kind(allowed, "SIZE", parse)


def integer(least: int, most: int) -> Kind:
    """Return the kind of a whole number within these bounds."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\d+", text.strip(), re.ASCII) or not least <= int(text) <= most:
            raise ValueError(text)
        return int(text)

    return Kind(f"a whole number from {least} to {most}", "N", parse)


def flags(bits: int) -> Kind:
    """Return the kind of a number of ``bits`` bits."""

    def parse(text: str) -> int:
        value = int(text, 0)
        if not 0 <= value < 1 << bits:
            raise ValueError(text)
        return value

    return Kind(f"a number of {bits} bits, such as 0x1000", "FLAGS", parse)


def duration(least: float, most: float) -> Kind:
    """Return the kind of a time in seconds within these bounds."""

    factors = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

    def parse(text: str) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)", text.strip(), re.ASCII)
        if not match or not least <= float(match[1]) * factors[match[2]] <= most:
            raise ValueError(text)
        return float(match[1]) * factors[match[2]]

    return Kind(f"a time such as 2, 500ms or 1.5m, from {least:g} to {most:g} seconds", "TIME", parse)


def choice(*choices: str) -> Kind:
    """Return the kind of one of these words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return Kind("one of " + ", ".join(choices), "|".join(choices), parse, choices)


def _parse_boolean(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    try:
        return words[text.strip().lower()]
    except KeyError:
        raise ValueError(text) from None


def _parse_path(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError(text)
    from pathlib import Path  # most commands have no path to read

    try:
        return str(Path(text).expanduser().absolute())
    except RuntimeError:  # ~ of an unknown user
        raise ValueError(text) from None


def join_backings(words: Sequence[str]) -> str:
    """Join several directories to show, each NAME=DIR or NAME=DIR:ro, to one setting; DIR may contain anything."""
    return ",".join(word.replace("\\", "\\\\").replace(",", "\\,") for word in words)


def _parse_backings(text: str) -> list[tuple[str, str, bool]]:
    shown: list[tuple[str, str, bool]] = []
    # A backslash escapes the character after it.
    parts = [re.sub(r"\\(.)", r"\1", part, flags=re.S) for part in re.findall(r"(?:^|,)((?:\\.|[^,\\])*)", text, re.S)]
    if join_backings(parts) != text:  # a backslash before nothing, or before what needs none
        raise ValueError(text)
    for part in parts:
        name, equals, path = part.partition("=")
        read_only = path.endswith(":ro")
        path = path.removesuffix(":ro")
        bad_name = not name or "/" in name or "\0" in name or name in (".", "..") or len(os.fsencode(name)) > 255
        if bad_name or not equals or name in [known for known, _, _ in shown]:
            raise ValueError(text)
        shown.append((name, _parse_path(path), read_only))
    return shown


def user_number(name: str) -> int:
    """Return the number of a user, by name or number. ValueError if there is none."""
    if re.fullmatch(r"\d{1,10}", name, re.ASCII) and int(name) < (1 << 32) - 1:
        return int(name)
    import pwd  # most commands name no user

    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise ValueError(name) from None


def _parse_limits(text: str) -> list[tuple[int, int | None]]:
    limits: dict[int, int | None] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, size = part.partition("=")
        user, limit = user_number(name), None if size == "none" else parse_size(size)
        if not equals or user in limits or (limit or 0) >= 1 << 46:
            raise ValueError(text)
        limits[user] = limit
    return list(limits.items())


def _join_devices(words: Sequence[str]) -> str:
    return words[0] + "," if len(words) == 1 else ",".join(words)


def _parse_devices(text: str) -> int | list[str]:
    text = text.strip()
    if text == "all":
        return 0
    words = [word.strip() for word in re.split("[,:]", text)]
    if len(words) == 1 and words[0].isdecimal() and words[0].isascii() and 1 <= int(words[0]) <= MOST_DEVICES:
        return int(words[0])
    if len(words) > 1 and not words[-1]:
        words.pop()
    elif len(words) == 1 and words[0].isdecimal():
        raise ValueError(text)
    if not all(re.fullmatch(r"[0-9]{1,2}|(GPU|MIG)-[0-9a-f-]+", word, re.ASCII | re.IGNORECASE) for word in words):
        raise ValueError(text)
    return words


def _parse_words(text: str) -> str:
    words = [word.strip() for word in text.split(",")]
    if text.strip() and not all(re.fullmatch(r"[\w.+-]+", word, re.ASCII) for word in words):
        raise ValueError(text)
    return ",".join(word for word in words if word)


WORDS: Final = Kind("words with commas between them, such as nfs4,lustre", "TYPES", _parse_words)
BOOLEAN: Final = Kind("true or false", "true|false", _parse_boolean)
BACKINGS: Final = Kind(
    "NAME=DIR or NAME=DIR:ro, each NAME once; several: the option again, a list in the file, or with commas between "
    "them, \\, for a comma in DIR",
    "NAME=DIR[:ro]",
    _parse_backings,
    join=join_backings,
)
LIMITS: Final = Kind(
    "USER=SIZE, by name or number, each once; SIZE may be none; several with commas between them, or a list in a file",
    "USER=SIZE",
    _parse_limits,
    join=",".join,
)
DEVICES: Final = Kind(
    f"all; a number N from 1 to {MOST_DEVICES} for the first N; or a list such as 0,2 or GPU-4f3e,GPU-91c0: "
    "numbers, and UUIDs or their beginnings (2, is the GPU 2 alone; in mount options write colons for commas)",
    "all|N|LIST",
    _parse_devices,
    join=_join_devices,
)
PATH: Final = Kind("the path of a file", "FILE", _parse_path)
