"""Copies: files between the host, mounts, stores and other machines.

Programs find its functions in :mod:`gpufs` and :mod:`gpufs.client`.
"""
