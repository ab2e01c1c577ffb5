"""Training runs, benchmarks and notebooks on top of the library."""
