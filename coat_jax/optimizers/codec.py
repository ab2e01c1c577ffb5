"""Conversion of a state's moving averages from 8 bits to float32 and back."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr
from jaxtyping import Array

from coat_jax.meshes import on_explicit_mesh
from coat_jax.optimizers.moment import Moment
from coat_jax.optimizers.noise import random_bits, random_words, stream_of
from coat_jax.optimizers.state import Layout
from coat_jax.optimizers.trees import is_quantized
from coat_jax.quantization.array import QuantizedArray, quantize_moment
from coat_jax.quantization.granularity import PerGroup
from pallas_kernels.ops.adam.reference import LARGEST_NU, inverse_root


def dequantized(inner_state: Any, layout: Layout) -> Any:
    """Dequantizes all averages of a state to float32, and undoes divisions by roots.

    A moment stored as mu / sqrt(nu) is multiplied by sqrt(nu).

    Raises:
      ValueError: If an average is stored without range expansion. No optimizer does
        this: the state comes from a checkpoint without exponents that was read as a
        checkpoint with exponents.
    """
    leaves, treedef = jax.tree.flatten_with_path(inner_state, is_leaf=is_quantized)
    stored = {path: leaf for path, leaf in leaves if is_quantized(leaf)}
    for path, q in stored.items():
        if q.exponent is None and q.power == 1:
            raise ValueError(
                f"the 8-bit moment {keystr(path)} of shape {q.shape} has no exponents: "
                "was its checkpoint saved with other options?"
            )
    values = dict(leaves) | {path: q.dequantize() for path, q in stored.items()}
    wide = []
    for path, value in values.items():
        second = layout.second_moment(path)
        if path in stored and second is not None:
            value = value * jnp.sqrt(values[second])
        wide.append(value)
    return treedef.unflatten(wide)


def quantized(
    inner_state: Any, like: Any, layout: Layout, step: Array | None = None
) -> Any:
    """Quantizes the averages of a state that are quantized in `like`, in the same way.

    Args:
      inner_state: A state of the inner transformation, in float32.
      like: The same state with quantized averages. Its values are not read.
      layout: The storage of the state's fields.
      step: The number of the step, on which random bits depend if the layout asks for
        stochastic rounding. None rounds to nearest.
    """
    leaves, treedef = jax.tree.flatten_with_path(like, is_leaf=is_quantized)
    wide = treedef.flatten_up_to(inner_state)
    values = {path: x for (path, _), x in zip(leaves, wide, strict=True)}
    stored = []
    for path, q in leaves:
        x = values[path]
        if not is_quantized(q):
            same = hasattr(q, "dtype") and hasattr(x, "astype")
            stored.append(x.astype(q.dtype) if same else x)
            continue
        second = layout.second_moment(path)
        over = None if second is None else values[second]
        _, moment, place = layout.split(path)

        stream = None
        if step is not None and layout.rounding == "stochastic":
            stream = stream_of(place, q.codes)

        def encoded(x, over, step, stream, moment=moment, q=q):
            noise = None
            if stream is not None:
                noise = random_bits(random_words(step, stream, q.shape), q.shape)
            return _encoded(x, over, moment, q.granularity, noise)

        encode = on_explicit_mesh(encoded, q.codes, q)
        stored.append(encode(x, over, step, stream))
    return treedef.unflatten(stored)


def _encoded(
    x: Array,
    over: Array | None,
    moment: Moment,
    granularity: PerGroup,
    noise: Array | None,
) -> QuantizedArray:
    """Quantizes an average as `moment` says, divided by the root of `over` if given."""
    x = x.astype(jnp.float32)
    if over is not None:
        x = x * inverse_root(over.astype(jnp.float32))
    elif moment.squares:
        x = jnp.minimum(x, LARGEST_NU)  # Infinity would spoil its group.
    return quantize_moment(
        x,
        format=moment.format,
        granularity=granularity,
        power=moment.power,
        noise=noise,
    )
