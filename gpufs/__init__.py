"""gpufs: GPU memory as files.

Importing this package starts nothing: no thread, no socket, no device driver. The native engine is loaded by
importing :mod:`gpufs.engine`, and a device's driver by opening a :class:`gpufs.engine.Engine`.
"""

from gpufs._version import __version__

__all__ = ["__version__"]
