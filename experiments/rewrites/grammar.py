"""The elements of random programs, and the random draws that combine them."""

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

import jax

WIDTH = 128  # The last axis of activations.


@dataclasses.dataclass(frozen=True)
class Env:
    """The environment in which a program runs.

    Attributes:
      dot: The matmul, with the arguments of `jax.lax.dot_general`.
      params: The parameters.
      numbers: Integers, one for each token.
      dtype: The dtype of activations.
      marked: Whether the program has its marks: names, sharding constraints, and
        barriers of one array.
      remat: The wrapper of functions of parameters and activations in the program, such
        as `fp8_remat`.
      softmax: The softmax of attention.
    """

    dot: Callable[..., jax.Array]
    params: Mapping[str, jax.Array]
    numbers: jax.Array
    dtype: Any
    marked: bool = True
    remat: Callable[[Callable], Callable] = lambda fn: fn
    softmax: Callable[[jax.Array], jax.Array] = jax.nn.softmax

    def with_params(self, params: Mapping[str, jax.Array]) -> "Env":
        """Returns an environment with some parameters replaced."""
        return dataclasses.replace(self, params={**self.params, **params})


# An operation on an array, in an environment; and a function that draws an operation.
Step = Callable[[Env, jax.Array], jax.Array]
Maker = Callable[["Draw"], Step]


class Draw:
    """The random choices of one program, made in order.

    Attributes:
      random: The source of random choices.
      shapes: The shapes of the parameters that were added, by name.
      width: The last axis of the arrays at the current place of the program.
      elements: The names of the elements of the grammar that were drawn.
    """

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.width = WIDTH
        self.elements: list[str] = []

    def parameter(self, *shape: int, kind: str = "weight") -> str:
        """Adds a parameter, and returns its name, which begins with `kind`."""
        name = f"{kind}{len(self.shapes)}"
        self.shapes[name] = shape
        return name

    def chance(self, probability: float) -> bool:
        """Returns True with a probability, and otherwise False."""
        return self.random.random() < probability

    def one_of(self, table: Mapping[str, Maker]) -> Step:
        """Draws an element of a table and its own choices, and returns its step."""
        name = self.random.choice(list(table))
        self.elements.append(name)
        return table[name](self)


def fixed(step: Step) -> Maker:
    """Returns a maker that always returns `step`."""
    return lambda draw: step


def pure(fn: Callable[[jax.Array], jax.Array]) -> Maker:
    """Returns a maker that always returns the operation `fn` of an array alone."""
    return lambda draw: lambda env, x: fn(x)
