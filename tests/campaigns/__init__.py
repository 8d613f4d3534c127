"""Long campaigns of real programs on a mount: `python -m campaigns` from tests/, run by `make check`."""
