"""Options that several commands which copy have in common. This module imports nothing else, for quick completions."""

from collections.abc import Callable
from typing import Any

import click

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

verify: _Decorator = click.option(
    "--verify", is_flag=True, help="Read both files again and compare their SHA-256; with --fsync from disk."
)
fsync: _Decorator = click.option(
    "--fsync", is_flag=True, help="Write files of the host to disk before the command ends."
)
shell: _Decorator = click.option(
    "-e", "--rsh", "shell", metavar="COMMAND", help="Reach HOST by this command instead of ssh, as with rsync."
)
remote_gpufs: _Decorator = click.option(
    "--remote-gpufs", metavar="COMMAND", help="The gpufs of HOST, if a shell there does not find it."
)
verbose: _Decorator = click.option(
    "-v", "--verbose", is_flag=True, help="Print a line for each file, with --json on standard error."
)
quiet: _Decorator = click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
progress: _Decorator = click.option(
    "--progress/--no-progress", default=None, help="Draw a progress bar.  [default: if standard error is a terminal]"
)


def jobs(done: str) -> _Decorator:
    """Return the option for the number of files that are ``done`` at once."""
    text = f"Files {done} at once, 1 to 16."
    return click.option("-j", "--jobs", type=click.IntRange(1, 16), metavar="N", default=4, help=text)
