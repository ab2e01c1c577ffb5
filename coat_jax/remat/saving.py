"""Saves residuals as a plan says, and restores them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from coat_jax.quantization.array import QuantizedArray, scales_as_bits, undifferentiated
from coat_jax.quantization.rounding import random_bits
from coat_jax.remat.copies import fp8_copy, read_copy
from coat_jax.remat.notes import Note
from coat_jax.remat.options import Options
from coat_jax.remat.trace import SAVED_NAME, Linearized
from coat_jax.remat.ways import Copy, Unread, Wide
from pallas_kernels.dispatch import array_types


def saved_as(
    traced: Linearized,
    number: int,
    index: int,
    var: core.Var | core.Literal,
    choice: Any,
    x: jax.Array,
    *,
    key: jax.Array | None,
    options: Options,
) -> Any:
    """Returns what is saved for `x`, which is residual `index` or an extra for it.

    It is a `QuantizedArray` or an array, or None if nothing is saved. `choice` is the
    entry of the residual in `Plan.kept`, or the extra's way. `number` differs for
    every saved array, so that each has its own random bits.
    """
    if isinstance(choice, Copy):
        if key is not None:
            key = jax.random.fold_in(key, number)
        # If `x` was cast from bfloat16, the cast back is exact, and kernels read half
        # the bytes.
        narrow = undifferentiated(x).astype(traced.source_dtype(var))
        q = _fp8_copy(narrow, choice, key, options, traced.asked_by(index))
        return dataclasses.replace(q, dtype=x.dtype)
    if not isinstance(choice, Wide):
        return None
    if traced.is_argument(var) or traced.note(index):
        # An argument needs no tag. A nested fp8_remat has tagged its arrays already.
        return _placed(x, choice)
    host = ", on the host" if choice.offloaded else ""
    with Note(f"wide, {choice.reason}{host}", traced.asked_by(index)).scope():
        return _placed(checkpoint_name(x, SAVED_NAME), choice)


def restored(way: Any, x: Any) -> Any:
    """Returns the array that was saved as `x`; zeros for an array that nothing reads.

    `way` is the entry of the residual in `Plan.kept`, or the extra's way.
    """
    if isinstance(way, Unread):
        return jnp.zeros(way.shape, way.dtype)
    if isinstance(way, Copy | Wide) and way.offloaded:
        x = jax.device_put(x, jax.memory.Space.Device)
    if not isinstance(way, Copy):
        return x
    with array_types.context_of(x.codes):
        values = read_copy(_with_bits(x), fused=way.fused)
        return values.reshape(*values.shape[:-1], *way.merged) if way.merged else values


def _fp8_copy(
    x: jax.Array, copy: Copy, key: jax.Array | None, options: Options, reader: str
) -> QuantizedArray:
    if copy.merged:
        x = x.reshape(*x.shape[: -len(copy.merged)], -1)
    noise = None if key is None else random_bits(key, x.shape, like=x)
    host = ", on the host" if copy.offloaded else ""
    groups = f"groups of {copy.granularity.size}{host}"
    with Note(f"{options.format}, {groups}", reader).scope():
        q = fp8_copy(
            x, format=options.format, granularity=copy.granularity, noise=noise
        )
        q = dataclasses.replace(q, codes=_placed(q.codes, copy))
    with Note(f"scales of {groups}", reader).scope():
        return dataclasses.replace(q, scale=_placed(_with_bits(q).scale, copy))


def _placed(x: jax.Array, way: Copy | Wide) -> jax.Array:
    """Returns `x`, moved to the host if `way` says that it is offloaded."""
    return jax.device_put(x, jax.memory.Space.Host) if way.offloaded else x


def _with_bits(q: QuantizedArray) -> QuantizedArray:
    """Returns `q` with its scales bitcast to integers, or bitcast back to scales."""
    return dataclasses.replace(q, scale=scales_as_bits(q.scale))
