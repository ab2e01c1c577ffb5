"""The operands of a matmul, checked and with one axis of rows."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.checks import CODES
from pallas_kernels.ops.matmul.plan import BLOCK, TILE_K

_NT = (((1,), (1,)), ((), ()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """The operands of a matmul, with one axis of rows, and the kind of their scales.

    Attributes:
      arrays: The operands and their scales, with one axis of rows of a. b is
        [parts, n, groups, c].
      scaling: The kind of the scales.
      leading: The lengths of the axes that were merged to rows.
      scales: The scales as they were given, in float32.
    """

    arrays: tuple[Array, Array, Array, Array]
    scaling: Literal["tensor", "rows", "blocks"]
    leading: tuple[int, ...]
    scales: tuple[Array, Array]

    m = property(lambda self: self.arrays[0].shape[0])
    k = property(lambda self: self.arrays[0].shape[1])
    n = property(lambda self: self.arrays[1].shape[1])

    @classmethod
    def of(cls, a: Array, b: Array, *scales: Array | float) -> "Operands":
        """Checks operands and scales, and merges the leading axes of `a`.

        Raises:
          ValueError: If their dtypes or shapes do not match.
        """
        dtypes = {jnp.dtype(a.dtype), jnp.dtype(b.dtype)}
        if not dtypes <= set(CODES) or CODES[0] not in dtypes:
            raise ValueError(
                "a and b must be e4m3, or one of them e5m2, got "
                f"{a.dtype} and {b.dtype}"
            )
        a_scale, b_scale = (jnp.asarray(s, jnp.float32) for s in scales)
        *leading, k = a.shape
        n, m = b.shape[1], math.prod(leading)
        blocks = (*leading, k // BLOCK), (-(-n // BLOCK), k // BLOCK)
        given = a_scale, b_scale
        found = a_scale.shape, b_scale.shape
        if found == ((), ()):
            scaling = "tensor"
        elif found[0] in ((), tuple(leading)) and found[1] in ((), (n,)):
            scaling = "rows"
            if not b_scale.ndim:
                # One scale folded into the other saves a multiplication later.
                a_scale, b_scale = a_scale * b_scale, jnp.ones(1)
            a_scale = jnp.broadcast_to(a_scale.reshape(-1), (m,))
        elif found == blocks and k % BLOCK == 0:
            scaling = "blocks"
            a_scale = a_scale.reshape(m, k // BLOCK)
        else:
            raise ValueError(
                f"scales of {a.shape} and {(n, k)} are scalars, {tuple(leading)} and "
                f"{(n,)}, or {blocks[0]} and {blocks[1]}, got {found[0]} and {found[1]}"
            )
        arrays = (a.reshape(m, k), b, a_scale, b_scale)
        return cls(arrays=arrays, scaling=scaling, leading=tuple(leading), scales=given)

    @classmethod
    def without_blocks(cls, a: Array, b: Array, *scales: Array | float) -> "Operands":
        """Checks operands and scales like `of`, and rejects per-block scales."""
        call = cls.of(a, b, *scales)
        if call.scaling == "blocks":
            raise ValueError("scales for blocks are for `matmul` only")
        return call

    @property
    def merged(self) -> tuple[Array, Array, Array, Array]:
        """The arrays, with one axis of k in b."""
        a, b, *scales = self.arrays
        return a, b.transpose(1, 2, 0, 3).reshape(self.n, self.k), *scales

    @property
    def readable(self) -> tuple[Array, Array, Array, Array]:
        """The arrays, with one axis of k in b unless the kernel can read its parts."""
        parts, _, _, c = self.arrays[1].shape
        in_steps = c % TILE_K == 0 and self.scaling != "blocks"
        return self.arrays if parts > 1 and in_steps else self.merged

    def product(
        self,
        bias: Float[Array, " n"] | None = None,
        accumulator: Float[Array, "m n"] | None = None,
        *,
        out_dtype: DTypeLike = jnp.float32,
        promote: int | None = None,
    ) -> Float[Array, "m n"]:
        """Computes `pallas_kernels.matmul` in jnp.

        On GPUs XLA calls cuBLASLt for it, except with per-block scales.
        """
        a, b, a_scale, b_scale = self.merged
        wide, precision = jnp.float32, "highest" if promote else None
        if a_scale.ndim == 2:
            a = a.astype(wide) * jnp.repeat(a_scale, BLOCK, axis=1)
            b_scale = jnp.repeat(jnp.repeat(b_scale, BLOCK, axis=0), BLOCK, axis=1)
            b = b.astype(wide) * b_scale[: b.shape[0]]
            y = lax.dot_general(a, b, _NT, precision="highest")
        elif a_scale.ndim == b_scale.ndim == 0 and bias is accumulator is None:
            # Per-tensor scales are powers of two, so scaling rounded sums is exact.
            # XLA folds scales into the cuBLASLt call only in this order.
            wide = jnp.dtype(out_dtype)
            y = lax.dot_general(a, b, _NT, precision, wide)
            return y * (a_scale * b_scale).astype(wide)
        else:
            y = lax.dot_general(a, b, _NT, precision, wide)
            y = y * a_scale.reshape(-1, 1) * b_scale.reshape(1, -1)
        for added in (bias, accumulator):
            y = y if added is None else y + added.astype(wide)
        return y.astype(out_dtype)


def in_parts(a: Array, b: Array) -> Float[Array, "1 n groups c"]:
    """Reshapes b [n, ..., c] to one part [1, n, groups, c]; inner axes are merged.

    Raises:
      ValueError: If the length of the last axis of `a` is not the product of the
        lengths of all axes of `b` except for the first.
    """
    n, *contracted = b.shape or (0,)
    if not a.ndim or not contracted or a.shape[-1] != math.prod(contracted):
        raise ValueError(
            f"a and b must be [..., k] and [n, k], got {a.shape} and {b.shape}"
        )
    *groups, c = contracted
    return b.reshape(1, n, math.prod(groups), c)
