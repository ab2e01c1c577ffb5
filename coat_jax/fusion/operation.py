"""The operation that fused matmuls become in a program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from coat_jax.fp8.primitive import Types, bind, new_primitive


def fused(
    form: Callable[..., list], tree: Any, types: Types, arrays: Sequence[jax.Array]
) -> list[Any]:
    """Adds a form of fused matmuls to the program that is being traced.

    Args:
      form: A function of the operands, which returns a list of arrays.
      tree: The structure of the operands.
      types: The types of the results.
      arrays: The leaves of the operands.
    """
    params = {"form": form, "tree": tree, "types": tuple(types)}
    return bind(_fused_p, _function(**params), *arrays, **params)


def _function(
    form: Callable[..., list], tree: Any, types: Types
) -> Callable[..., list[Any]]:
    """Returns a form of fused matmuls as a function of arrays."""

    def computed(*arrays):
        ys = form(*jax.tree.unflatten(tree, arrays))
        return [y.reshape(t.shape) for y, t in zip(ys, types, strict=True)]

    return computed


_fused_p = new_primitive("fused_matmul", _function, lambda *_, types, **params: types)
