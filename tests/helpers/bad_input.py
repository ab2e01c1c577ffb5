"""Tables of bad input, with the texts that errors about it must contain."""

import re
from collections.abc import Callable, Iterable

import pytest

_CRYPTIC = ("has no attribute", "not subscriptable", "unhashable")


class BadInput:
    """A table of calls that must fail, each with a text that its error must contain."""

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
        """Adds an entry for each value: `function(value)` must be refused.

        Args:
          function: The function to call.
          values: The bad values.
          name: The label of an entry, in which "{value}" stands for the value.
          contains: A text in the error message; None means the value's repr.
        """
        for value in values:
            shown = re.sub(r"\s+", " ", f"{value!r}")[:40]
            label = f"{name.format(value=shown)} {len(self._entries)}"
            text = repr(value) if contains is None else contains
            call = (lambda f=function, v=value: f(v), text)
            self._entries.append(pytest.param(*call, id=label))

    def each(self, test: Callable) -> Callable:
        """Parametrizes a test with `call` and `contains` of each entry."""
        return pytest.mark.parametrize(("call", "contains"), self._entries)(test)


def assert_refused(call: Callable, contains: str) -> None:
    """Asserts that a call raises a ValueError or TypeError with a helpful message.

    The message must contain `contains`, and no words of Python's own errors.
    """
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    message = str(error.value)
    assert contains.strip("'\"") in message
    assert not any(words in message for words in _CRYPTIC)
