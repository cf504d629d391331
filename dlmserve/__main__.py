"""`python -m dlmserve`."""

import sys

from dlmserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
