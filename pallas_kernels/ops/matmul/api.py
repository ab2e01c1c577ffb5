"""FP8 matmuls a @ b.T with scales; the last axis is k, as the tensor cores need it."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.checks import WIDE, check_dtype, check_positive, check_shape
from pallas_kernels.dispatch import operations
from pallas_kernels.dispatch.axes import Axes, tokens
from pallas_kernels.ops.matmul import kernel as matmul_kernel
from pallas_kernels.ops.matmul import tuning
from pallas_kernels.ops.matmul.operands import Operands, in_parts
from pallas_kernels.ops.matmul.plan import BLOCK, PIECE_M, Heads, Product, Tuning
from pallas_kernels.ops.quantize.tensor import maxima_in_jnp
from pallas_kernels.ops.rope.api import axes_of_angles, check_angles, split_heads


def matmul(
    a: Float[Array, "... k"],
    b: Float[Array, "n *k"],
    a_scale: Float[Array, "..."] | float = 1.0,
    b_scale: Float[Array, "..."] | float = 1.0,
    accumulator: Float[Array, "... n"] | None = None,
    *,
    bias: Float[Array, " n"] | None = None,
    out_dtype: DTypeLike | None = None,
    promote: Literal[128, 256] | None = None,
    keep_maxima: bool = False,
    implementation: operations.Implementation | None = None,
    tuning: Tuning | None = None,
) -> Float[Array, "... n"] | tuple[Float[Array, "... n"], Float[Array, " parts"]]:
    """Computes (a * a_scale) @ (b * b_scale).T + bias + accumulator of FP8 codes.

    There are three kinds of scales:

    - Per-tensor: two scalars, which must be powers of two.
    - Per-token: one scale per row of `a`, [...], and one per row of `b`, [n]. A scalar
      can replace either of them.
    - Per-block: one scale per 1 x 128 elements of `a`, [..., k / 128], and one per
      128 x 128 elements of `b`, [ceil(n / 128), k / 128], as in DeepSeek-V3 (arXiv
      2412.19437, section 3.3.2).

    Args:
      a: Codes, e4m3 or e5m2.
      b: Codes, e4m3 or e5m2. At least one of `a` and `b` is e4m3. Several axes after
        the first one are contracted in their order. On a mesh the last of them can be
        split over devices, although each device needs all of it: the parts are
        gathered, and the kernel reads them as they are.
      a_scale: The scales of `a`, float32.
      b_scale: The scales of `b`, float32.
      accumulator: An array to add, in the result's dtype.
      bias: A number to add to each column, bfloat16 or float32. All sums are in float32
        and rounded once.
      out_dtype: bfloat16 or float32; by default the accumulator's dtype, or bfloat16.
      promote: The number of elements of k after which sums move from the tensor cores,
        which keep about 14 bits of them, to float32. None means never. With per-block
        scales it is always 128.
      keep_maxima: Whether to return the amax of parts of the result as well, float32,
        like `maxima`.
      implementation: The implementation; None means the kernel where it can run and is
        faster.
      tuning: Tile sizes and other settings of the kernel; None means the default.

    Raises:
      ValueError: If dtypes or shapes are not supported, or the kernel was named and
        cannot run.

    Examples:
      >>> import jax.numpy as jnp, pallas_kernels
      >>> a, b = (jnp.ones((n, 16), jnp.float8_e4m3fn) for n in (2, 3))
      >>> pallas_kernels.matmul(a, b, 0.5, 0.25)
      Array([[2, 2, 2],
             [2, 2, 2]], dtype=bfloat16)
    """
    if out_dtype is None:
        out_dtype = jnp.bfloat16 if accumulator is None else accumulator.dtype
    b = in_parts(a, b)
    call = Operands.of(a, b, a_scale, b_scale)
    product = Product(
        out_dtype=jnp.dtype(out_dtype),
        promote=BLOCK if call.scaling == "blocks" else promote,
        scaling=call.scaling,
        accumulate=accumulator is not None,
        bias=bias is not None,
        maxima=keep_maxima,
    )
    check_dtype("out_dtype", product.out_dtype, WIDE)
    if product.promote not in (None, 128, 256):
        raise ValueError(f"promote must be 128, 256 or None, got {product.promote}")
    shape = [*call.leading, call.n]
    if accumulator is not None and (
        list(accumulator.shape) != shape or accumulator.dtype != product.out_dtype
    ):
        raise ValueError(
            f"the accumulator must be {product.out_dtype}{shape}, got "
            f"{accumulator.dtype}{list(accumulator.shape)}"
        )
    if bias is not None:
        check_shape("bias", bias, (call.n,))
        check_dtype("bias", bias.dtype, WIDE)
        bias = bias.astype(jnp.float32)
    arrays = a, b, *call.scales, bias, accumulator
    operation = _Matmul(product=product, tuning=tuning)
    y, largest = operation(*arrays, implementation=implementation)
    return (y, largest) if keep_maxima else y


def matmul_heads(
    a: Float[Array, "b s k"],
    b: Float[Array, "columns k"],
    a_scale: Float[Array, "..."],
    b_scale: Float[Array, "..."],
    cos: Float[Array, "*b s h"],
    sin: Float[Array, "*b s h"],
    *,
    num_kv_heads: int,
    out_dtype: DTypeLike = jnp.bfloat16,
    copies: int = 1,
    implementation: operations.Implementation | None = None,
    tuning: Tuning | None = None,
) -> tuple[Float[Array, "b s _ d"], ...]:
    """Computes a @ b.T as attention's queries, keys and values, and applies RoPE.

    For every key head the columns of a @ b.T are its queries, then its key, then its
    value. `join_heads` computes the gradient of these columns. RoPE is applied to
    queries and keys in float32: the halves [x, y] of a head become
    [x cos - y sin, y cos + x sin]. The product before RoPE is never written to memory.
    See `matmul` for other arguments and errors.

    Args:
      a: Codes, as for `matmul`.
      b: Codes, as for `matmul`, with columns = (n + 2 m) d.
      a_scale: A scalar, or one scale per row of `a`.
      b_scale: A scalar, or one scale per row of `b`.
      cos: Cosines of the positions' angles, float32, h = d / 2: [s, h], or [b, s, h] if
        sequences have different positions.
      sin: Sines of the positions' angles, float32.
      num_kv_heads: The number of key heads, m.
      out_dtype: The dtype of the results, bfloat16 or float32.
      copies: The number of times that the results are written, each time to new arrays.
        In a loop that stacks saved residuals, the kernel can write one copy directly
        to its place in the stack.
      implementation: The implementation; None means the kernel where it can run and is
        faster.
      tuning: Tile sizes and other settings of the kernel; None means the default.

    Returns:
      Queries [b, s, n, d], keys and values [b, s, m, d]; then their copies.

    Examples:
      >>> import jax.numpy as jnp, pallas_kernels
      >>> a, b = (jnp.ones(n, jnp.float8_e4m3fn) for n in ((1, 3, 16), (64, 16)))
      >>> angle = jnp.zeros((3, 4))
      >>> q, k, v = pallas_kernels.matmul_heads(
      ...     a, b, 1.0, 1.0, jnp.cos(angle), jnp.sin(angle), num_kv_heads=2
      ... )
      >>> q.shape, k.shape, v.shape
      ((1, 3, 4, 8), (1, 3, 2, 8), (1, 3, 2, 8))
    """
    b = in_parts(a, b)
    call = Operands.without_blocks(a, b, a_scale, b_scale)
    check_positive(copies=copies)
    if a.ndim != 3:
        raise ValueError(f"a must be [b, s, k], got {a.shape}")
    half = cos.shape[-1]
    heads, rest = divmod(call.n, max(2 * half, 1))
    check_angles(cos, sin, *a.shape[:2], half)
    if num_kv_heads < 1 or rest or heads % num_kv_heads or heads < 3 * num_kv_heads:
        raise ValueError(
            f"b must have (n + 2 m) d rows, got {call.n} with m = {num_kv_heads} and "
            f"d = {2 * half}"
        )
    product = Product(
        out_dtype=jnp.dtype(out_dtype),
        scaling=call.scaling,
        heads=Heads(size=2 * half, queries=heads // num_kv_heads - 2),
        copies=copies,
    )
    check_dtype("out_dtype", product.out_dtype, WIDE)
    angles = (cos.astype(jnp.float32), sin.astype(jnp.float32))
    operation = _MatmulHeads(product=product, tuning=tuning)
    arrays = a, b, *call.scales, *angles
    return operation(*arrays, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfProduct(operations.Operation):
    """A matmul operation on the arrays a, b, a_scale, b_scale and more.

    b is [parts, n, groups, c], and k has the order of groups, parts and c.

    Attributes:
      product: The static parameters of the kernel.
      tuning: The settings that the caller chose, or None.
    """

    product: Product
    tuning: Tuning | None

    @property
    def name(self) -> str:
        return self.product.name

    def obstacle(self, a, b, *more) -> str | None:
        *leading, k = a.shape
        shape = math.prod(leading), b.shape[1], k
        if why := tuning.refusal(self.product, shape, self._settings(*shape)):
            return why
        if self.product.heads and leading[-1] % PIECE_M:
            return f"positions must be a multiple of {PIECE_M}, got {leading[-1]}"
        return None

    def slower(self, a, b, *more) -> str | None:
        m, n, k = math.prod(a.shape[:-1]), b.shape[1], a.shape[-1]
        if self.tuning or tuning.choose(self.product, m, n, k):
            return None
        return f"XLA is faster for {m} x {n} x {k}"

    def _settings(self, m: int, n: int, k: int) -> Tuning | None:
        return self.tuning or tuning.tiles(self.product, m, n, k)

    def _run(self, call: Operands, *more: Array) -> tuple[tuple, Array | None]:
        settings = self._settings(call.m, call.n, call.k)
        return matmul_kernel.launch(self.product, call.readable, more, settings)

    def _scale_axes(
        self, a_scale: Array, b_scale: Array, rows: str, columns: str
    ) -> tuple[Axes, Axes]:
        if self.product.scaling == "blocks":
            return Axes(f"{rows} _"), Axes("_ _")
        return Axes(rows if a_scale.ndim else ""), Axes(columns if b_scale.ndim else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Matmul(_OfProduct):
    """The operation of `matmul`; the last arrays are bias and accumulator."""

    fast_in_xla = True

    def reference(self, a, b, a_scale, b_scale, bias, accumulator) -> tuple:
        call = Operands.of(a, b, a_scale, b_scale)
        if accumulator is not None:
            accumulator = accumulator.reshape(call.m, call.n)
        y = call.product(
            bias,
            accumulator,
            out_dtype=self.product.out_dtype,
            promote=self.product.promote,
        )
        largest = maxima_in_jnp(y) if self.product.maxima else None
        return y.reshape(*call.leading, call.n), largest

    def axes(self, a, b, a_scale, b_scale, bias, accumulator) -> tuple:
        rows, in_blocks = tokens(a.ndim - 1), self.product.scaling == "blocks"
        # The amax of a sum over devices is known only after the sum.
        depth = "_" if in_blocks or self.product.maxima else "k"
        depth = "_" if b.shape[2] > 1 else depth
        columns = "_" if in_blocks else "n"
        scales = self._scale_axes(a_scale, b_scale, rows, columns)
        out = Axes(f"{rows} {columns}", reduced="sum")
        of_b = Axes(f"_ {columns} _ {depth}", gathered=not in_blocks)
        added = Axes(columns, added=True), Axes(f"{rows} {columns}", added=True)
        operands = Axes(f"{rows} {depth}"), of_b, *scales, *added
        return operands, (out, Axes("_", reduced="max"))

    def kernel(self, a, b, a_scale, b_scale, bias, accumulator) -> tuple:
        call = Operands.of(a, b, a_scale, b_scale)
        added = [] if bias is None else [bias]
        if accumulator is not None:
            added.append(accumulator.reshape(call.m, call.n))
        (y,), largest = self._run(call, *added)
        return y.reshape(*call.leading, call.n), largest


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MatmulHeads(_OfProduct):
    """The operation of `matmul_heads`; the last arrays are the cosines and sines."""

    def reference(self, a, b, a_scale, b_scale, cos, sin) -> tuple:
        call = Operands.of(a, b, a_scale, b_scale)
        y = call.product().reshape(*call.leading, call.n)
        heads = self.product.heads
        found = split_heads(
            y,
            cos,
            sin,
            num_kv_heads=call.n // heads.size // (heads.queries + 2),
            dtype=self.product.out_dtype,
        )
        return self.product.copies * found

    def axes(self, a, b, a_scale, b_scale, cos, sin) -> tuple:
        angles, heads = axes_of_angles(cos), Axes("b s _ _")
        scales = self._scale_axes(a_scale, b_scale, "b s", "_")
        operands = Axes("b s _"), Axes("_ _ _ _"), *scales, angles, angles
        return operands, heads

    def kernel(self, a, b, a_scale, b_scale, cos, sin) -> tuple:
        call = Operands.of(a, b, a_scale, b_scale)
        # The kernel reads the tables at a row's index modulo the tables' length.
        tables = (table.reshape(-1, table.shape[-1]) for table in (cos, sin))
        out, _ = self._run(call, *tables)
        return tuple(x.reshape(*a.shape[:-1], -1, 2 * cos.shape[-1]) for x in out)
