"""The daemon's service: a Unix socket for clients that copy, attach or register memory, or set limits.

Runs in the daemon's trio loop, as a task that calls :func:`serve`. Nothing here opens a path for a client; what a
client may read and write is what the kernel let it open. docs/protocol.md has the protocol and the rules.
"""

from gpufs.service._kept import Kept, restore
from gpufs.service._server import Service, remove_directory, serve, socket_path, sweep

__all__ = ["Kept", "Service", "remove_directory", "restore", "serve", "socket_path", "sweep"]
