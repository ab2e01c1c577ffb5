"""Ends of a program in the middle of its work."""

import itertools
from collections.abc import Callable

import pytest


class Killed(BaseException):
    """An end that no code of the program expects, as SIGKILL is."""


def kill() -> None:
    """Ends the program."""
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
