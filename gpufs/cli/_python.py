"""Starts another module of gpufs as a process."""

import sys

# Never with the current directory in the module search path: another user may own it. The child ignores PYTHON
# variables and the user's own packages if this process does.
_OPTIONS = ["-I"] if sys.flags.isolated else ["-P", *(["-s"] if sys.flags.no_user_site else [])]


def python_module(name: str) -> list[str]:
    """The command line that runs a module with this interpreter. Start it with ``cwd="/"``."""
    return [sys.executable, *_OPTIONS, "-m", name]
