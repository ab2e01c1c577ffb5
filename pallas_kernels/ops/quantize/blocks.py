"""Quantization with scales of blocks, of an array and its transpose at once.

The results are operands of matmuls that contract the last axis (the array) or the first
axis (its transpose), with scales as in DeepSeek-V3 (arXiv 2412.19437, section 3.3).
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.checks import CODES, WIDE, check_dtype
from pallas_kernels.dispatch import operations
from pallas_kernels.dispatch.axes import Axes
from pallas_kernels.numerics import (
    Scaled,
    code_max,
    encode,
    group_scale,
    magnitude,
    normal,
)
from pallas_kernels.ops.quantize import tiles

# The elements that share a scale.
Block = Literal["1x128", "128x128"]
Copies = tuple[Scaled | None, Scaled | None]


def quantize_blocks(
    x: Float[Array, "r c"],
    *,
    row: Block | None = None,
    transposed: Block | None = None,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    implementation: operations.Implementation | None = None,
) -> Copies:
    """Quantizes an array, its transpose or both, with one scale per block.

    The scale of a block is `amax / code_max`, rounded to bfloat16. Codes are
    `x * (1 / scale)`, rounded to nearest even and saturated. Magnitudes below 1.2e-38
    count as zero. If a block contains NaN or infinity, all of it becomes NaN.

    Args:
      x: The array to quantize, bfloat16 or float32; both axes are multiples of 128.
      row: The blocks of `x`; None if its codes are not wanted.
      transposed: The blocks of the transpose of `x`; None if its codes are not wanted.
      dtype: The dtype of the codes, `float8_e4m3fn` or `float8_e5m2`.
      implementation: The implementation; None means the kernel where it can run.

    Returns:
      The codes and float32 scales of `x` and of its transpose. An array [r, c] has
      codes [r, c]; blocks "1x128" have scales [r, c / 128], and blocks "128x128" have
      scales [r / 128, c / 128]. A copy that is not wanted is None.

    Raises:
      ValueError: If a dtype, a shape or the name of a block is not supported, no copy
        is wanted, or the kernel was named and cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import quantize_blocks
      >>> x = jnp.full((128, 256), 7.0)
      >>> row, transposed = quantize_blocks(x, row="1x128", transposed="128x128")
      >>> row.codes.shape, row.scale.shape
      ((128, 256), (128, 2))
      >>> transposed.codes.shape, transposed.scale.shape
      ((256, 128), (2, 1))
      >>> float(row.codes[0, 0].astype("float32") * row.scale[0, 0])
      7.0
    """
    check_dtype("codes", dtype, CODES)
    check_dtype("x", x.dtype, WIDE)
    for name, block in (("row", row), ("transposed", transposed)):
        if block not in ("1x128", "128x128", None):
            raise ValueError(
                f"{name} must be '1x128', '128x128' or None, got {block!r}"
            )
    if row is None and transposed is None:
        raise ValueError("row, transposed or both must name blocks, got neither")
    if x.ndim != 2 or any(n % tiles.SIZE for n in x.shape):
        raise ValueError(
            f"x must have two axes, multiples of {tiles.SIZE}, got {x.shape}"
        )
    operation = _QuantizeBlocks(row=row, transposed=transposed, dtype=jnp.dtype(dtype))
    return operation(x, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _QuantizeBlocks(operations.Operation):
    row: Block | None
    transposed: Block | None
    dtype: jnp.dtype
    name = "quantize_blocks"

    def obstacle(self, x) -> str | None:
        if not x.size or any(n % tiles.SIZE for n in x.shape):
            return f"it takes whole tiles of {tiles.SIZE} x {tiles.SIZE}, got {x.shape}"
        return None

    def reference(self, x) -> Copies:
        return (
            None if self.row is None else _in_jnp(x, self.row, self.dtype),
            None
            if self.transposed is None
            else _in_jnp(x.T, self.transposed, self.dtype),
        )

    def axes(self, x) -> tuple:
        # Shardy takes only the lengths of axes that occur in merged axes alone.
        r, c = x.shape
        sizes = (("in_r", tiles.SIZE), ("in_c", tiles.SIZE))
        if self.row != "128x128" and self.transposed is None:
            sizes += (("r", r // tiles.SIZE),)
        if self.row is None and self.transposed != "128x128":
            sizes += (("c", c // tiles.SIZE),)

        def copy(block, first, last):
            if block is None:
                return None
            names = f"({first} in_{first}) ({last} in_{last})"
            of_scale = names[: names.index(")") + 1] if block == "1x128" else first
            return Scaled(
                Axes(names, sizes=sizes), Axes(f"{of_scale} {last}", sizes=sizes)
            )

        whole = copy("1x128", "r", "c").codes
        return (whole,), (copy(self.row, "r", "c"), copy(self.transposed, "c", "r"))

    def kernel(self, x) -> Copies:
        return tiles.run(x, row=self.row, transposed=self.transposed, dtype=self.dtype)


def _in_jnp(x: Float[Array, "r c"], block: Block, dtype: DTypeLike) -> Scaled:
    """Computes one copy of `quantize_blocks` in jnp."""
    size = tiles.SIZE
    r, c = x.shape
    height = 1 if block == "1x128" else size
    blocks = normal(x.astype(jnp.float32)).reshape(r // height, height, c // size, size)
    scale = group_scale(magnitude(blocks, axis=(1, 3)), code_max(dtype))
    codes = encode(blocks, scale[:, None, :, None], dtype).reshape(r, c)
    return Scaled(lax.optimization_barrier(codes), scale)
