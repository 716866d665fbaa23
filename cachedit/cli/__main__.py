"""``python -m cachedit.cli``."""

import sys

from cachedit.cli import main

if __name__ == "__main__":
    sys.exit(main())
