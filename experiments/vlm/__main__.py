"""Entry point of `python -m experiments.vlm`."""

import sys

from experiments.vlm.program import main

if __name__ == "__main__":
    sys.exit(main())
