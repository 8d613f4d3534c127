"""What the tests share: mounts that are always cleaned up, processes, system calls that os does not have, data."""
