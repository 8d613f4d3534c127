"""The namespace of a mount: which names exist, what they are and who may do what.

General layout: :mod:`gpufs.fs.nodes` holds what one name leads to, :mod:`gpufs.fs.tree` the rules by which names come
and go, :mod:`gpufs.fs.control` the files below ``.gpufs``, and :mod:`gpufs.fs.operations` joins them to pyfuse3.
Attributes (mode, owner, size, times, link counts, extended ones) are not kept here but in the native engine's inode
table (:mod:`gpufs.fs.table`), since READ and WRITE change them without Python.

All of it runs in one trio thread. No function here waits unless it is ``async``, so what looks atomic is atomic.
"""
