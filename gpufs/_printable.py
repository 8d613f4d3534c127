"""Texts for terminals and logs, where control characters would do harm."""

import unicodedata

_NAMED = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}
# Categories of Unicode: characters that break a line, control a terminal, or change how their neighbours are shown, as
# U+202E does, after which text runs from right to left.
_CONTROL = ("Cc", "Cf", "Zl", "Zp")


def printable(text: str) -> str:
    """Return the text without control characters: file names may contain newlines and escape sequences."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    number = ord(character)
    # Half of a surrogate pair cannot be written; those from U+DC80 to U+DCFF stand for bytes of a file name.
    unpaired = 0xD800 <= number <= 0xDFFF and not 0xDC80 <= number <= 0xDCFF
    if not unpaired and unicodedata.category(character) not in _CONTROL:
        return character
    if number < 0x100:
        return _NAMED.get(character, f"\\x{number:02x}")
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
