"""Marks of tests."""

import pytest


def slow(*values: object):
    """Returns parameters of a test that only `pytest -m slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)
