"""RMSNorm and LayerNorm with FP8 inputs and outputs, for arrays of any shape."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.checks import WIDE, check_shape, scalar
from pallas_kernels.dispatch import operations
from pallas_kernels.dispatch.axes import WHOLE, Axes, tokens
from pallas_kernels.mosaic.rows import Norm, Params, Rows, Tuning, obstacle
from pallas_kernels.numerics import GROUP, NormKind, Scaled
from pallas_kernels.ops.norm import kernel as norm_kernel
from pallas_kernels.ops.norm import reference
from pallas_kernels.ops.norm.reference import CODES, Normed, NormGrads
from pallas_kernels.ops.quantize.tensor import Wanted, transpose, wanted


def norm(
    x: Float[Array, "... n"] | Scaled,
    weight: Float[Array, "*parts n"] | None = None,
    bias: Float[Array, "*parts n"] | None = None,
    *,
    kind: NormKind = "rms",
    eps: float = 1e-5,
    scale: Float[Array, ""] | Literal["row"] | None = None,
    copies: Wanted = "row",
    keep_groups: bool = False,
    implementation: operations.Implementation | None = None,
    tuning: Tuning | None = None,
) -> Normed:
    """Normalizes the last axis of `x` in float32; can quantize output and input.

    The output is `y = z * weight + bias` with `z = x / sqrt(mean(x**2) + eps)`. Means
    are over the last axis. "layer" first replaces x by `x - mean(x)`.

    Args:
      x: The input, bfloat16, or quantized in groups of 16: e4m3 codes [..., n] and
        bfloat16 scales [..., ceil(n / 16)].
      weight: The weight that multiplies the normalized input, bfloat16 or float32. It
        is [n], or has some of the first axes of `x`, too: a weight [batch, n] has a row
        for each sequence of x [batch, length, n].
      bias: The bias that is added after the weight is applied, bfloat16 or float32, of
        the weight's shape if there is a weight.
      kind: The norm, "rms" for RMSNorm or "layer" for LayerNorm.
      eps: The number that is added to the mean square, or to the variance.
      scale: The scale of the output. None returns bfloat16 and the amax of each token.
        A float32 scalar returns e4m3 codes of y / scale. "row" returns e4m3 codes and
        per-token scales, amax / 448.
      copies: The copies to return with a scalar `scale`: y [..., n], its transpose
        [n, tokens] or both. The transpose is made from y, by `transpose`.
      keep_groups: Whether to return the input in groups of 16 as well.
      implementation: The implementation; None means the kernel where it can run.
      tuning: Settings of the kernel's pipeline; None means the default.

    Raises:
      ValueError: If the arguments contradict each other, or the kernel was named and
        cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import norm
      >>> x = jnp.array([[3.0, -3.0]], jnp.bfloat16)
      >>> norm(x, eps=0.0).y.tolist()
      [[1.0, -1.0]]
      >>> norm(x, eps=0.0, scale="row").y.tolist()
      [[448.0, -448.0]]
    """
    _check(kind, scale, copies)
    _check_shapes(x, weight, bias, {})
    if isinstance(x, Scaled) and keep_groups:
        raise ValueError("keep_groups needs a bfloat16 x, got groups")
    scale = scalar("scale", scale, None, "row")
    by_token = isinstance(scale, str)
    operation = _Norm(
        function=Norm(n=jax.tree.leaves(x)[0].shape[-1], kind=kind, eps=float(eps)),
        scale="row" if by_token else None,
        keep_groups=keep_groups,
        tuning=tuning,
    )
    arrays = x, weight, bias, None if by_token else scale
    out = operation(*arrays, implementation=implementation)
    if copies == "row":
        return out
    transposed = transpose(out.y, implementation=_of_copies(implementation))
    return out._replace(y=out.y if copies == "both" else None, transposed=transposed)


def norm_grad(
    x: Float[Array, "... n"] | Scaled,
    dy: Float[Array, "... n"],
    weight: Float[Array, "*parts n"] | None = None,
    bias: Float[Array, "*parts n"] | None = None,
    *,
    kind: NormKind = "rms",
    eps: float = 1e-5,
    y_scale: Float[Array, ""] | None = None,
    add: Float[Array, "... n"] | None = None,
    keep_maxima: bool = False,
    implementation: operations.Implementation | None = None,
    tuning: Tuning | None = None,
) -> NormGrads:
    """Computes the gradients of `norm` from its saved input.

    Let `rate = 1 / sqrt(mean(x**2) + eps)`, `z = x * rate` and `g = dy * weight`, with
    `x - mean(x)` in place of x for "layer". Means are over the last axis. Then
    `dx = rate * (g - z * mean(g * z))`, and "layer" also subtracts `rate * mean(g)`.
    Sums over tokens give `dweight = sum(dy * z)` and `dbias = sum(dy)`. If each part of
    x has its own weight, each sum is over the tokens of one part.

    Args:
      x: The input of `norm`, bfloat16 or in groups of 16.
      dy: The gradient with respect to the norm's output, bfloat16.
      weight: The weight of `norm`; None if there was none.
      bias: The bias of `norm`; None if there was none. Its values matter only if there
        is a `y_scale`.
      kind: The norm, "rms" or "layer".
      eps: The `eps` of `norm`.
      y_scale: The per-tensor scale with which the norm's output is returned again:
        transposed e4m3 codes of y / y_scale, [n, tokens], as the matmul of a weight
        gradient reads them. None returns no output.
      add: A bfloat16 array that is added to dx before rounding: the gradient of the
        residual connection around the norm.
      keep_maxima: Whether to also return `largest`, the amax of each part of dx; the
        kernel chooses the parts.
      implementation: The implementation; None means the kernel where it can run.
      tuning: Settings of the kernel's pipeline; None means the default.

    Raises:
      ValueError: If `kind` is unknown, shapes do not match, or the kernel was named and
        cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import norm_grad
      >>> x = jnp.array([[3.0, -3.0]], jnp.bfloat16)
      >>> norm_grad(x, jnp.ones_like(x), jnp.ones(2), eps=0.0).dweight.tolist()
      [1.0, -1.0]
    """
    _check(kind)
    _check_shapes(x, weight, bias, {"dy": dy, "add": add})
    y_scale = scalar("y_scale", y_scale, None)
    operation = _NormGrad(
        function=Norm(n=dy.shape[-1], kind=kind, eps=float(eps)),
        keep_maxima=keep_maxima,
        tuning=tuning,
    )
    out = operation(x, dy, weight, bias, y_scale, add, implementation=implementation)
    if out.y is None:
        return out
    return out._replace(y=transpose(out.y, implementation=_of_copies(implementation)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Norm(operations.Operation):
    """The operation of `norm` on x, weight, bias and scale, without transposed copies.

    Attributes:
      function: The norm.
      scale: "row" for per-token scales; None if the operand `scale` is used.
      keep_groups: Whether to return the input in groups.
      tuning: Settings of the kernel, or None.
    """

    function: Norm
    scale: Literal["row"] | None
    keep_groups: bool
    tuning: Tuning | None
    name = "norm"

    def obstacle(self, x, weight, bias, scale) -> str | None:
        return _obstacle(x, weight, bias)

    def reference(self, x, weight, bias, scale) -> Normed:
        return reference.norm(
            x,
            weight,
            bias,
            kind=self.function.kind,
            eps=self.function.eps,
            scale=self.scale or scale,
            keep_groups=self.keep_groups,
        )

    def axes(self, x, weight, bias, *others) -> tuple:
        row, token = _axes(x)
        param = _axes_of_param(weight, bias)
        results = Normed(y=row, largest=token, scale=token, groups=row)
        return (row, param, param, WHOLE), results

    def kernel(self, x, weight, bias, scale) -> Normed:
        shape = jax.tree.leaves(x)[0].shape
        out = norm_kernel.forward(
            self.function,
            _rows(x),
            Params(_grouped(weight), _grouped(bias)),
            None if scale is None else scale.reshape(1),
            scaled_rows=self.scale == "row",
            keep_groups=self.keep_groups,
            tuning=self.tuning or _forward_tuning(shape[-1]),
        )
        largest = out.largest
        if largest is not None:
            largest = lax.reduce_precision(largest, 8, 7).reshape(shape[:-1])
        groups = out.groups
        if groups is not None:
            of_groups = groups.scale.reshape(*shape[:-1], -1)
            groups = Scaled(groups.codes.reshape(shape), of_groups)
        return Normed(
            y=out.y.reshape(shape),
            largest=largest,
            scale=None if out.scale is None else out.scale.reshape(shape[:-1]),
            groups=groups,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _NormGrad(operations.Operation):
    """The operation of `norm_grad` on its arrays, with `y` not transposed.

    Attributes:
      function: The norm.
      keep_maxima: Whether to return the amax of parts of dx.
      tuning: Settings of the kernel, or None.
    """

    function: Norm
    keep_maxima: bool
    tuning: Tuning | None
    name = "norm_grad"

    def obstacle(self, x, dy, weight, bias, y_scale, add) -> str | None:
        return _obstacle(x, weight, bias, add, dy)

    def reference(self, x, dy, weight, bias, y_scale, add) -> NormGrads:
        return reference.norm_grad(
            x,
            dy,
            weight,
            bias,
            kind=self.function.kind,
            eps=self.function.eps,
            y_scale=y_scale,
            add=add,
            keep_maxima=self.keep_maxima,
        )

    def axes(self, x, dy, weight, bias, *others) -> tuple:
        row, _ = _axes(dy)
        param = _axes_of_param(weight, bias)
        total = dataclasses.replace(param, reduced="sum")
        largest = Axes("_", reduced="max")
        results = NormGrads(row, total, total, y=row, largest=largest)
        return (row, row, param, param, WHOLE, row), results

    def kernel(self, x, dy, weight, bias, y_scale, add) -> NormGrads:
        out = norm_kernel.backward(
            self.function,
            _rows(x, add, dy),
            Params(_grouped(weight), _grouped(bias)),
            None if y_scale is None else y_scale.reshape(1),
            keep_maxima=self.keep_maxima,
            tuning=self.tuning or _backward_tuning(self.function),
        )

        def total(partial, param):
            if param is None:
                return None
            parts = partial.reshape(*param.shape[:-1], -1, self.function.n)
            return jnp.sum(parts, axis=-2)

        return out._replace(
            dx=out.dx.reshape(dy.shape),
            dweight=total(out.dweight, weight),
            dbias=total(out.dbias, bias),
            y=None if out.y is None else out.y.reshape(dy.shape),
        )


def _axes(x: Array | Scaled) -> tuple[Axes, Axes]:
    """Returns the axes of arrays [..., n], and of arrays with a number per token."""
    leading = tokens(jax.tree.leaves(x)[0].ndim - 1)
    return Axes(f"{leading} _"), Axes(leading)


def _axes_of_param(weight: Array | None, bias: Array | None) -> Axes:
    """Returns the axes of a weight and a bias."""
    param = bias if weight is None else weight
    return Axes("_" if param is None else f"{tokens(param.ndim - 1)} _")


def _of_copies(
    implementation: operations.Implementation | None,
) -> operations.Implementation | None:
    # The kernel that transposes may not take every shape that the norm's kernel takes.
    return "reference" if implementation == "reference" else None


def _check(kind: str, scale=None, copies: Wanted = "row") -> None:
    if kind not in get_args(NormKind):
        names = ", ".join(get_args(NormKind))
        raise ValueError(f"kind must be one of {names}, got {kind!r}")
    if isinstance(scale, str) and scale != "row":
        raise ValueError(f"a scale is a scalar, 'row' or None, got {scale!r}")
    _, transposed = wanted(copies)
    if transposed and (scale is None or isinstance(scale, str)):
        raise ValueError(f"a transposed copy needs a scalar scale, got {scale!r}")


def _check_shapes(
    x: Array | Scaled, weight: Array | None, bias: Array | None, of_rows: dict
) -> None:
    """Raises ValueError if the shapes of arrays do not match `x`.

    Arrays in `of_rows` must have the shape of `x`.
    """
    *leading, n = shape = jax.tree.leaves(x)[0].shape
    if isinstance(x, Scaled):
        check_shape("scales", x.scale, (*shape[:-1], -(-n // GROUP)))
    param = bias if weight is None else weight
    if param is not None:
        parts = param.ndim - 1
        if parts >= len(leading) > 0:
            raise ValueError(
                f"a weight or bias must have fewer axes than x of the shape {shape}, "
                f"got {param.shape}"
            )
        for name, array in {"weight": weight, "bias": bias}.items():
            check_shape(name, array, (*leading[:parts], n))
    for name, array in of_rows.items():
        check_shape(name, array, shape)


def _obstacle(x, weight, bias, *others) -> str | None:
    """Returns why the kernel cannot run; None if it can."""
    codes = jax.tree.leaves(x)[0]
    if isinstance(x, Scaled) and codes.dtype != CODES:
        return f"codes must be float8_e4m3fn, got {codes.dtype}"
    for array in others if isinstance(x, Scaled) else (x, *others):
        if array is not None and array.dtype != jnp.bfloat16:
            return f"rows must be bfloat16, got {array.dtype}"
    for array in (weight, bias):
        if array is not None and array.dtype not in WIDE:
            return f"parameters must be bfloat16 or float32, got {array.dtype}"
    return obstacle(codes.shape)


def _rows(x, add=None, dy=None) -> Rows:
    if isinstance(x, Scaled):
        x = Scaled(_grouped(x.codes), x.scale.reshape(-1))
    else:
        x = _grouped(x)
    return Rows(x, _grouped(add), _grouped(dy))


def _grouped(x: Array | None) -> Array | None:
    return None if x is None else x.reshape(-1, GROUP)


def _forward_tuning(n: int) -> Tuning:
    # A multiprocessor has enough registers for this many thread blocks.
    return Tuning(ctas=8 if n <= 2048 else 3, stages=3)


def _backward_tuning(function: Norm) -> Tuning:
    if function.kind == "rms" and 8192 < function.n <= 11264:
        # Registers have room for a row of this length if more sums are in shared
        # memory.
        return Tuning(ctas=2, stages=3, held=function.n, sums=24)
    return Tuning(ctas=2, stages=3)
