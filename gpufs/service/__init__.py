"""The daemon's side of the copy service: a Unix socket over which clients pass the two ends of a copy.

Runs in the daemon's trio loop: :func:`serve` is started in its nursery. Nothing here opens a path for a client; what a
client may read and write is what the kernel let it open. docs/protocol.md has the protocol and the rules.
"""

from gpufs.service._server import Service, serve, sweep

__all__ = ["Service", "serve", "sweep"]
