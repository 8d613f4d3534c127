"""Sizes and rates as people read them."""


def bytes_text(size: float | None) -> str:
    """Return a number of bytes for people: "1.5 GiB" or "512 B", in powers of 1024; "-" for None.

    >>> bytes_text(1536)
    '1.5 KiB'
    """
    if size is None:
        return "-"
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if size < 1023.95:
            break
        size, unit = size / 1024, larger
    digits = 0 if unit == "B" or size >= 99.95 else 1
    return f"{size:.{digits}f} {unit}"


def rate_text(rate: float) -> str:
    """Return bytes in a second for people: "1.5 GiB/s"."""
    return f"{bytes_text(rate)}/s"
