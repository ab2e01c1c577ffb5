"""Trees of NNX variables: what optimizers keep of parameters that are variables.

`nnx.Optimizer` knows arrays of its state by their paths. So a quantized moment of a
variable is no variable itself, but its codes and scales are.
"""

from typing import Any

import jax
from flax import nnx


def pure(tree: Any) -> Any:
    """A tree with values in the place of variables."""
    return nnx.as_pure(tree)


def boxed(tree: Any, like: Any) -> Any:
    """Undoes `pure`: where `like` has a variable, arrays are such variables again."""
    return jax.tree.map(
        lambda box, x: jax.tree.map(box.replace, x) if _is_variable(box) else x,
        like,
        tree,
        is_leaf=_is_variable,
    )


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)
