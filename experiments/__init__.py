"""Training runs, benchmarks and notebooks on top of the library."""

import os

# XLA warns of what its tuning tries and drops; errors still show. Read when JAX loads.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
