"""Conversion of quantized states to optax's and back, and checks of restored states.

`check_restored` refuses a state that is damaged or that was saved with other options of
the optimizer, whichever library restored it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path
from jax.typing import ArrayLike

from coat_jax.optimizers.codec import dequantized, quantized
from coat_jax.optimizers.state import (
    QuantizedState,
    is_state,
    without_dtype,
    wrong_version,
)
from coat_jax.optimizers.trees import boxed, check_structure, is_quantized, unboxed

ARRAYS = ("codes", "scale", "exponent")


def to_optax_state(state: Any) -> Any:
    """Replaces quantized states by optax's, with all averages in float32.

    Args:
      state: A `QuantizedState`, or any tree that contains some: the state of
        `fp8_adamw`, of a chain, of a whole training run.

    Returns:
      The same tree, with each quantized state replaced by the inner transformation's
      state. For example, `optax.adamw` can continue from the converted state of
      `fp8_adamw`. Other leaves do not change.

    Examples:
      >>> import coat_jax as coat, jax.numpy as jnp, optax
      >>> params = {"w": jnp.ones((64, 128))}
      >>> state = coat.to_optax_state(coat.fp8_adamw(1e-3).init(params))
      >>> updates, state = optax.adamw(1e-3).update(params, state, params)
    """
    return jax.tree.map(
        lambda s: _wide(s) if is_state(s) else s, state, is_leaf=is_state
    )


def from_optax_state(state: Any, like: Any) -> Any:
    """Replaces optax's states by quantized ones; undoes `to_optax_state`.

    Codes are rounded to nearest. In a floating format, if all groups share one k of the
    range expansion, they equal the codes from before `to_optax_state`. If each group
    has its own k, this k is computed again from the rounded extremes of the group, and
    averages are rounded once more.

    Args:
      state: A tree that contains optax's states, such as `optax.adamw`'s.
      like: The corresponding state with quantized averages: `tx.init(params)` or
        `jax.eval_shape(tx.init, params)`. Its values are not read.

    Raises:
      ValueError: If the trees or the shapes of an average differ. The message names the
        place.

    Examples:
      >>> import coat_jax as coat, jax, jax.numpy as jnp, optax
      >>> params = {"w": jnp.ones((64, 128))}
      >>> like = jax.eval_shape(coat.fp8_adamw(1e-3).init, params)
      >>> state = coat.from_optax_state(optax.adamw(1e-3).init(params), like)
      >>> state[0].nu["w"].codes.dtype
      dtype(float8_e4m3fn)
    """
    leaves, treedef = jax.tree.flatten_with_path(like, is_leaf=is_state)
    try:
        parts = treedef.flatten_up_to(state)
    except ValueError:  # Its message has whole trees.
        _check_tree(state, like)
        raise
    pairs = zip(leaves, parts, strict=True)
    return treedef.unflatten(_converted(path, old, new) for (path, old), new in pairs)


def check_restored(state: Any, like: Any) -> None:
    """Checks that an optimizer can continue from a restored state.

    Readers of checkpoints check little: `flax.serialization` accepts any value in place
    of a plain array, and pickle and orbax do not know which values of a state are
    valid. Use this where the file may be damaged, or may have been saved with other
    options of the optimizer or by another version of this library. For example, orbax
    casts codes to the dtypes of its target, so that their numbers are wrong if they
    were saved in another format. Every state has a checksum of its formats, from which
    this function knows.

    Args:
      state: A restored state, or any tree that contains such states.
      like: The same tree as it is before the first step: `tx.init(params)` or
        `jax.eval_shape(tx.init, params)`. Its structure, shapes, dtypes and formats are
        read, but not its values.

    Raises:
      ValueError: If the trees differ in structure; if an array differs in shape, dtype,
        or format of its codes; if codes were cast from another format; if a scale is
        neither positive nor NaN (gradients that were not finite make it NaN); or if
        another version of this library wrote it. The message names the place, the value
        and the rule.

    Examples:
      >>> import coat_jax as coat, jax.numpy as jnp
      >>> from coat_jax.optimizers.checkpoint import check_restored
      >>> tx, params = coat.fp8_adamw(1e-3), {"w": jnp.ones((64, 128))}
      >>> state = tx.init(params)
      >>> check_restored(state, tx.init(params))
    """
    _check_each(_check_part, "state", unboxed(state), unboxed(like), is_state)


def _check_each(
    check: Callable, name: str, state: Any, like: Any, is_leaf: Callable
) -> None:
    """Checks that two trees have one structure, and calls `check` for each leaf.

    `check` takes the leaf's path in the tree `name`, the leaf of `state`, and the leaf
    of `like`.
    """
    check_structure(state, like, name=name, is_leaf=is_leaf)
    tree_map_with_path(
        lambda path, old, new: check(f"{name}{keystr(path)}", new, old),
        like,
        state,
        is_leaf=is_leaf,
    )


def _check_part(name: str, state: Any, like: Any) -> None:
    """Checks a quantized state, or an array that belongs to no quantized state."""
    if not isinstance(like, QuantizedState):
        _check_array(name, state, like)
        return
    if not isinstance(state, QuantizedState):
        kind = type(state).__name__
        raise ValueError(f"{name} must be a QuantizedState, got {kind}")
    if state.layout != like.layout:
        raise ValueError(
            f"{name}.layout must be {like.layout.as_dict()}, got "
            f"{state.layout.as_dict()}"
        )
    _check_array(f"{name}.version", state.version, like.version)
    _check_array(f"{name}.rounding_step", state.rounding_step, like.rounding_step)
    versions, step = _values(state.version), _values(state.rounding_step)
    # States of several models, as `jax.vmap` of `init` makes them, have a number each.
    for version in () if versions is None else np.unique(versions).tolist():
        if wrong := wrong_version(version, like.layout):
            raise ValueError(f"{name}.{wrong}")
    if step is not None and (wrong := step[step < 0]).size:
        raise ValueError(f"{name}.rounding_step must not be negative, got {wrong[0]}")
    inner = state.inner_state, like.inner_state
    _check_each(_check_average, f"{name}.inner_state", *inner, is_quantized)


def _check_average(name: str, x: Any, like: Any) -> None:
    if not is_quantized(like):
        _check_array(name, x, like)
        return
    if not is_quantized(x):
        raise ValueError(f"{name} must be a QuantizedArray, got {describe(x)}")
    for field in ("format", "granularity", "dtype", "power"):
        if (found := getattr(x, field)) != (expected := getattr(like, field)):
            raise ValueError(f"{name}.{field} must be {expected}, got {found}")
    for field in ARRAYS:
        _check_array(f"{name}.{field}", getattr(x, field), getattr(like, field))
    if wrong := wrong_value(x.scale, x.exponent):
        raise ValueError(f"{name}.{wrong}")


def _check_array(name: str, x: Any, like: Any) -> None:
    if describe(x) != describe(like):
        message = f"{name} must be {describe(like)}, got {describe(x)}"
        reason = without_dtype(x, like.dtype) if hasattr(like, "dtype") else None
        raise ValueError(f"{message}: {reason}" if reason else message)


def wrong_value(scale: Any, exponent: Any) -> str | None:
    """Returns a message on an invalid value of a scale or an exponent, or None."""
    scale, exponent = _values(scale), _values(exponent)
    if scale is not None:
        scale = scale.astype(np.float32)
        wrong = scale[(scale <= 0) | np.isinf(scale)]
        if wrong.size:
            return f"scale must be positive and finite, or NaN, got {wrong[0]}"
    if exponent is not None and (exponent == 0).any():
        return "exponent must be at least 1, got 0"
    return None


def _values(x: Any) -> np.ndarray | None:
    """Returns the values of an array that this process has, or None for a type."""
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x)
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return None
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.concatenate([np.ravel(shard.data) for shard in x.addressable_shards])


def _wide(state: QuantizedState) -> Any:
    """Returns the inner transformation's state, with averages in float32.

    Arrays that are in boxes in `state`, such as NNX variables, are in boxes in the
    result, too.
    """
    inner = state.inner_state
    like = jax.tree.map(
        lambda m: m.codes if is_quantized(m) else m, inner, is_leaf=is_quantized
    )
    return boxed(dequantized(unboxed(inner), state.layout), like)


def _check_tree(state: Any, like: Any) -> None:
    """Raises ValueError, which names a place, unless optax's state fits to `like`."""
    nodes = [tree_leaves_with_path(tree, is_leaf=is_state) for tree in (state, like)]
    in_fp8, expected = ({path for path, x in tree if is_state(x)} for tree in nodes)
    for path in sorted(in_fp8 - expected, key=keystr):
        raise _in_fp8_already(path)
    inner = [
        jax.tree.map(
            lambda node: unboxed(node.inner_state) if is_state(node) else node,
            tree,
            is_leaf=is_state,
        )
        for tree in (state, like)
    ]
    check_structure(*inner, name="state", is_leaf=is_quantized)


def _in_fp8_already(path: Any) -> ValueError:
    return ValueError(f"state{keystr(path)} is in FP8 already, and `like` is not there")


def _converted(path: Any, like: Any, new: Any) -> Any:
    """Converts optax's state at `path` to a quantized state like `like`."""
    name = f"state{keystr(path)}"
    if not isinstance(like, QuantizedState):
        if is_state(new):
            raise _in_fp8_already(path)
        return new
    inner = unboxed(like.inner_state)
    if not isinstance(new, type(inner)):
        expected, kind = type(inner).__name__, type(new).__name__
        raise ValueError(f"{name} must be an optax state, {expected}, got {kind}")
    _check_shapes(name, unboxed(new), inner)
    moments = quantized(unboxed(new), inner, like.layout)
    zero = jnp.zeros(unboxed(like.rounding_step).shape, jnp.int32)
    version = zero + like.layout.version
    return QuantizedState(boxed(moments, new), zero, version, like.layout)


def _check_shapes(name: str, state: Any, like: Any) -> None:
    def check(path, q, moment):
        if jnp.shape(q) != jnp.shape(moment):
            where = f"{name}{keystr(path)}"
            raise ValueError(
                f"{where} must have shape {jnp.shape(q)}, got {jnp.shape(moment)}"
            )

    check_structure(state, like, name=name, is_leaf=is_quantized)
    tree_map_with_path(check, like, state, is_leaf=is_quantized)


def describe(x: ArrayLike | None) -> str:
    """Describes an array by dtype and shape, and anything else by type and value."""
    if x is None or is_quantized(x):
        return "None" if x is None else "a QuantizedArray"
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        return f"{type(x).__name__} {described(x)}"
    return f"{getattr(x.dtype, 'name', x.dtype)}{list(x.shape)}"


def described(value: Any) -> str:
    """Returns the first 300 characters of a value as text."""
    return f"{value!s:.300}"
