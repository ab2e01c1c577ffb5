"""FP8 copies of arrays, quantized and dequantized by kernels where kernels can run.

The results equal the results of `coat.quantize` and `coat.dequantize` bit by bit. With
several GPUs each device runs the kernels on its part of an array. Groups are contiguous
on the last axis, so no data moves between devices if every part holds whole groups.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

import pallas_kernels
from coat_jax.meshes import sharded_like
from coat_jax.quantization.array import QuantizedArray, quantize
from coat_jax.quantization.formats import Format
from coat_jax.quantization.granularity import PerGroup
from pallas_kernels import Scaled
from pallas_kernels.checks import WIDE


def fp8_copy(
    x: Float[Array, "... n"],
    *,
    format: Format,
    granularity: PerGroup,
    noise: UInt32[Array, "... n"] | None = None,
) -> QuantizedArray:
    """Quantizes an array as `coat.quantize` does, with a kernel where one can run.

    Per group of `granularity.size` neighbours on the last axis:

      scale = amax / format.max, in bfloat16
      codes = x / scale, in the format

    With `noise` the rounding is stochastic, and amax is multiplied by 1 + 2**-8 so that
    no code saturates. Kernels do not take noise.
    """
    group = min(granularity.size, x.shape[-1])
    if noise is not None or not _fits(x.shape, x.dtype, format, group):
        return quantize(x, format=format, granularity=granularity, noise=noise)

    @_in_batches
    def quantized(x):
        return pallas_kernels.quantize_groups(x, dtype=format.dtype, group=group)

    codes, scale = quantized(x)
    return QuantizedArray(
        codes=sharded_like(x, codes),
        scale=scale,
        exponent=None,
        format=format,
        granularity=granularity,
        dtype=jnp.dtype(x.dtype),
    )


def read_copy(q: QuantizedArray, *, fused: bool = False) -> Float[Array, "... n"]:
    """Dequantizes an array as `coat.dequantize` does, with a kernel where one can run.

    The result is decode(codes) * scale, computed in float32 and cast to `q.dtype`.
    With `fused` no kernel runs: XLA dequantizes as part of the operations that read the
    result.
    """
    group = min(q.granularity.size, q.shape[-1])
    if not _fits(q.shape, q.dtype, q.format, group):
        return q.dequantize()
    dtype, implementation = q.dtype, "reference" if fused else None

    @_in_batches
    def dequantized(codes, scale):
        # A reference to `q` would keep its tracers alive.
        return pallas_kernels.dequantize_groups(
            Scaled(codes, scale), dtype=dtype, implementation=implementation
        )

    return sharded_like(q.codes, dequantized(q.codes, q.scale))


def _fits(shape: tuple[int, ...], dtype: Any, format: Format, group: int) -> bool:
    """Returns whether `pallas_kernels` can make copies of this type and group."""
    return format.table is None and dtype in WIDE and shape[-1] % group == 0


def _in_batches(fn: Callable) -> Callable:
    """Returns a function like `fn` that `jax.vmap` calls once, on the whole batch.

    This is correct because no group crosses a leading axis.
    """
    batched = jax.custom_batching.custom_vmap(fn)

    @batched.def_vmap
    def _(axis_size, in_batched, *arrays):
        del axis_size, in_batched  # Codes and scales are always batched together.
        out = batched(*arrays)
        return out, jax.tree.map(lambda _: True, out)

    return batched
