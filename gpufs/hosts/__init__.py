"""The connection to gpufs on another machine: how it is started and what is sent. It knows no mounts.

copying/host_copy.py copies files over it. docs/howto/copy-between-nodes.md is for users.
"""
