"""The operands of a matmul: what is allowed, and the form that the kernel takes."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.ops.matmul import reference
from pallas_kernels.ops.matmul.plan import BLOCK, TILE_K

_FP8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))


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
        if not dtypes <= set(_FP8) or _FP8[0] not in dtypes:
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

    def wide(self) -> Float[Array, "m n"]:
        """Computes the matmul with the reference, in float32."""
        return reference.matmul(*self.merged, None, out_dtype=jnp.float32, promote=None)


def in_parts(a: Array, b: Array) -> Float[Array, "1 n groups c"]:
    """Returns b [n, ...] as one part, whose last axis stays apart from the others.

    Raises:
      ValueError: If `a` and `b` do not have as many elements along k.
    """
    n, *contracted = b.shape or (0,)
    if not a.ndim or not contracted or a.shape[-1] != math.prod(contracted):
        raise ValueError(
            f"a and b must be [..., k] and [n, k], got {a.shape} and {b.shape}"
        )
    *groups, c = contracted
    return b.reshape(1, n, math.prod(groups), c)
