"""The operation that fused matmuls become in a program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from coat_jax import meshes
from coat_jax.fp8.primitive import Types, bind, new_primitive
from coat_jax.programs.graph import in_place_of
from pallas_kernels.dispatch import operations


def fused(
    form: Callable[..., list], tree: Any, types: Types, arrays: Sequence[jax.Array]
) -> list[Any]:
    """Adds fused matmuls to the program that is being traced; returns their results.

    Args:
      form: The function of the operands that computes the matmuls. It returns a list of
        arrays.
      tree: The structure of the operands.
      types: The types of the results.
      arrays: The leaves of the operands.
    """
    params = {"form": form, "tree": tree, "types": tuple(types)}
    return bind(fused_p, _function(**params), *arrays, **params)


def traced(
    fn: Callable[..., list],
    operands: Sequence[core.Var],
    results: Sequence[core.Var],
    like: core.JaxprEqn,
) -> list[core.JaxprEqn]:
    """Returns the operations of a function, for use in a program.

    On a mesh with explicit axes, FP8 matmuls take arrays on automatic axes. So `fn` is
    called with arrays on automatic axes, and its results get the shardings of
    `results`.

    Args:
      fn: A function of arrays.
      operands: The variables of the program that it takes.
      results: The variables of the program that it computes.
      like: An operation. The new operations get its context and source information.
    """

    def placed(*arrays):
        with like.ctx.manager:
            ys = fn(*map(meshes.automatic, arrays))
        pairs = zip(ys, results, strict=True)
        return [meshes.explicit(y, v.aval.sharding) for y, v in pairs]

    with operations.unexplained():  # It runs later.
        return in_place_of(like, placed, operands, results)


def _function(
    form: Callable[..., list], tree: Any, types: Types
) -> Callable[..., list[Any]]:
    """Returns `form`, which takes a tree, as a function of the tree's arrays."""

    def computed(*arrays):
        ys = form(*jax.tree.unflatten(tree, arrays))
        return [y.reshape(t.shape) for y, t in zip(ys, types, strict=True)]

    return computed


# Matmuls that `coat_jax.fusion` has fused. The activations are the first operand.
fused_p = new_primitive("fused_matmul", _function, lambda *_, types, **params: types)
