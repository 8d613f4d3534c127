"""`python -m gpufs.config` prints docs/knobs.md."""

from gpufs.config import page

if __name__ == "__main__":
    print(page(), end="")
