"""Trees of NNX variables: what optimizers keep of parameters that are variables.

`nnx.Optimizer` knows arrays of its state by their paths. So a quantized moment of a
variable is no variable itself, but its codes and scales are.
"""

from typing import Any

import jax
from flax import nnx


def boxed(tree: Any, like: Any) -> Any:
    """Undoes `nnx.as_pure`: arrays are variables again where `like` has them."""
    return jax.tree.map(
        lambda box, x: jax.tree.map(box.replace, x) if _is_variable(box) else x,
        like,
        tree,
        is_leaf=_is_variable,
    )


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)
