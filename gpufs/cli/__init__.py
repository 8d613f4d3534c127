"""The gpufs command: one module a command."""
