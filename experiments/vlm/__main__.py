"""Entry point of `python -m experiments.vlm`."""

import sys

from experiments.vlm.program import main

sys.exit(main())
