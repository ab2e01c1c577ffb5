"""Matmuls of rows in groups: the experts of a mixture of experts, in FP8 or BF16."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import WIDE, check_dtype, check_positive, check_shape
from pallas_kernels.dispatch import devices, operations
from pallas_kernels.dispatch.axes import WHOLE, Axes
from pallas_kernels.ops.grouped_matmul import depth, listing, rows, tuning
from pallas_kernels.ops.grouped_matmul.checks import (
    check_groups,
    check_operands,
    checked_scale,
)
from pallas_kernels.ops.grouped_matmul.reference import (
    grouped_in_jnp,
    weight_gradient_in_jnp,
)
from pallas_kernels.ops.grouped_matmul.rows import Scales
from pallas_kernels.ops.grouped_matmul.tiles import (
    BLOCK,
    GroupTiles,
    listed_tiles,
    tiles_in_jnp,
)
from pallas_kernels.ops.matmul.plan import Product, Tuning
from pallas_kernels.ops.quantize.tensor import maxima_in_jnp

_WHOLE_LINE = Axes("_")


def grouped_matmul(
    a: Float[Array, "rows k"],
    b: Float[Array, "groups n k"],
    group_sizes: Int[Array, " groups"],
    a_scale: Float[Array, "..."] | float | None = None,
    b_scale: Float[Array, "..."] | float | None = None,
    *,
    tiles: GroupTiles | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    keep_maxima: bool = False,
    implementation: operations.Implementation | None = None,
    tuning: Tuning | None = None,
) -> Float[Array, "rows n"] | tuple[Float[Array, "rows n"], Float[Array, " parts"]]:
    """Multiplies rows that are sorted by group, each by the matrix of its group.

    With the starts and ends of groups, the cumulative sums of `group_sizes`:

        y[starts[g]:ends[g]] = (a[starts[g]:ends[g]] * a_scale) @ (b[g] * b_scale).T

    Rows of y after the last group are zeros. Group sizes stay on the device. Groups may
    be empty, and of any sizes. The function is `jax.lax.ragged_dot` with scales, and
    with the last axis of matrices contracted, as the tensor cores need it in FP8.

    In a mixture of experts it computes the forward matmuls, and with transposed
    weights the input gradients. On a mesh n or k can be split over devices, but neither
    rows nor groups. Under `vmap` devices can split the mapped axis.

    Args:
      a: Codes, e4m3 or e5m2, or bfloat16.
      b: Codes, e4m3 or e5m2, or bfloat16 like `a`. `a` and `b` must not both be e5m2.
      group_sizes: The number of rows of each group, int32. If their sum exceeds the
        number of rows, the last groups have fewer rows.
      a_scale: The scales of `a`, float32: a scalar, or one for each row. None means 1.
      b_scale: The scales of `b`, float32: a scalar, one for each group [groups], or one
        for each group and output [groups, n]. None means 1.
      tiles: The result of `group_tiles`, which matmuls of the same groups can share.
      out_dtype: bfloat16 or float32.
      keep_maxima: Whether to return the amax of parts of the result as well, float32,
        like `maxima`.
      implementation: The implementation; None means the kernel where it can run.
      tuning: Tile sizes and other settings of the kernel; None means the default.

    Raises:
      ValueError: If dtypes or shapes are not supported, or the kernel was named and
        cannot run.

    Examples:
      >>> import jax.numpy as jnp, pallas_kernels
      >>> a = jnp.ones((4, 16), jnp.float8_e4m3fn)
      >>> b = jnp.ones((2, 1, 16), jnp.float8_e4m3fn)
      >>> sizes = jnp.array([1, 2], jnp.int32)
      >>> y = pallas_kernels.grouped_matmul(a, b, sizes, b_scale=jnp.array([1.0, 2.0]))
      >>> y[:, 0].tolist()
      [16.0, 32.0, 32.0, 0.0]
    """
    if a.ndim != 2 or b.ndim != 3 or a.shape[1] != b.shape[2]:
        raise ValueError(
            f"a and b must be [rows, k] and [groups, n, k], got {a.shape} and {b.shape}"
        )
    count, (groups, n, _) = len(a), b.shape
    check_groups(group_sizes, groups)
    check_operands(a, b)
    a_scale = checked_scale("a_scale", a_scale, (), (count,))
    b_scale = checked_scale("b_scale", b_scale, (), (groups,), (groups, n))
    check_dtype("out_dtype", out_dtype, WIDE)
    if tiles is not None:
        listed = listed_tiles(count, groups, tiles.height)
        check_shape("the list of tiles", tiles.row, (listed,))
    options = {"out_dtype": jnp.dtype(out_dtype), "tuning": tuning}
    operation = _GroupedMatmul(**options, maxima=keep_maxima)
    arrays = a, b, a_scale, b_scale, group_sizes, tiles
    y, largest = operation(*arrays, implementation=implementation)
    return (y, largest) if keep_maxima else y


def grouped_weight_gradient(
    a: Float[Array, "n padded"],
    b: Float[Array, "k padded"],
    group_sizes: Int[Array, " groups"],
    a_scale: Float[Array, "..."] | float | None = None,
    b_scale: Float[Array, "..."] | float | None = None,
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    implementation: operations.Implementation | None = None,
    tuning: Tuning | None = None,
) -> Float[Array, "groups n k"]:
    """Computes the gradient of each group's matrix, by contraction over its rows.

    The arrays are transposed and padded, as `grouped_transpose` returns them: the
    columns of each group begin at a multiple of 128, and columns between groups are
    zeros. If `starts` are the first columns of groups, and ends = starts + group_sizes:

        y[g] = a[:, starts[g]:ends[g]] @ b[:, starts[g]:ends[g]].T * a_scale * b_scale

    If `a` has the gradient of `grouped_matmul`'s result, and `b` the rows that it
    multiplied, y is the gradient of its matrices. For groups without rows y is zero. On
    a mesh n or k can be split over devices, but neither rows nor groups.

    Args:
      a: Codes, e4m3 or e5m2, or bfloat16.
      b: Codes, e4m3 or e5m2, or bfloat16 like `a`. `a` and `b` must not both be e5m2.
      group_sizes: The number of rows of each group, int32, without padding.
      a_scale: The scales of `a`, float32: a scalar, or one for each group. None means
        1.
      b_scale: The scales of `b`, in the same form.
      out_dtype: bfloat16 or float32.
      implementation: The implementation; None means the kernel where it can run.
      tuning: Tile sizes and other settings of the kernel; None means the default.

    Raises:
      ValueError: If dtypes or shapes are not supported, or the kernel was named and
        cannot run.

    Examples:
      >>> import jax.numpy as jnp, pallas_kernels
      >>> sizes = jnp.array([2, 0, 1], jnp.int32)
      >>> a, b = jnp.ones((3, 1), jnp.bfloat16), jnp.full((3, 2), 2, jnp.bfloat16)
      >>> a, b = (pallas_kernels.grouped_transpose(x, sizes) for x in (a, b))
      >>> pallas_kernels.grouped_weight_gradient(a, b, sizes).tolist()
      [[[4.0, 4.0]], [[0.0, 0.0]], [[2.0, 2.0]]]
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or a.shape[1] % BLOCK:
        raise ValueError(
            f"a and b must be [n, rows] and [k, rows] with rows a multiple of {BLOCK}, "
            f"got {a.shape} and {b.shape}"
        )
    groups = group_sizes.size
    check_groups(group_sizes, groups)
    check_operands(a, b)
    scales = [
        checked_scale(name, scale, (), (groups,))
        for name, scale in (("a_scale", a_scale), ("b_scale", b_scale))
    ]
    check_dtype("out_dtype", out_dtype, WIDE)
    operation = _WeightGradient(out_dtype=jnp.dtype(out_dtype), tuning=tuning)
    return operation(a, b, *scales, group_sizes, implementation=implementation)


def group_tiles(
    group_sizes: Int[Array, " groups"],
    *,
    rows: int,
    height: int = BLOCK,
    implementation: operations.Implementation | None = None,
) -> GroupTiles:
    """Lists the tiles of rows in groups, for all `grouped_matmul`s of these groups.

    A `grouped_matmul` without the argument `tiles` lists its own tiles.

    Args:
      group_sizes: The number of rows of each group, int32, on the device.
      rows: The number of rows in the array, a multiple of 8.
      height: The number of rows of a tile.
      implementation: The implementation; None means the kernel where it can run.

    Raises:
      ValueError: If an argument is not supported, or the kernel was named and cannot
        run.

    Examples:
      >>> import jax.numpy as jnp, pallas_kernels
      >>> sizes = jnp.array([100, 200], jnp.int32)
      >>> tiles = pallas_kernels.group_tiles(sizes, rows=304)
      >>> tiles.first[:3].tolist(), tiles.end[:3].tolist(), tiles.totals.tolist()
      ([0, 100, 224], [100, 300, 300], [3, 300])
    """
    check_groups(group_sizes, group_sizes.size)
    check_positive(rows=rows, height=height)
    operation = _GroupTiles(rows=rows, height=height)
    return operation(group_sizes, implementation=implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GroupTiles(operations.Operation):
    """The operation of `group_tiles`."""

    rows: int
    height: int
    name = "group_tiles"

    def obstacle(self, group_sizes) -> str | None:
        if self.rows < self.height:
            return f"{self.rows} rows are less than a tile of {self.height}"
        return None

    def reference(self, group_sizes) -> GroupTiles:
        return tiles_in_jnp(group_sizes, rows=self.rows, height=self.height)

    def axes(self, group_sizes) -> tuple:
        return (_WHOLE_LINE,), _WHOLE_LINE

    def kernel(self, group_sizes) -> GroupTiles:
        run = functools.partial(listing.run, rows=self.rows, height=self.height)
        return jax.custom_batching.sequential_vmap(run)(group_sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Grouped(operations.Operation):
    """The base of operations on grouped rows: two matmuls with FP8 or BF16 operands."""

    out_dtype: jnp.dtype
    tuning: Tuning | None

    @property
    def product(self) -> Product:
        """The options of the matmul."""
        return Product(out_dtype=self.out_dtype, scaling="rows")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GroupedMatmul(_Grouped):
    """The operation of `grouped_matmul`."""

    maxima: bool
    name = "grouped_matmul"

    @property
    def product(self) -> Product:
        """The options of the matmul."""
        return dataclasses.replace(super().product, maxima=self.maxima)

    def _settings(self, a: Array, b: Array, tiles: GroupTiles | None) -> Tuning | None:
        height = BLOCK if tiles is None else tiles.height
        _, n, k = b.shape
        return self.tuning or tuning.along_m(self.product, n, k, a.dtype, height)

    def obstacle(self, a, b, a_scale, b_scale, group_sizes, tiles) -> str | None:
        settings = self._settings(a, b, tiles)
        if settings is None:
            return f"no tiles fit {b.shape[1]} columns"
        if tiles is not None and tiles.height != settings.tile_m:
            return f"tiles of {tiles.height} rows were listed, not of {settings.tile_m}"
        return tuning.rows_obstacle(
            *a.shape, a.dtype, settings.tile_m
        ) or tuning.columns_obstacle(self.product, settings, b.shape[1])

    def reference(self, a, b, a_scale, b_scale, group_sizes, tiles) -> tuple:
        scales = (jnp.float32(1) if x is None else x for x in (a_scale, b_scale))
        y = grouped_in_jnp(a, b, *scales, group_sizes, out_dtype=self.out_dtype)
        return y, maxima_in_jnp(y) if self.maxima else None

    def axes(self, a, b, a_scale, b_scale, group_sizes, tiles) -> tuple:
        of_a, of_b = (_axes(x, "_", "_ n") for x in (a_scale, b_scale))
        # The amax of a sum over devices is known only after the sum.
        depth = "_" if self.maxima else "k"
        of_matrices = Axes(f"_ {depth}"), Axes(f"_ n {depth}")
        operands = *of_matrices, of_a, of_b, _WHOLE_LINE, _WHOLE_LINE
        return operands, (Axes("_ n", reduced="sum"), Axes("_", reduced="max"))

    def kernel(self, a, b, a_scale, b_scale, group_sizes, tiles) -> tuple:
        settings = self._settings(a, b, tiles)

        @jax.custom_batching.sequential_vmap
        def run(a, b, a_scale, b_scale, group_sizes, tiles):
            if tiles is None:
                height = settings.tile_m
                tiles = listing.run(group_sizes, rows=len(a), height=height)
            scales = _kernel_scales(a_scale, b_scale, len(group_sizes))
            sms = devices.multiprocessors()
            return rows.run(self.product, a, b, scales, tiles, settings, sms)

        return run(a, b, a_scale, b_scale, group_sizes, tiles)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WeightGradient(_Grouped):
    """The operation of `grouped_weight_gradient`."""

    name = "grouped_weight_gradient"

    def _settings(self, a: Array, b: Array) -> Tuning | None:
        return self.tuning or tuning.along_k(self.product, len(a), len(b))

    def obstacle(self, a, b, a_scale, b_scale, group_sizes) -> str | None:
        settings = self._settings(a, b)
        if settings is None:
            return f"no tiles fit {len(a)} x {len(b)}"
        return tuning.size_obstacle(self.product, settings, len(a), len(b))

    def reference(self, a, b, a_scale, b_scale, group_sizes) -> Array:
        scale = _multiplied(a_scale, b_scale)
        scale = jnp.float32(1) if scale is None else scale
        options = {"out_dtype": self.out_dtype}
        return weight_gradient_in_jnp(a, b, scale, group_sizes, **options)

    def axes(self, a, b, a_scale, b_scale, group_sizes) -> tuple:
        of_a, of_b = (_axes(x, "_") for x in (a_scale, b_scale))
        operands = Axes("n _"), Axes("k _"), of_a, of_b, _WHOLE_LINE
        return operands, Axes("_ n k")

    def kernel(self, a, b, a_scale, b_scale, group_sizes) -> Array:
        settings = self._settings(a, b)

        @jax.custom_batching.sequential_vmap
        def run(a, b, a_scale, b_scale, group_sizes):
            scale = _multiplied(a_scale, b_scale)
            scale = None if scale is None else scale.reshape(-1)
            sms = devices.multiprocessors()
            return depth.run(self.product, a, b, scale, group_sizes, settings, sms)

        return run(a, b, a_scale, b_scale, group_sizes)


def _axes(scale: Array | None, *names: str) -> Axes | None:
    """Returns the axes of a scale; `names` has an entry for each number of axes."""
    if scale is None:
        return None
    return Axes(names[scale.ndim - 1]) if scale.ndim else WHOLE


def _kernel_scales(a_scale: Array | None, b_scale: Array | None, groups: int) -> Scales:
    """Returns the scales as the kernel takes them; scalars multiply other scales."""
    if a_scale is None or not a_scale.ndim:
        a_scale, b_scale = None, _multiplied(a_scale, b_scale)
    elif b_scale is not None and not b_scale.ndim:
        a_scale, b_scale = a_scale * b_scale, None
    if b_scale is None:
        return Scales(rows=a_scale)
    if b_scale.ndim == 2:
        return Scales(rows=a_scale, columns=b_scale.reshape(-1))
    return Scales(rows=a_scale, groups=jnp.broadcast_to(b_scale, groups))


def _multiplied(a_scale: Array | None, b_scale: Array | None) -> Array | None:
    """Returns the product of two scales; None stands for 1."""
    if a_scale is None or b_scale is None:
        return b_scale if a_scale is None else a_scale
    return a_scale * b_scale
