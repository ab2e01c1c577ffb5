"""Marks of tests."""

from collections.abc import Iterable

import pytest


def slow(*values: object):
    """Returns parameters of a test that only `pytest -m slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_except(fast: Iterable[object], cases: Iterable[object]) -> list[object]:
    """Returns the cases of a test, all marked as slow except the `fast` ones.

    A case that is a tuple has the values of several parameters.
    """
    fast, cases = [*fast], [*cases]
    assert all(case in cases for case in fast), "fast cases are cases"
    return [
        case if case in fast else slow(*case if isinstance(case, tuple) else (case,))
        for case in cases
    ]
