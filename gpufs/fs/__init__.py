"""The control plane of a mount: control files, and the directories of the host.

The native engine keeps the names, attributes and bytes of all files in memory, and serves the requests about them
(native/src/fuse). :mod:`gpufs.fs.layout` creates the names that every mount has. :mod:`gpufs.fs.connection` reads the
other requests, and :mod:`gpufs.fs.dispatch` routes them: to :mod:`gpufs.fs.control_files`, whose contents
:mod:`gpufs.fs.control` makes, and to :mod:`gpufs.fs.backing` for directories of the host.

All of it runs in one trio thread. A function that is not ``async`` does not wait, so it is atomic.
"""
