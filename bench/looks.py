"""Gives a picture of the docs a second look, for readers whose screen is dark or light.

python -m bench.looks PICTURE.svg     Of a picture on white that no script of this directory draws.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

# What was drawn for one scheme looks so in the other.
DARK: Final = (
    'text { fill: #e6edf3 } [fill="#ffffff"], [style*="fill: #ffffff"] { fill: #0d1117 !important } '
    '[style*="stroke: #000000"] { stroke: #8b949e !important }'
)
LIGHT: Final = 'text { fill: #24292f !important } [fill="#292929"] { fill: #f6f8fa }'


def with_look(svg: str, scheme: str, rules: str) -> str:
    """Return a picture with ``rules`` of CSS for a colour scheme, "dark" or "light"."""
    style = f"<style>@media (prefers-color-scheme: {scheme}) {{ {rules} }}</style>"
    return re.sub(r"(<svg\b[^>]*>)", rf"\1\n{style}", svg, count=1)


if __name__ == "__main__":
    picture = Path(sys.argv[1])
    picture.write_text(with_look(picture.read_text(), "dark", DARK))
