"""Shapes, group sizes and operands of grouped matmuls, for benchmarks."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

E4M3, E5M2, BF16, F32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32
# Kinds of group sizes: `KINDS` are measured, and `UNUSUAL` ones are only checked.
KINDS = ("random", "equal", "zipf")
UNUSUAL = ("odd", "one", "none")


class Shape(NamedTuple):
    """The shape of a grouped matmul, as in the layers of a mixture of experts.

    Attributes:
      rows: The number of rows in all groups.
      experts: The number of groups.
      k: The length of a row of the first operand.
      n: The length of a row of the result.
    """

    rows: int
    experts: int
    k: int
    n: int

    @property
    def flops(self) -> float:
        """The number of floating point operations of the matmul."""
        return 2.0 * self.rows * self.k * self.n


def sizes_of(kind: str, rows: int, experts: int) -> jax.Array:
    """Returns the number of rows of each group, as a router may choose them.

    Args:
      kind: A kind in `KINDS` or `UNUSUAL`.
      rows: The number of rows in all groups.
      experts: The number of groups.

    Raises:
      ValueError: If the kind is unknown.
    """
    rng = np.random.default_rng(0)
    sizes = np.zeros(experts, np.int64)
    if kind == "equal":
        sizes[:] = rows // experts
    elif kind == "random":  # A router without preferences.
        sizes = rng.multinomial(rows, np.full(experts, 1 / experts))
    elif kind == "zipf":
        shares = rng.permutation(1 / np.arange(1, experts + 1))
        sizes = rng.multinomial(rows, shares / shares.sum())
    elif kind == "odd":  # Empty groups, single rows, and rows of no group.
        sizes[1::3] = 1
        large = -(-experts // 3)
        sizes[::3] = rng.multinomial(rows * 5 // 6, np.full(large, 1 / large))
    elif kind == "one":
        sizes[experts // 2] = rows
    elif kind != "none":
        raise ValueError(f"no kind of sizes: {kind}")
    return jnp.asarray(sizes, jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def drawn(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws normal numbers and rounds them to a dtype.

    Arrays of three axes are drawn matrix by matrix, because drawing BF16 numbers takes
    temporary arrays of 32 bits.
    """
    key = jax.random.key(seed, impl="unsafe_rbg")

    def matrix(key):
        return jax.random.normal(key, shape[-2:], BF16).astype(dtype)

    if len(shape) == 2:
        return matrix(key)
    return lax.map(matrix, jax.random.split(key, shape[0]))


def positive(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Draws positive float32 scales, between 1/8 and 8."""
    return jnp.exp2(jax.random.uniform(jax.random.key(seed), shape, F32, -3, 3))


def operands(shape: Shape, *, backward: bool = False) -> tuple[jax.Array, ...]:
    """Draws the arguments a, b, a_scale and b_scale of a grouped matmul.

    For a forward pass, `a` [rows, k] and `b` [experts, n, k] are E4M3, with scales
    [rows] and [experts, n]. For a backward pass, `a` is E5M2 with one scale, and `b` is
    E4M3 with scales [experts].
    """
    rows, experts, k, n = shape
    if backward:
        a, b = drawn(1, (rows, k), E5M2), drawn(2, (experts, n, k), E4M3)
        return a, b, positive(3, ()), positive(4, (experts,))
    a, b = drawn(1, (rows, k), E4M3), drawn(2, (experts, n, k), E4M3)
    return a, b, positive(3, (rows,)), positive(4, (experts, n))
