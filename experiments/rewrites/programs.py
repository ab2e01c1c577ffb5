"""Random programs: functions of parameters, activations and integers, by seed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.rewrites.blocks import called_block
from experiments.rewrites.grammar import WIDTH, Draw, Env, Step
from experiments.rewrites.points import MARKS, point

_SHAPES = [(32, WIDTH), (2, 16, WIDTH), (2, 16, WIDTH)]
_EMPTY = (0, 16, WIDTH)


@dataclasses.dataclass(frozen=True)
class Program:
    """A random program.

    Attributes:
      seed: The seed that the program was drawn from.
      step: The program as a function of an environment and activations.
      shapes: The shapes of the parameters, by name.
      shape: The shape of the activations.
      elements: The distinct names of the grammar's elements in the program.
      options: The name of the options of `fp8_remat` with which the program runs.
      counts_bytes: Whether saved bytes with and without marks are compared.
    """

    seed: int
    step: Step
    shapes: dict[str, tuple[int, ...]]
    shape: tuple[int, ...]
    elements: tuple[str, ...]
    options: str
    counts_bytes: bool

    def function(
        self,
        dot: Callable[..., jax.Array],
        dtype: Any,
        *,
        marked: bool = True,
        remat: Callable[[Callable], Callable] = lambda fn: fn,
        softmax: Callable[[jax.Array], jax.Array] = jax.nn.softmax,
    ) -> Callable[..., jax.Array]:
        """Returns the program as a function of parameters, activations and integers.

        The arguments are fields of the program's `Env`.
        """

        def random_program(params, x, numbers):
            env = Env(dot, params, numbers, dtype, marked, remat, softmax)
            return self.step(env, x)

        return random_program

    def arguments(self, dtype: Any) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
        """Returns parameters, activations, integers and a gradient of the result."""
        rng = np.random.default_rng(self.seed)

        def normal(shape, kind):
            x = rng.normal(size=shape)
            if kind.startswith("scale"):
                return jnp.asarray(1 + 0.2 * x, jnp.float32)
            if kind.startswith("weight"):
                x = x / np.sqrt(shape[-2])
            return jnp.asarray(x, dtype)

        params = {name: normal(shape, name) for name, shape in self.shapes.items()}
        x, dy = normal(self.shape, "x"), normal(self.shape, "dy")
        numbers = jnp.asarray(rng.integers(0, 9, self.shape[:-1]), jnp.int32)
        return params, x, numbers, dy


def _with_table(draw: Draw, step: Step) -> Step:
    """Returns `step` after a sum with rows of a table that integers select."""
    name = draw.parameter(9, WIDTH, kind="table")

    def embedded(env, x):
        return step(env, x + env.params[name][env.numbers].astype(x.dtype))

    return embedded


def _in_turn(steps: list[Step]) -> Step:
    def step(env, x):
        for each in steps:
            x = each(env, x)
        return x

    return step


OPTIONS = ("E5M2", "group of 32", "where", "nothing saveable", "dots saveable", "key")


def random_program(seed: int) -> Program:
    """Returns the program that a seed determines."""
    draw = Draw(seed)
    count = draw.random.choice([1, 1, 2])
    steps = [point(draw), *(called_block(draw) for _ in range(count)), point(draw)]
    step = _in_turn(steps)
    if draw.chance(0.2):
        draw.elements.append("table")
        step = _with_table(draw, step)
    shape = _EMPTY if draw.chance(0.02) else draw.random.choice(_SHAPES)
    options = draw.random.choice(OPTIONS) if draw.chance(0.3) else "no options"
    elements = sorted({*draw.elements, f"shape {shape}", options})
    return Program(
        seed=seed,
        step=step,
        shapes=draw.shapes,
        shape=shape,
        elements=tuple(elements),
        options=options,
        counts_bytes=not MARKS.keys().isdisjoint(elements) and draw.chance(0.5),
    )
