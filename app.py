"""The app, from a checkout: ``python app.py`` is ``cachedit app``."""

import sys

from cachedit.cli import main

if __name__ == "__main__":
    sys.exit(main(["app", *sys.argv[1:]]))
