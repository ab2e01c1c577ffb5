"""Notes that `fp8_remat` leaves on saved arrays, in name scopes of the program."""

import contextlib
import re
from typing import Any, NamedTuple

import jax

_SCOPE = re.compile(r"FP8 ([^;]*?) for ([^;]*);")


class Note(NamedTuple):
    """A note on an array that `fp8_remat` saves, for profiles and `residual_report`.

    Attributes:
      kept: The format of the copy, or the reason why the array is not quantized.
      reader: The operation that the array is saved for.
    """

    kept: str
    reader: str

    def __str__(self) -> str:
        saved, reader = (text.replace(";", ",") for text in self)
        return f"FP8 {saved} for {reader};"

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the name scope that contains the note."""
        return jax.named_scope(str(self))

    @classmethod
    def within(cls, name_stack: str) -> "Note | None":
        """Returns the innermost note in an operation's name stack, or None."""
        notes = _SCOPE.findall(name_stack)
        return cls(*notes[-1]) if notes else None
