"""The progress of a training: a bar on a terminal, or lines in a log file."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Self

from tqdm import tqdm

_SECONDS = 30.0  # Seconds between two lines.


class StepBar:
    """A display of the progress of a recipe's training, step by step.

    On a terminal it draws a bar on standard error. If standard output is no terminal,
    it prints a line there for the first and the last step, and every half minute:

      coat: step 120 of 600, 20%, loss 2.345, tokens/s 12,345, 01:23 left

    Args:
      recipe: The recipe.
      steps: The number of the last step.
      done: The number of steps that are done already.
      enabled: Whether anything is shown; False in processes other than the main
        process.
      clock: A function that returns the current time in seconds.
    """

    def __init__(
        self,
        recipe: str,
        steps: int,
        done: int,
        *,
        enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recipe, self._steps, self._clock = recipe, steps, clock
        self._first, self._started = done, clock()
        self._next = self._started
        self._in_lines = enabled and not sys.stdout.isatty()
        self._bar = tqdm(
            desc=recipe,
            total=steps,
            initial=done,
            unit="step",
            disable=not (enabled and sys.stderr.isatty()),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def show(self, step: int, values: Mapping[str, str]) -> None:
        """Shows that `step` is done, together with values by name."""
        self._bar.set_postfix(values, refresh=False)
        self._bar.update(step - self._bar.n)
        now = self._clock()
        if self._in_lines and (now >= self._next or step == self._steps):
            print(self._line(step, values, now), flush=True)
            self._next = now + _SECONDS

    def _line(self, step: int, values: Mapping[str, str], now: float) -> str:
        texts = [f"step {step} of {self._steps}", f"{step / self._steps:.0%}"]
        texts += [f"{name} {value}" for name, value in values.items()]
        if (count := step - self._first) > 0 and step < self._steps:
            left = (now - self._started) / count * (self._steps - step)
            texts.append(f"{tqdm.format_interval(left)} left")
        return f"{self._recipe}: {', '.join(texts)}"
