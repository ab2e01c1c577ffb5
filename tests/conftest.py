"""Fixtures and settings of all tests."""

import os
from pathlib import Path

import hypothesis
import numpy as np
import pytest

# On CPUs most of the tests' time is LLVM's; GPUs are tested as they are used.
if not Path("/dev/nvidia0").exists():
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=1 {flags}".strip()

# The same examples in every run; `--hypothesis-profile=fresh` looks for new ones.
hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, max_examples=20
)
hypothesis.settings.register_profile("fresh", deadline=None, max_examples=200)
hypothesis.settings.load_profile("fixed")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
