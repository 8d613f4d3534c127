"""How a command starts another module of gpufs as a process of its own."""

import sys

# Never with the current directory in the module search path: it may belong to anybody. What this process was started
# without (the environment's PYTHON variables, the user's own packages) its children do without as well.
_OPTIONS = ["-I"] if sys.flags.isolated else ["-P", *(["-s"] if sys.flags.no_user_site else [])]


def python_module(name: str) -> list[str]:
    """The command line that runs a module with this interpreter. Start it with ``cwd="/"``."""
    return [sys.executable, *_OPTIONS, "-m", name]
