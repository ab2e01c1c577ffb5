"""Random programs under `fp8_remat`, and the same programs with exact matmuls."""
