"""Helpers that end a program in the middle of its work."""

import itertools
from collections.abc import Callable

import pytest


class Killed(BaseException):
    """An exception that no code of the program expects, in place of SIGKILL."""


def kill() -> None:
    """Raises `Killed`."""
    raise Killed


def on_call(
    patch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    number: int,
    action: Callable[[], None] = kill,
) -> None:
    """Runs `action` before the call `number`, counted from 1, of a method."""
    original, calls = getattr(owner, name), itertools.count(1)

    def wrapper(*args, **kwargs):
        if next(calls) == number:
            action()
        return original(*args, **kwargs)

    patch.setattr(owner, name, wrapper)
