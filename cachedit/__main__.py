"""``python -m cachedit``, which is what ``accelerate launch -m cachedit`` and ``torchrun -m cachedit`` run."""

import sys

from cachedit.cli import main

if __name__ == "__main__":
    sys.exit(main())
