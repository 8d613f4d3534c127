"""The namespace of a mount: which names exist and what they lead to.

:mod:`gpufs.fs.connection` reads requests, and :mod:`gpufs.fs.dispatch` hands them to those that answer:
:mod:`gpufs.fs.tree` for names in memory, and :mod:`gpufs.fs.backing` for directories of the host.
:mod:`gpufs.fs.control` makes the contents of the files below ``.gpufs``. Attributes (mode, owner, size, times, link
counts, extended ones) are not kept here but in the native engine's inode table (:class:`gpufs.engine.Mount`), since
READ and WRITE change them without Python.

All of it runs in one trio thread. A function that is not ``async`` does not wait, so it is atomic.
"""
