"""`python -m gpufs` is the `gpufs` command."""

from gpufs.cli import main

if __name__ == "__main__":
    main()
