"""gpufs serve-copy: the side of `gpufs cp` on another machine. ssh starts it there."""

import os
import signal
from urllib.parse import unquote

import click

from gpufs.copying.host_copy import serve


@click.command(name="serve-copy", hidden=True)
@click.option("--shell", default="", metavar="COMMAND", help="What reaches the next machine, percent-encoded; ssh.")
@click.option("--program", default="", metavar="COMMAND", help="gpufs on that machine, percent-encoded; gpufs.")
def command(shell: str, program: str) -> int:
    """Copy files for `gpufs cp` on another machine, over standard input and output, with your rights."""
    # Ctrl-C ends the other side, and the end of the connection ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outgoing = os.dup(1)
    os.dup2(2, 1)  # nothing else may be printed between the messages
    return 0 if serve(0, outgoing, shell=unquote(shell), program=unquote(program)) else 1
