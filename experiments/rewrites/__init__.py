"""Random programs under `fp8_remat`, beside the same programs with exact matmuls."""
