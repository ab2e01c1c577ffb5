"""Checkers: functions that decide whether a generated answer is right.

The setting `checker` is a name in `CHECKERS`, or MODULE:FUNCTION for a user's function
with the arguments of `Checker`. The module is imported from the working directory or
the installed packages.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from experiments.finetune.conversations import result_of

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Checker(Protocol):
    """A function that compares a generated answer with the expected result."""

    def __call__(
        self, answer: str, expected: str, fields: Mapping[str, Any]
    ) -> bool | float:
        """Returns whether an answer is right, or a score, where 1 means right.

        Args:
          answer: The generated answer.
          expected: The result in the record's answer.
          fields: The fields of the record in its file.
        """


def exact(answer: str, expected: str, fields: Mapping[str, Any]) -> bool:
    """Returns whether the result in an answer is the expected text.

    Examples:
      >>> exact("3 + 4 = 7 #### 7", "7", {})
      True
    """
    del fields
    return result_of(answer) == expected


def number(answer: str, expected: str, fields: Mapping[str, Any]) -> bool:
    """Returns whether the last numbers in an answer and in `expected` are equal.

    Examples:
      >>> number("That makes 1,200 eggs.", "1200", {})
      True
      >>> number("I do not know.", "1200", {})
      False
    """
    del fields
    numbers = [_NUMBER.findall(text) for text in (answer, expected)]
    if not all(numbers):
        return False
    last, right = (float(found[-1].replace(",", "")) for found in numbers)
    return last == right


CHECKERS: dict[str, Checker] = {"exact": exact, "number": number}


def load_checker(name: str) -> Checker:
    """Returns the checker with a name in `CHECKERS`, or the function MODULE:FUNCTION.

    Raises:
      ValueError: If there is no such checker, or it does not take the arguments of
        `Checker`.
    """
    if name in CHECKERS:
        return CHECKERS[name]
    module, colon, function = name.partition(":")
    if not colon:
        names = ", ".join(CHECKERS)
        raise ValueError(f"checkers are {names} or MODULE:FUNCTION, got {name!r}")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        checker = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"there is no checker {name!r}: {error}") from None
    if not callable(checker):
        raise ValueError(f"the checker {name!r} is no function, got {checker!r:.60}")
    try:
        inspect.signature(checker).bind("answer", "expected", {})
    except TypeError as error:
        raise ValueError(
            f"the checker {name!r} is called with an answer, the expected result and "
            f"the record's fields, but: {error}"
        ) from None
    except ValueError:  # Some functions of C have no signature.
        pass
    return checker


def is_code(name: str) -> bool:
    """Returns whether the name of a checker refers to code outside this program."""
    return name not in CHECKERS
