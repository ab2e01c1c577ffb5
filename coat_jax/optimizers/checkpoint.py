"""Conversion of quantized states to optax's and back, and to and from disk.

Importing this module registers quantized arrays and states with `flax.serialization`.
Then `to_bytes`, `from_bytes` and state dicts preserve every bit. They refuse a target
that would read the codes in another way than they were written. `version_0` restores
checkpoints of earlier versions.
"""

import dataclasses
import sys
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization
from jax.tree_util import GetAttrKey, keystr, tree_map_with_path
from jax.typing import ArrayLike

from coat_jax.optimizers.codec import dequantized, quantized
from coat_jax.optimizers.moment import Moment
from coat_jax.optimizers.state import VERSION, Layout, QuantizedState, states_in
from coat_jax.optimizers.trees import boxed, check_structure, is_quantized, unboxed
from coat_jax.quantization import array
from coat_jax.quantization.array import QuantizedArray
from coat_jax.quantization.formats import E4M3

_ARRAYS = ("codes", "scale", "exponent")
# Old pickles name the modules that defined the classes when they were written.
sys.modules["coat_jax.state"] = sys.modules[__name__]
sys.modules["coat_jax.quantized"] = array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MuScaling:
    """The scaling of first moments in version 0; a pytree without leaves."""

    normalized: bool


class ScaleByFP8AdamState(NamedTuple):
    """The state of `scale_by_fp8_adam` in version 0; see `coat.to_optax_state`.

    Attributes:
      count: The number of updates so far, int32.
      mu: First moments, divided by the root of the second if `scaling.normalized`.
      nu: Second moments.
      scaling: The scaling of quantized first moments.
    """

    count: chex.Array
    mu: optax.Updates
    nu: optax.Updates
    scaling: MuScaling


def to_optax_state(state: Any) -> Any:
    """Replaces quantized states by optax's, with all averages in float32.

    Args:
      state: A `QuantizedState`, or any tree that contains some: the state of
        `fp8_adamw`, of a chain, of a whole training run. States of version 0 are
        accepted, too.

    Returns:
      The same tree, with each quantized state replaced by the inner transformation's
      state. For example, `optax.adamw` can continue from the converted state of
      `fp8_adamw`. Other leaves do not change.

    Example:
      >>> import coat_jax as coat, jax.numpy as jnp, optax
      >>> params = {"w": jnp.ones((64, 128))}
      >>> state = coat.to_optax_state(coat.fp8_adamw(1e-3).init(params))
      >>> updates, state = optax.adamw(1e-3).update(params, state, params)
    """
    return jax.tree.map(
        lambda s: _wide(s) if _is_state(s) else s, state, is_leaf=_is_state
    )


def from_optax_state(state: Any, like: Any) -> Any:
    """Replaces optax's states by quantized ones; undoes `to_optax_state`.

    Codes are rounded to nearest. In a floating format with one k for all groups, they
    are the codes from before `to_optax_state`. With a k for each group, k is computed
    again from the rounded extremes of the group, and averages are rounded once more.

    Args:
      state: A tree that contains optax's states, such as `optax.adamw`'s.
      like: The corresponding state with quantized averages: `tx.init(params)` or
        `jax.eval_shape(tx.init, params)`. Only its shapes are read.

    Raises:
      ValueError: If the trees or the shapes of an average differ. The message names the
        place.

    Example:
      >>> import coat_jax as coat, jax, jax.numpy as jnp, optax
      >>> params = {"w": jnp.ones((64, 128))}
      >>> like = jax.eval_shape(coat.fp8_adamw(1e-3).init, params)
      >>> state = coat.from_optax_state(optax.adamw(1e-3).init(params), like)
      >>> state[0].nu["w"].codes.dtype
      dtype(float8_e4m3fn)
    """
    kinds = {type(s.inner_state) for s in states_in((state, like))}

    def is_leaf(node):
        return _is_state(node) or type(node) in kinds

    check_structure(state, like, name="state", is_leaf=is_leaf)
    return tree_map_with_path(_converted, like, state, is_leaf=is_leaf)


def version_0(like: Any) -> Any:
    """Returns the form of a state in version 0, to restore checkpoints of that version.

    In version 0 there was one kind of state, `ScaleByFP8AdamState`, with scales in
    bfloat16.

    Args:
      like: A state of `fp8_adamw` or `scale_by_fp8_adam` with their default formats, or
        any tree that contains some. Only its shapes are read.

    Returns:
      The same tree with `jax.ShapeDtypeStruct`s of the arrays of version 0. Restore a
      checkpoint onto it. Then continue from
      `coat.from_optax_state(coat.to_optax_state(restored), tx.init(params))`.

    Example:
      >>> import coat_jax as coat, jax, jax.numpy as jnp
      >>> from coat_jax.optimizers.checkpoint import version_0
      >>> like = jax.eval_shape(coat.fp8_adamw(1e-3).init, jnp.ones((64, 128)))
      >>> version_0(like)[0].mu.scale.dtype
      dtype(bfloat16)
    """

    def old(q):
        if not is_quantized(q):
            return q
        scale = jax.ShapeDtypeStruct(q.scale.shape, jnp.bfloat16)
        return dataclasses.replace(q, scale=scale, format=E4M3)

    def form(state):
        if not _is_state(state):
            return state
        inner, kept = state.inner_state, dict(state.layout.moments)
        normalized = kept[GetAttrKey("mu"),].over_root_of is not None
        mu, nu = (
            jax.tree.map(old, moments, is_leaf=is_quantized)
            for moments in (inner.mu, inner.nu)
        )
        return ScaleByFP8AdamState(inner.count, mu, nu, MuScaling(normalized))

    abstract = jax.eval_shape(lambda x: x, like)
    return jax.tree.map(form, abstract, is_leaf=_is_state)


def _is_state(node: Any) -> bool:
    return isinstance(node, QuantizedState | ScaleByFP8AdamState)


def _wide(state: QuantizedState | ScaleByFP8AdamState) -> Any:
    """Returns the inner transformation's state in float32.

    Arrays are in NNX variables where those of `state` are.
    """
    if isinstance(state, ScaleByFP8AdamState):
        inner = optax.ScaleByAdamState(state.count, state.mu, state.nu)
        over = "nu" if state.scaling.normalized else None
        mu, nu = Moment(over_root_of=over), Moment(squares=True)
        moments = ((GetAttrKey("mu"),), mu), ((GetAttrKey("nu"),), nu)
        layout = Layout(moments, "nearest")
    else:
        inner, layout = state.inner_state, state.layout
    like = jax.tree.map(
        lambda m: m.codes if is_quantized(m) else m, inner, is_leaf=is_quantized
    )
    return boxed(dequantized(unboxed(inner), layout), like)


def _converted(path: Any, like: Any, new: Any) -> Any:
    """Converts the node at `path` of a state to the form of `like`."""
    name = f"state{keystr(path)}"
    if not isinstance(like, QuantizedState):
        if _is_state(new):
            raise ValueError(f"{name} is in FP8 already, and its counterpart is not")
        return new
    inner = unboxed(like.inner_state)
    if not isinstance(new, type(inner)):
        expected, kind = type(inner).__name__, type(new).__name__
        raise ValueError(f"{name} must be an optax state, {expected}, got {kind}")
    _check_shapes(name, unboxed(new), inner)
    moments = quantized(unboxed(new), inner, like.layout)
    zero = jnp.zeros([], jnp.int32)
    return QuantizedState(boxed(moments, new), zero, zero + VERSION, like.layout)


def _check_shapes(name: str, state: Any, like: Any) -> None:
    def check(path, q, moment):
        if jnp.shape(q) != jnp.shape(moment):
            where = f"{name}{keystr(path)}"
            raise ValueError(
                f"{where} must have shape {jnp.shape(q)}, got {jnp.shape(moment)}"
            )

    check_structure(state, like, name=name, is_leaf=is_quantized)
    tree_map_with_path(check, like, state, is_leaf=is_quantized)


def _array_to_dict(q: QuantizedArray) -> dict[str, Any]:
    arrays = {name: getattr(q, name) for name in _ARRAYS}
    return arrays | {"power": q.power, "format": q.format.name}


def _array_from_dict(target: QuantizedArray, state: dict[str, Any]) -> QuantizedArray:
    # Early checkpoints do not name a format: each dtype had only one format then.
    state = (
        {"format": target.format.name, **state} if isinstance(state, dict) else state
    )
    if not isinstance(state, dict) or state.keys() != {*_ARRAYS, "power", "format"}:
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        _refuse(f"{[*_ARRAYS, 'power', 'format']}, found {found}")
    if target.format.name != state["format"]:
        _refuse(f"format {target.format}, found {state['format']}")
    for name in _ARRAYS:
        expected, found = _describe(getattr(target, name)), _describe(state[name])
        if expected != found:
            _refuse(f"{name} {expected}, found {found}")
    if target.power != float(state["power"]):
        _refuse(f"power {target.power}, found {state['power']}")
    arrays = {name: state[name] for name in _ARRAYS}
    return dataclasses.replace(target, **arrays)


def _layout_to_dict(layout: Layout) -> dict[str, Any]:
    return {keystr(field): str(m) for field, m in layout.moments} | {
        "rounding": layout.rounding
    }


def _layout_from_dict(target: Layout, state: dict[str, Any]) -> Layout:
    if state != (expected := _layout_to_dict(target)):
        _refuse(f"moments {expected}, found {state}: was it saved with other options?")
    return target


def _scaling_to_dict(scaling: MuScaling) -> dict[str, Any]:
    return {"normalized": scaling.normalized}


def _scaling_from_dict(target: MuScaling, state: dict[str, Any]) -> MuScaling:
    if bool(state["normalized"]) != target.normalized:
        _refuse(f"normalize_mu={target.normalized}, found {state['normalized']}")
    return target


def _describe(array: ArrayLike | None) -> str:
    if array is None:
        return "None"
    return f"{np.dtype(array.dtype).name}{list(array.shape)}"


def _refuse(what: str) -> None:
    raise ValueError(f"at {serialization.current_path()} the target has {what}")


for _kind, _to_dict, _from_dict in (
    (QuantizedArray, _array_to_dict, _array_from_dict),
    (Layout, _layout_to_dict, _layout_from_dict),
    (MuScaling, _scaling_to_dict, _scaling_from_dict),
):
    serialization.register_serialization_state(_kind, _to_dict, _from_dict)
