"""Verdicts on programs, in a module that does not import the library."""

import dataclasses
from typing import Literal, NamedTuple

Verdict = Literal["within the bound", "ill-conditioned", "beyond the bound", "error"]


@dataclasses.dataclass(frozen=True)
class Judged:
    """The verdict on a program.

    Attributes:
      verdict: The verdict.
      error: The largest error of a result or gradient, relative to its norm.
      own: The largest error of the oracle with random errors in its matmuls.
      saved: The bytes that are saved, with and without marks in the program; zeros if
        they are not compared.
      said: The message of an exception, or the arrays with errors beyond the bound.
    """

    verdict: Verdict
    error: float = 0.0
    own: float = 0.0
    saved: tuple[int, int] = (0, 0)
    said: str = ""

    @property
    def is_wrong(self) -> bool:
        """True if the program shows a fault of the library, or of this experiment."""
        is_beyond = self.verdict in ("beyond the bound", "error")
        return is_beyond or self.saved[0] != self.saved[1]


class Outcome(NamedTuple):
    """The seed of a program, the names of its elements, and the verdict on it."""

    seed: int
    elements: tuple[str, ...]
    judged: Judged
