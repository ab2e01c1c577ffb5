"""Entry point of `python -m experiments.pretrain`, the main job."""

import sys

from experiments.pretrain.program import main

sys.exit(main())
