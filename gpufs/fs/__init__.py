"""The control plane of a mount: control files, and the directories of the host.

The native engine keeps the names, attributes and bytes of all files in memory, and serves the requests about them
(native/src/fuse). :mod:`gpufs.fs.connection` reads the other requests and routes them to
:mod:`gpufs.fs.control_files`, or to :mod:`gpufs.fs.backing` for directories of the host. :mod:`gpufs.fs.requests` has
what all of these share.

All of it runs in one trio thread. A function that is not ``async`` does not wait, so it is atomic.
"""
