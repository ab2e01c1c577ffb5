"""Measures how far Adam with low-bit moments drifts from Adam with float32 moments.

    uv run python -m experiments.optimizer.drift

The command feeds several sequences of gradients, called stories (stationary, falling,
spiking, rare, frozen, ...), to Adam with float32 moments and to Adam with moments
stored in other formats, for several values of b2. It measures how far the updates of
each method are from the updates with float32 moments. A moving average with b2 = 0.999
moves by about 0.1% per step. This is less than half the distance between two 8-bit
codes, so an average that is rounded to nearest does not move. Results are written after
every b2 and length. Run the command again after an interruption: only missing cases
run.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32
from rich.console import Console
from tqdm import tqdm

from experiments.common.programs import list_of, new_parser, positive_int, results_path
from experiments.common.results import Bar, default_path, known_rows, write_results
from experiments.common.tables import bars as bars_table
from experiments.common.tables import grouped
from experiments.optimizer import drift_report as report
from experiments.optimizer.drift_cases import B1, METHODS, OURS, STORIES, Time
from experiments.optimizer.moments import GROUP
from experiments.optimizer.schemes import EPS, Groups, adam

Row = dict[str, Any]
# The number of measurements ("looks") in a run. Rows average the last fifth of them.
_LOOKS = 50
_DRAWN = ("b2", "steps", "step", "method", "story", "ratio")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with the arguments `argv`, and returns an exit code."""
    args = parser().parse_args(argv)
    try:
        if not args.out.parent.is_dir():
            raise ValueError(f"no folder {args.out.parent} to write to")
        for b2 in args.b2:
            if not 0 < b2 < 1:
                raise ValueError(f"b2 must be above 0 and below 1, got {b2:g}")
        for steps in args.steps:
            if steps < _LOOKS:
                raise ValueError(f"a run must have {_LOOKS} steps or more, got {steps}")
        earlier = known_rows(args.out), known_rows(args.out, of="curves")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows, curves = study(args, *earlier, out=args.out)
    bars = check(rows)
    console = Console(width=104)
    for b2 in args.b2:
        console.print(report.table(rows, b2=b2, steps=max(args.steps)))
    if bars:
        console.print(bars_table(bars))
    report.figure(curves).savefig(args.out.with_suffix(".png"))
    print(f"{args.out}, and a figure next to it")
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the command line parser."""
    top = new_parser("experiments.optimizer.drift", __doc__)
    add = top.add_argument
    add(
        "--b2",
        type=list_of(float),
        default=(0.95, 0.99, 0.999, 0.9999),
        help="decay rates of the second moment (0.95,0.99,0.999,0.9999)",
        metavar="B2,...",
    )
    add(
        "--steps",
        type=list_of(int),
        default=(1000, 10_000, 100_000),
        help="lengths of runs (1000,10000,100000)",
        metavar="N,...",
    )
    add("--groups", type=positive_int, default=64, help="groups of 128 a story (64)")
    out = default_path("drift")
    add(
        "--out",
        type=results_path,
        default=out,
        help=f"results file ({out})",
        metavar="FILE",
    )
    return top


def study(
    args: argparse.Namespace,
    rows: Sequence[Row] = (),
    curves: Sequence[Row] = (),
    out: Path | None = None,
) -> tuple[list[Row], list[Row]]:
    """Simulates the runs of a command line that have no rows yet.

    Args:
      args: The arguments of the command line.
      rows: Rows of earlier runs.
      curves: Curves of earlier runs.
      out: The results file to write after each run, or None.

    Returns:
      All rows, one for each length, b2, method and sequence of gradients; and the
      curves of the run that `drift_report.figure` draws, one row for each measurement,
      method and sequence.
    """
    rows, curves = list(rows), list(curves)
    simulation = Simulation(groups=args.groups)
    runs = [(b2, steps) for steps in sorted(args.steps) for b2 in args.b2]
    simulated = {(row["b2"], row["steps"]) for row in rows}
    with tqdm(total=sum(steps for _, steps in runs), unit="step", disable=None) as bar:
        for b2, steps in runs:
            bar.set_description(f"b2 = {b2:g}, {steps:,} steps")
            if (b2, steps) in simulated:
                bar.update(steps)
                continue
            looks = list(simulation.looks(b2, steps, bar))
            rows += means(looks)
            if (b2, steps) == report.drawn(runs):
                curves += [{k: row[k] for k in _DRAWN} for row in looks]
            if out:
                write_results(out, rows=rows, bars=check(rows), curves=curves)
    return rows, curves


class Carry(NamedTuple):
    """The state of a simulated run.

    Attributes:
      mu: The exact first moments.
      nu: The exact second moments.
      states: The state of each method, by name.
      last: The last step in which each element had a gradient other than zero.
    """

    mu: Groups
    nu: Groups
    states: dict[str, Any]
    last: Int32[Array, "groups 128"]


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A simulation of all gradient sequences at once, as the rows of one parameter.

    Attributes:
      groups: The number of groups of 128 elements in each sequence.
    """

    groups: int

    def looks(self, b2: float, steps: int, bar: tqdm) -> Iterable[Row]:
        """Runs `steps` steps of Adam with decay rate `b2`, measured at even intervals.

        `bar` is the progress bar to advance.

        Yields:
          One row for each measurement, method and sequence.
        """
        carry, at = self._start(), np.linspace(0, steps - 1, _LOOKS + 1, dtype=int)
        for start, end in itertools.pairwise(at):
            carry = self._advance(carry, b2, start, end, steps)
            by_method = jax.device_get(self._measure(carry, b2, end, steps))
            bar.update(end - start)
            for method, errors in by_method.items():
                for j, story in enumerate(STORIES):
                    row = {"b2": b2, "steps": steps, "step": int(end)}
                    row |= {"method": method, "story": story.name}
                    yield row | {k: _number(v[j]) for k, v in errors.items()}
        bar.update(1)

    def _start(self) -> Carry:
        shape = len(STORIES) * self.groups, GROUP
        zeros = jnp.zeros(shape)
        states = {name: method.init(zeros) for name, method in METHODS.items()}
        return Carry(zeros, zeros, states, jnp.full(shape, -(2**30)))

    def _gradients(self, time: Time) -> Groups:
        """Draws a step's gradients; each element has a lognormal scale."""
        shape = self.groups, GROUP
        sizes = jnp.exp(jax.random.normal(jax.random.key(9), shape))
        blocks = jax.random.normal(time.key, (len(STORIES), *shape)) * sizes
        chi = jax.random.normal(jax.random.fold_in(time.key, 2), (3, *shape))
        heavy = lax.rsqrt(jnp.mean(jnp.square(chi), axis=0))
        parts = []
        for x, story in zip(blocks, STORIES, strict=True):
            x = {"normal": x, "heavy": x * heavy, "positive": jnp.abs(x)}[story.kind]
            parts.append(x * story.factor(time, self.groups))
        return jnp.concatenate(parts)

    @partial(jax.jit, static_argnums=0)
    def _advance(self, carry: Carry, b2, start, end, steps) -> Carry:
        """Runs steps `start` to `end - 1` of a run of `steps` steps."""

        def step(i, carry):
            grads = self._gradients(_time(i, steps))
            states = {
                name: METHODS[name].update(grads, state, b2)
                for name, state in carry.states.items()
            }
            mu, nu = adam(carry.mu, carry.nu, grads, B1, b2)
            return Carry(mu, nu, states, jnp.where(grads == 0, carry.last, i))

        return lax.fori_loop(start, end, step, carry)

    @partial(jax.jit, static_argnums=0)
    def _measure(self, carry: Carry, b2, step, steps) -> dict[str, dict[str, Array]]:
        """Returns errors of a step's update by method and statistic, per sequence."""
        time = _time(step, steps)
        grads = self._gradients(time)
        exact = adam(carry.mu, carry.nu, grads, B1, b2)
        last = jnp.where(grads == 0, carry.last, step)
        counted = self._counted(last, b2, time) & (exact[1] > 0)
        split = partial(jnp.reshape, shape=(len(STORIES), self.groups * GROUP))
        errors = {}
        for name, state in carry.states.items():
            update = adam(*METHODS[name].read(state), grads, B1, b2)
            errors[name] = _errors(*map(split, (*exact, *update, counted)))
        return errors

    def _counted(self, last: Array, b2, time: Time) -> Bool[Array, "groups 128"]:
        """Returns a mask of elements with a gradient in the last 1 / (1 - b2) steps.

        After a freeze of more than 1 / (1 - b2) steps, frozen elements count again only
        1 / (1 - b2) steps after its end.
        """
        memory = 1 / (1 - b2)
        counted = time.step - last <= memory
        start, end = time.freeze
        settled = (time.step < start) | (time.step >= end + memory)
        settled |= end - start <= memory
        for j, story in enumerate(STORIES):
            if story.frozen is not None:
                rows = slice(j * self.groups, (j + 1) * self.groups)
                frozen = counted[rows, story.frozen] & settled
                counted = counted.at[rows, story.frozen].set(frozen)
        return counted


def _time(step: Array, steps: Array) -> Time:
    return Time(step, steps, jax.random.fold_in(jax.random.key(1), step))


def _errors(
    mu: Float32[Array, "stories n"],
    nu: Float32[Array, "stories n"],
    read_mu: Float32[Array, "stories n"],
    read_nu: Float32[Array, "stories n"],
    counted: Bool[Array, "stories n"],
) -> dict[str, Float32[Array, " stories"]]:
    """Returns the errors of updates for each sequence, over the elements in `counted`.

    An update is u = mu / (sqrt(nu) + eps). A ratio is the exact denominator sqrt(nu) +
    eps over the denominator from `read_nu`. The keys are:

    - `ratio`, `largest`, `least`: the mean, maximum and minimum of the ratios.
    - `rms`: the root mean square of ratio - 1.
    - `off_by_2_percent`: the percentage of ratios above 2 or below 1/2.
    - `update_ratio`: mean(u_read * u) / mean(u^2), the slope of the updates over the
      exact updates.
    - `update_rms`: sqrt(mean((u_read - u)^2) / mean(u^2)).
    - `counted_percent`: the percentage of elements that are counted.

    Args:
      mu: The exact first moments.
      nu: The exact second moments.
      read_mu: The first moments that the method reads.
      read_nu: The second moments that the method reads.
      counted: The mask of elements.
    """
    below, read_below = jnp.sqrt(nu) + EPS, jnp.sqrt(read_nu) + EPS
    ratio = below / read_below
    exact, stored = mu / below, read_mu / read_below
    number = jnp.sum(counted, axis=1)

    def mean(x):
        return jnp.sum(jnp.where(counted, x, 0.0), axis=1) / number

    return {
        "ratio": mean(ratio),
        "rms": jnp.sqrt(mean(jnp.square(ratio - 1))),
        "largest": jnp.max(jnp.where(counted, ratio, -jnp.inf), axis=1),
        "least": jnp.min(jnp.where(counted, ratio, jnp.inf), axis=1),
        "off_by_2_percent": 100 * mean((ratio > 2) | (ratio < 0.5)),
        "update_ratio": mean(stored * exact) / mean(exact * exact),
        "update_rms": jnp.sqrt(
            mean(jnp.square(stored - exact)) / mean(jnp.square(exact))
        ),
        "counted_percent": 100 * number / counted.shape[1],
    }


def _number(x: Array) -> float | None:
    """Returns `x` as a float, or None if it is not finite: then no element counts."""
    return float(x) if np.isfinite(x) else None


def means(looks: Sequence[Row]) -> list[Row]:
    """Returns a row for each method and sequence: its last fifth of measurements.

    Numbers are means over these measurements, or their largest or least.
    """
    last = sorted({row["step"] for row in looks})[-_LOOKS // 5 :]
    selected = (row for row in looks if row["step"] in last)
    return [
        {
            key: _over(key, [row[key] for row in rows])
            for key in rows[0]
            if key != "step"
        }
        for rows in grouped(selected, itemgetter("method", "story")).values()
    ]


def _over(key: str, values: list[Any]) -> Any:
    """Returns the mean, largest or least of a key's values over measurements."""
    if isinstance(values[0], str) or key in ("b2", "steps"):
        return values[0]
    values = [value for value in values if value is not None]
    over = {"largest": max, "least": min}.get(key, np.mean)
    return float(over(values)) if values else None


def check(rows: Sequence[Row]) -> list[Bar]:
    """Returns the targets of the method `OURS`, for its worst sequence of gradients."""
    ours = [r for r in rows if r["method"] == OURS and r["ratio"] is not None]
    usual = [r for r in ours if r["b2"] <= 0.999 and r["steps"] == 10_000]
    long = [r for r in ours if r["b2"] == 0.9999 and r["steps"] == 100_000]
    steady = [r for r in usual if r["b2"] == 0.95 and r["story"] == STORIES[0].name]
    bars = []
    for name, target, some, value in (
        ("b2 to 0.999, 10,000 steps: mean off by", 0.05, usual, _off),
        ("b2 to 0.999, 10,000 steps: rms", 0.14, usual, lambda r: r["rms"]),
        ("b2 to 0.999, 10,000 steps: largest", 2.5, usual, lambda r: r["largest"]),
        ("b2 = 0.9999, 100,000 steps: mean off by", 0.05, long, _off),
        ("b2 = 0.9999, 100,000 steps: any off by times", 3, long, _times),
        ("b2 = 0.95, stationary: rms", 0.04, steady, lambda r: r["rms"]),
    ):
        if some:
            bars.append(Bar.of(name, "<=", target, max(map(value, some))))
    return bars


def _off(row: Row) -> float:
    return abs(row["ratio"] - 1)


def _times(row: Row) -> float:
    return max(row["largest"], 1 / row["least"])


if __name__ == "__main__":
    sys.exit(main())
