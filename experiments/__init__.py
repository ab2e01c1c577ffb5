"""Training runs, benchmarks and notebooks on top of the library."""

import os

# XLA's autotuner warns of every candidate that it drops. Level 2 hides warnings and
# still shows errors. JAX reads the variable when it loads: set it first.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
