"""Programs within a `shard_map`, which run on each device's shards of arrays."""

from collections.abc import Callable

import jax
from jax.extend import core

from coat_jax.programs.graph import in_place_of
from pallas_kernels import versions
from pallas_kernels.dispatch import operations


def is_shard_map(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a `shard_map`."""
    return eqn.primitive.name == "shard_map"


def program_of(eqn: core.JaxprEqn) -> core.Jaxpr:
    """Returns the program within a `shard_map`. It has no constants."""
    return eqn.params["jaxpr"]


def is_over_all_axes(eqn: core.JaxprEqn) -> bool:
    """Returns whether a `shard_map` is manual over all axes of its mesh."""
    options = versions.shard_map_options(eqn)
    return set(options["mesh"].axis_names) <= set(options["axis_names"])


def with_program(eqn: core.JaxprEqn, fn: Callable[..., list]) -> list[core.JaxprEqn]:
    """Returns operations that compute a `shard_map` of `fn` with the options of `eqn`.

    Args:
      eqn: The `shard_map`, which has another function.
      fn: A function of a device's shards. Its results have the same types as the
        results of the program within `eqn`.
    """

    def run(*arrays):
        return jax.shard_map(
            lambda *parts: tuple(fn(*parts)), **versions.shard_map_options(eqn)
        )(*arrays)

    with operations.unexplained(), eqn.ctx.manager:  # It runs later.
        return in_place_of(eqn, run, eqn.invars, eqn.outvars)
