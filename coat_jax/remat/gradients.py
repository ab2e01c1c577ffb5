"""Reports that compare the gradients of two functions."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from coat_jax.remat.report import check_callable

# A gradient's error is usual if it is at most the first share of its own norm, or the
# second share of the norm of all gradients.
_OF_ITSELF, _OF_ALL = 0.15, 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientError:
    """The difference between two gradients g and r of one array; see `gradient_report`.

    Attributes:
      path: The array's path in the arguments, joined with slashes.
      shape: The array's shape.
      norm: The norm of the reference r.
      share: The norm of r divided by the norm of the reference gradients of all arrays.
      error: norm(g - r) / norm(r), infinite if only r is zero.
      cosine: The cosine of the angle between g and r; NaN if one of them is zero.
      is_usual: Whether norm(g - r) is at most 15% of the norm of r, or 0.1% of the norm
        of the reference gradients of all arrays.
    """

    path: str
    shape: tuple[int, ...]
    norm: float
    share: float
    error: float
    cosine: float
    is_usual: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientReport:
    """The differences between gradients of two functions; prints as a table.

    Attributes:
      rows: One entry for each floating array of the arguments, in their order.
      output_error: The difference of the results in the same measure, for all results
        together.
    """

    rows: tuple[GradientError, ...]
    output_error: float

    @property
    def unusual(self) -> tuple[GradientError, ...]:
        """The entries that are not `is_usual`, the one with the largest error first."""
        rows = [row for row in self.rows if not row.is_usual]
        return tuple(
            sorted(rows, key=lambda row: -np.nan_to_num(row.error, nan=np.inf))
        )

    def __str__(self) -> str:
        width = max(len("result"), *(len(row.path) for row in self.rows))
        lines = [f"{'':{width}}  {'error':>7}  {'cosine':>7}  {'share':>7}"]
        for row in self.rows:
            numbers = f"{row.error:7.2%}  {row.cosine:7.4f}  {row.share:7.2%}"
            mark = "" if row.is_usual else "  unusual"
            lines.append(f"{row.path:{width}}  {numbers}{mark}")
        return "\n".join([*lines, f"{'result':{width}}  {self.output_error:7.2%}"])


def gradient_report(
    fn: Callable[..., Any], reference: Callable[..., Any], *args: Any, **kwargs: Any
) -> GradientReport:
    """Compares the gradients of a function with a reference's gradients.

    Both functions run once on the same arguments, and are differentiated with respect
    to all floating arrays in `args`. If the result is not one number, the gradient is
    taken of a weighted sum, with the same random weights for both functions.

    Copies in FP8 and matmuls in FP8 change most gradients by a few percent. More than
    15% is marked as unusual, unless it is next to nothing, at most 0.1% of the norm of
    all gradients: the gradient of a bias that the next norm removes is zero but for
    rounding. To find the saved array that is at fault, exclude arrays with the argument
    `where` of `fp8_remat`; `coat.residual_report` lists them.

    Args:
      fn: The function in FP8, such as `coat.fp8_remat(block)` or a loss that uses it.
      reference: The same function without FP8. It should compute in float32 if the
        rounding errors of BF16 are not to count.
      *args: The arguments of both: pytrees of arrays, NNX modules among them.
      **kwargs: Keyword arguments of both, for which there is no gradient.

    Raises:
      TypeError: If `fn` or `reference` cannot be called, or an argument has no values,
        as within `jax.jit`.
      ValueError: If no argument is a floating array, or the results differ in structure
        or shapes.

    Examples:
      >>> import coat_jax as coat, jax, jax.numpy as jnp
      >>> def mlp(params, x):
      ...     return jax.nn.gelu(x @ params["up"]) @ params["down"]
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> params = {"up": jax.random.normal(keys[0], (64, 256)) / 8,
      ...           "down": jax.random.normal(keys[1], (256, 64)) / 16}
      >>> x = jax.random.normal(keys[2], (128, 64))
      >>> report = coat.gradient_report(coat.fp8_remat(mlp), mlp, params, x)
      >>> [row.path for row in report.rows], report.unusual
      (['0/down', '0/up', '1'], ())
    """
    for function in (fn, reference):
        check_callable("gradient_report", function)
    leaves, tree = jax.tree.flatten_with_path(args)
    arrays = {i: x for i, (_, x) in enumerate(leaves) if _is_floating(x)}
    if not arrays:
        raise ValueError("gradient_report needs a floating array among the arguments")
    if any(isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct) for _, x in leaves):
        raise TypeError(
            "gradient_report needs arguments with values, got abstract ones: call it "
            "outside of jax.jit"
        )

    def run(function: Callable[..., Any]) -> tuple[Any, dict[int, jax.Array]]:
        def total(arrays):
            values = [arrays.get(i, x) for i, (_, x) in enumerate(leaves)]
            results = function(*jax.tree.unflatten(tree, values), **kwargs)
            return _weighted(results), results

        grads, results = jax.jit(jax.grad(total, has_aux=True))(arrays)
        return results, grads

    (results, grads), (expected, references) = run(fn), run(reference)
    shapes, expected_shapes = (jax.tree.map(jnp.shape, x) for x in (results, expected))
    if shapes != expected_shapes:
        raise ValueError(
            f"both functions must return the same shapes, got {shapes} and "
            f"{expected_shapes}"
        )
    compared = {i: _compared(grads[i], references[i]) for i in arrays}
    total = math.hypot(*(norm for _, norm, _ in compared.values()))

    def row(i: int) -> GradientError:
        difference, norm, cosine = compared[i]
        return GradientError(
            path=keystr(leaves[i][0], simple=True, separator="/"),
            shape=arrays[i].shape,
            norm=norm,
            share=_ratio(norm, total),
            error=_ratio(difference, norm),
            cosine=cosine,
            is_usual=difference <= max(_OF_ITSELF * norm, _OF_ALL * total),
        )

    output_error = _ratio(*_compared(results, expected)[:2])
    return GradientReport(rows=tuple(map(row, arrays)), output_error=output_error)


def _floating(tree: Any) -> list[jax.Array]:
    """Returns the floating and complex arrays of a tree."""
    return [x for x in jax.tree.leaves(tree) if _is_floating(x)]


def _is_floating(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _weighted(results: Any) -> jax.Array:
    """Returns the sum of a function's numbers, each with a random weight of its own.

    A single number has the weight 1.

    Raises:
      ValueError: If there is no floating array.
    """
    arrays = _floating(results)
    if not arrays:
        raise ValueError("gradient_report needs a function with a floating result")
    if len(arrays) == 1 and arrays[0].size == 1:
        return arrays[0].real.sum()
    keys = jax.random.split(jax.random.key(0), len(arrays))
    pairs = zip(keys, arrays, strict=True)
    return sum(jnp.sum(x.real * jax.random.normal(key, x.shape)) for key, x in pairs)


def _flat(tree: Any) -> np.ndarray:
    """Returns the floating elements of a tree in one array of double precision."""
    flat = [np.asarray(x).ravel() for x in _floating(tree)]
    dtype = np.complex128 if any(map(np.iscomplexobj, flat)) else np.float64
    return np.concatenate([x.astype(dtype) for x in flat])


def _compared(actual: Any, expected: Any) -> tuple[float, float, float]:
    """Compares the floating elements of two trees.

    Returns the norm of their difference, the norm of `expected`, and the cosine.
    """
    a, b = _flat(actual), _flat(expected)
    difference, norm, other = (float(np.linalg.norm(x)) for x in (a - b, b, a))
    product, norms = float(np.vdot(b, a).real), norm * other
    return difference, norm, product / norms if norms else np.nan


def _ratio(part: float, whole: float) -> float:
    if whole or not part:
        return part / (whole or 1.0)
    return np.inf
