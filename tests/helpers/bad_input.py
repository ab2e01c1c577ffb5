"""A table of bad input: each entry is refused by an error with its value and rule."""

import re
from collections.abc import Callable, Iterable

import pytest

_CRYPTIC = ("has no attribute", "not subscriptable", "unhashable")


class BadInput:
    """Calls, and what their errors must contain: the value, or the place of it."""

    def __init__(self):
        self._entries = []

    def refused(
        self,
        function: Callable,
        values: Iterable,
        *,
        name: str = "{value}",
        contains: str | None = None,
    ) -> None:
        """Adds an entry for each of the values: `function(value)` is refused."""
        for value in values:
            shown = re.sub(r"\s+", " ", f"{value!r}")[:40]
            label = f"{name.format(value=shown)} {len(self._entries)}"
            text = repr(value) if contains is None else contains
            call = (lambda f=function, v=value: f(v), text)
            self._entries.append(pytest.param(*call, id=label))

    def each(self, test: Callable) -> Callable:
        """Runs a test with each entry."""
        return pytest.mark.parametrize(("call", "contains"), self._entries)(test)


def assert_refused(call: Callable, contains: str) -> None:
    """Asserts that a call ends in an error that names what is wrong."""
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    message = str(error.value)
    assert contains.strip("'\"") in message
    assert not any(words in message for words in _CRYPTIC)
