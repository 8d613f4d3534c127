"""Texts for terminals and logs, where control characters would do harm."""

# Characters that break a line or control a terminal, and how they are shown.
_CONTROL = {number: f"\\x{number:02x}" for number in (*range(0x20), *range(0x7F, 0xA0))}
_CONTROL |= {9: "\\t", 10: "\\n", 13: "\\r", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def printable(text: str) -> str:
    """The text without control characters: file names may contain newlines and escape sequences."""
    return text if text.isprintable() else text.translate(_CONTROL)
