"""`python -m aotc` is the `aotc` command."""

import sys

from aotc.cli import main

if __name__ == "__main__":
    sys.exit(main())
