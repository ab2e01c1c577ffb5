"""Measures a layer of experts on a mesh axis "expert", for `experiments.bench.moe`.

Each GPU has an equal part of the tokens and of the experts. The layer's results are
compared with one GPU's results for all tokens. Its time is compared with the time of
one GPU that has all experts, and as many tokens as one GPU of the mesh.
"""

import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.layers import recipes
from coat_jax.layers.experts.parallel import EXPERT
from coat_jax.layers.experts.routing import Experts
from experiments.bench import moe_layers
from experiments.bench.moe_layers import LayerShape, Row, passes
from experiments.common.timing import Program, timed

# Recipes, and values of `Experts.buffer`.
CASES = (("coat", 1.5), ("bf16", 1.5), ("coat", None), ("te", None), ("bf16", None))
SMALL = LayerShape(256, 8, 2, 128, 128)
# The largest error of results relative to one GPU's. Another order of sums changes
# roundings, and the choice among experts with nearly equal scores.
LARGEST_ERROR = 0.02


def layer_of(
    shape: LayerShape, recipe: str, buffer: float | None = None, axis: str | None = None
) -> moe_layers.Layer:
    """Returns a layer of experts with a recipe; with an `axis`, for a mesh.

    Args:
      shape: The shape of the layer.
      recipe: The recipe's name.
      buffer: The option `buffer` of `Experts`.
      axis: The mesh axis that tokens and experts are sharded over; None means one GPU.
    """
    experts = Experts(num_experts=shape.experts, top_k=shape.top_k, buffer=buffer)
    return functools.partial(
        moe_layers.of_recipe, recipes.RECIPES[recipe], experts, batch_axes=axis
    )


def arguments(shape: LayerShape, gpus: int) -> tuple[Any, jax.Array, jax.Array]:
    """Draws parameters, the input and the output's gradient, one sequence per GPU."""
    params, *streams = moe_layers.arguments(shape)
    x, dy = (v.reshape(gpus, -1, shape.hidden) for v in streams)
    return params, x, dy


def shardings(params: Any, mesh: Mesh) -> tuple[Any, NamedSharding, NamedSharding]:
    """Returns the shardings of parameters, input and the gradient of the output.

    Experts and tokens are sharded; other parameters are replicated.
    """
    split = NamedSharding(mesh, P(EXPERT))
    places = {
        name: split if name in ("gate_up", "down") else NamedSharding(mesh, P())
        for name in params
    }
    return places, split, split


def rows(small: bool, end: float, options: dict[str, Any]) -> Iterator[Row]:
    """Yields a row for each case, with milliseconds and the largest error.

    Args:
      small: Whether to run a small shape.
      end: A time of `time.monotonic`, after which cases are skipped.
      options: The options of `timed`.
    """
    shape = SMALL if small else moe_layers.QWEN3
    gpus = jax.device_count()
    of_all: Row = {"case": "expert_parallel", **shape._asdict(), "gpus": gpus}
    if gpus < 2 or shape.experts % gpus:
        yield of_all | {"skipped": f"it needs 2 GPUs or a divisor of {shape.experts}"}
        return
    mesh = jax.make_mesh((gpus,), (EXPERT,), axis_types=(AxisType.Auto,))
    whole = arguments(shape, gpus)
    spread = jax.device_put(whole, shardings(whole[0], mesh))
    part = moe_layers.arguments(shape._replace(tokens=shape.tokens // gpus))
    for recipe, buffer in CASES:
        row = of_all | {"recipe": recipe, "buffer": buffer}
        if time.monotonic() > end:
            yield row | {"skipped": "time is up"}
            continue
        layer, alone = layer_of(shape, recipe, buffer, EXPERT), layer_of(shape, recipe)
        error = largest_error(layer, spread, alone, whole)
        programs = [
            Program("spread", functools.partial(passes, layer), spread),
            Program("one_gpu", functools.partial(passes, alone), part),
        ]
        times, errors = timed(programs, options)
        row |= {f"{program.name}_ms": 1e3 * s for program, s in times.items()} | errors
        yield row | {"largest_error": error, "right": error < LARGEST_ERROR}


def largest_error(
    layer: moe_layers.Layer, spread: Any, alone: moe_layers.Layer, whole: Any
) -> float:
    """Returns the largest relative error among the outputs and gradients of a layer.

    Args:
      layer: The layer on a mesh.
      spread: The sharded arguments of `layer`.
      alone: The same layer on one GPU.
      whole: The arguments of `alone`.
    """
    results = jax.jit(functools.partial(passes, layer))(*spread)
    expected = jax.jit(functools.partial(passes, alone))(*whole)
    pairs = zip(*map(jax.tree.leaves, (results, expected)), strict=True)
    # The maximum is NaN if any error is NaN.
    return float(jnp.max(jnp.stack([relative_error(*pair) for pair in pairs])))


def relative_error(actual: jax.Array, expected: jax.Array) -> jax.Array:
    """Returns the norm of `actual - expected` relative to the norm of `expected`."""
    actual = jax.device_put(actual, jax.devices()[0])
    actual, expected = (x.astype(jnp.float32).ravel() for x in (actual, expected))
    return jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected)
