"""``python -m cachedit.cli``."""

import sys

from cachedit.cli import main

sys.exit(main())
