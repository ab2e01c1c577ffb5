"""Fixtures and settings of all tests."""

import hypothesis
import numpy as np
import pytest

# The same examples in every run; `--hypothesis-profile=fresh` looks for new ones.
hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, max_examples=20
)
hypothesis.settings.register_profile("fresh", deadline=None, max_examples=200)
hypothesis.settings.load_profile("fixed")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
