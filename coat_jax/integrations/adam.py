"""A view of quantized states for trainers that look for Adam's moments by path."""

from collections.abc import Mapping
from typing import Any

import jax

from coat_jax.optimizers.state import QuantizedState
from coat_jax.optimizers.trees import is_quantized


def as_adam_state(tree: Any) -> Any:
    """Returns a view of an optimizer's state with moments at their parameters' paths.

    Each quantized moment is replaced by its codes, which have the moment's shape and
    sharding. Each `QuantizedState` is replaced by optax's own state, such as
    `ScaleByAdamState`. Then code that asks for an instance of optax's state, or looks
    up a parameter's path in `mu` or `nu`, finds it. The view is for look-ups only: an
    optimizer cannot continue from it.

    MaxText with `shard_optimizer_over_data` looks up the shardings of `mu`, to shard
    parameters in the same way. If `maybe_update_params_sharding_with_opt` gets this
    view of the shardings, it also shards parameters with quantized moments.

    Args:
      tree: Arrays, types or shardings in the structure of an optimizer's state. In an
        `nnx.State` or a state dict a quantized moment is a mapping with the entries
        "codes" and "scale".

    Returns:
      The tree with codes in place of quantized moments.

    Examples:
      >>> import coat_jax as coat, jax, jax.numpy as jnp
      >>> from coat_jax.integrations.adam import as_adam_state
      >>> params = {"w": jnp.ones((64, 128))}
      >>> state = jax.eval_shape(coat.fp8_adamw(1e-3).init, params)
      >>> as_adam_state(state)[0].mu["w"].shape
      (64, 128)
    """

    def view(node):
        if isinstance(node, QuantizedState):
            return as_adam_state(node.inner_state)
        if is_quantized(node):
            return node.codes
        return node["codes"] if _is_mapping_of_moment(node) else node

    return jax.tree.map(view, tree, is_leaf=_is_replaced)


def _is_replaced(node: Any) -> bool:
    is_ours = isinstance(node, QuantizedState) or is_quantized(node)
    return is_ours or _is_mapping_of_moment(node)


def _is_mapping_of_moment(node: Any) -> bool:
    return isinstance(node, Mapping) and {"codes", "scale"} <= set(node)
