"""`python -m gpufs.daemon` is the daemon of one mount."""

import sys

from gpufs.daemon.main import main

if __name__ == "__main__":
    sys.exit(main())
