"""Helpers of the tests: mounts that are always cleaned up, processes, system calls, data."""
