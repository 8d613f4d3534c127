"""Directories of the host, shown below ``backing/NAME``.

The host's answers are passed on unchanged, errors included. Each inode that the kernel knows has an O_PATH descriptor,
found with openat2 below the shown directory and never through a symbolic link (:mod:`gpufs.fs.backing.inodes`).
Attributes come from the host at each request: these inodes are not in the engine's table. Whatever needs rights is done
as the caller, with its user, group and supplementary groups, on a thread, so neither a slow disk nor a hung server
delays the loop (:mod:`gpufs.fs.backing.calls`). :mod:`gpufs.fs.backing.handler` answers the requests,
:mod:`gpufs.fs.backing.open_files` those that open files.

Reading a symbolic link that is absolute or leads out of the shown directory fails with ELOOP. A directory shown ``:ro``
answers EROFS to every change. This mount itself inside a shown directory is EDEADLK.
"""

from gpufs.fs.backing.handler import BackingHandler
from gpufs.fs.backing.inodes import Share

__all__ = ["BackingHandler", "Share"]
