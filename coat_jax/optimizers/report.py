"""Computes statistics of quantized moments from an optimizer's state, for logs."""

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr
from jaxtyping import Array, Bool, Float, Int32

from coat_jax.optimizers.batch import as_dtype, stored_dtype
from coat_jax.optimizers.state import (
    Layout,
    QuantizedState,
    Rounding,
    moments_of,
    states_in,
)
from coat_jax.optimizers.trees import is_quantized, unboxed
from coat_jax.quantization import expansion
from coat_jax.quantization.array import QuantizedArray
from coat_jax.quantization.formats import Format
from pallas_kernels.dispatch import array_types
from pallas_kernels.numerics import on_last_axes

_BINS = 16
_TINY = float(np.finfo(np.float32).tiny)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MomentStats:
    """Statistics of one quantized moment of one parameter; see `moment_report`.

    Attributes:
      parameter: The parameter's path, joined with slashes.
      moment: The name of the moment's field in the state, such as "mu" or "nu".
      format: The format in which the moment is stored.
      size: The number of elements.
      power: The k of range expansion if all groups share one; else None.
      k_counts: The number of groups with k in [0, 1), [1, 2), ... [15, 16), if each
        group has its own k; else None.
      zero_share: The share of codes that stand for zero.
      max_share: The share of codes at the format's maximum, of either sign.
      error: The expected relative error of updates due to rounding this moment.
    """

    parameter: str = dataclasses.field(metadata={"static": True})
    moment: str = dataclasses.field(metadata={"static": True})
    format: Format = dataclasses.field(metadata={"static": True})
    size: int = dataclasses.field(metadata={"static": True})
    power: float | None = dataclasses.field(metadata={"static": True})
    k_counts: Int32[Array, "16"] | None
    zero_share: Float[Array, ""]
    max_share: Float[Array, ""]
    error: Float[Array, ""]

    def row(self) -> dict[str, Any]:
        """Returns a flat record of numbers and names; `k0` counts k in [0, 1), etc."""
        row = {
            "parameter": self.parameter,
            "moment": self.moment,
            "format": self.format.name,
            "size": self.size,
            "zero_share": float(self.zero_share),
            "max_share": float(self.max_share),
            "error": float(self.error),
        }
        if self.k_counts is None:
            return row | {"k": self.power}
        counts = np.asarray(self.k_counts).tolist()
        return row | {f"k{k}": count for k, count in enumerate(counts)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MomentReport:
    """Statistics of a state's quantized moments; a pytree that prints as a table.

    Attributes:
      moments: One entry for each parameter and moment, in the state's order.
    """

    moments: tuple[MomentStats, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Returns a flat record for each entry."""
        return [stats.row() for stats in jax.device_get(self).moments]

    def __str__(self) -> str:
        width = max([9, *(len(stats.parameter) for stats in self.moments)])
        lines = [
            f"{'parameter':{width}}     {'size':>12}  {'format':6} {'k':>8} "
            f"{'zero %':>7} {'max %':>7} {'error %':>7}"
        ]
        for stats in jax.device_get(self).moments:
            shares = (stats.zero_share, stats.max_share, stats.error)
            lines.append(
                f"{stats.parameter:{width}} {stats.moment} {stats.size:>13,}  "
                f"{stats.format.name:6} {_span(stats):>8} "
                + " ".join(f"{100 * share:7.2f}" for share in shares)
            )
        return "\n".join(lines)


def moment_report(state: Any) -> MomentReport:
    """Computes statistics of FP8 moments: powers k, shares of codes, rounding errors.

    It reads every code once and returns a few numbers per parameter. This is cheap
    enough for every hundredth step, outside or within a jitted step. Moments in float32
    are not included.

    The error of rounding to nearest follows from the spacing of codes. A value t with
    the code c was within half a step of c. Its logarithm is assumed to be uniformly
    distributed there. Range expansion turns the error dt / t into dx / x = dt / (k t).
    `error` is the effect on u = mu / sqrt(nu), which updates read, relative to u's root
    mean square, if only this moment is rounded, and only once:

        sqrt(sum((u dx / x)^2) / sum(u^2))        for the first moment,
        half of that                              for the second, read as sqrt(nu).

    If there is only one moment, u is that moment. Stochastic rounding doubles the
    square of the error. In floating formats the error is within a tenth of the truth
    for moments with a smooth distribution.

    A zero code counts as exact if each group has its own k. If all groups share one k,
    a zero code stands for any number that rounds to zero. Saturation and errors that
    are left from earlier steps are not counted. If the first moment is stored divided
    by sqrt(nu) (`normalize_mu`), an error of the second does not reach u itself. The
    error only changes the weights of old gradients relative to new ones.

    Args:
      state: A `QuantizedState` or any tree that contains some, such as the state of
        `fp8_adamw`.

    Raises:
      ValueError: If the tree contains no `QuantizedState`.

    Examples:
      >>> import coat_jax as coat, jax.numpy as jnp
      >>> state = coat.fp8_adamw(1e-3).init({"w": jnp.ones((64, 128))})
      >>> report = coat.moment_report(state)
      >>> [(row["moment"], row["zero_share"]) for row in report.rows()]
      [('mu', 1.0), ('nu', 1.0)]
    """
    states = states_in(state)
    if not states:
        raise ValueError(
            "moment_report needs a state of coat.fp8_adamw or another optimizer with "
            f"quantized moments, got {type(state).__name__} without one"
        )
    states = unboxed(states)
    mesh = array_types.mesh_of(states)
    if mesh is None or not mesh.explicit_axes:
        return _report(states)
    # Lookups in tables and loops over layers do not support explicit mesh axes.
    run = jax.sharding.auto_axes(
        _report, axes=mesh.explicit_axes, out_sharding=NamedSharding(mesh, P())
    )
    return run(states)


@jax.jit
def _report(states: list[QuantizedState]) -> MomentReport:
    return MomentReport(tuple(stats for state in states for stats in _of_state(state)))


def _of_state(state: QuantizedState) -> Iterator[MomentStats]:
    """Yields statistics of all quantized moments, parameter by parameter."""
    by_parameter: dict[Any, dict[Any, QuantizedArray]] = {}
    for field, path, moment in moments_of(state):
        if is_quantized(moment):
            by_parameter.setdefault(path, {})[field] = moment
    layout = state.layout
    for path, moments in by_parameter.items():
        name = keystr(path, simple=True, separator="/")
        means = _means(moments, layout)
        for (field, q), of_moment in zip(moments.items(), means, strict=True):
            factor = 0.5 if dict(layout.moments)[field].squares else 1.0
            yield _stats(name, field[-1].name, q, of_moment, factor)


def _means(
    moments: dict[Any, QuantizedArray], layout: Layout
) -> list[dict[str, Float[Array, ""]]]:
    """Computes means over the elements of each of a parameter's moments.

    XLA stores float32 arrays of a moment's size between two sums. In a loop over the
    layers of a stack, these arrays have the size of a layer.
    """

    def of_layer(bits: list[QuantizedArray]) -> list[dict[str, Array]]:
        layers = [_with_codes(q, q.format.dtype) for q in bits]
        weights = _weights(dict(zip(moments, layers, strict=True)), layout)
        return [_means_of(q, weights, layout.rounding) for q in layers]

    # FP8 arrays are sliced as integers, because a CPU has no FP8 and would convert
    # whole stacks.
    bits = [_with_codes(q, stored_dtype(q.codes.dtype)) for q in moments.values()]
    if bits[0].ndim < 3:
        return of_layer(bits)
    return jax.tree.map(jnp.mean, lax.map(of_layer, bits))


def _with_codes(q: QuantizedArray, dtype: jnp.dtype) -> QuantizedArray:
    """Returns an array with its codes bitcast to `dtype`."""
    return dataclasses.replace(q, codes=as_dtype(q.codes, dtype))


def _weights(moments: dict[Any, QuantizedArray], layout: Layout) -> Array | None:
    """Computes (mu / sqrt(nu))^2; returns None unless both moments are quantized."""
    kinds = dict(layout.moments)
    first = [f for f in moments if not kinds[f].squares]
    second = [f for f in moments if kinds[f].squares]
    if not first or not second:
        return None
    u = moments[first[0]].dequantize()
    if kinds[first[0]].over_root_of is None:
        u = u * lax.rsqrt(jnp.maximum(moments[second[0]].dequantize(), _TINY))
    return jnp.square(u)


def _means_of(
    q: QuantizedArray, weights: Float[Array, "..."] | None, rounding: Rounding
) -> dict[str, Float[Array, ""]]:
    """Computes the means over elements from which the statistics of a moment follow.

    These are the means of the weights u^2 and of u^2 (dx / x)^2, where dx is the error
    of rounding an element x, and the shares of codes; see `moment_report`.

    Args:
      q: The moment.
      weights: The weights u^2; None means that u is the moment itself.
      rounding: The rounding of the codes.
    """
    values = q.format.decode(q.codes)
    weights = jnp.square(q.dequantize()) if weights is None else weights
    errors = jnp.asarray(_rounding_errors(q.format))[_indices(q.codes)]
    if rounding == "stochastic":
        errors = 2 * errors
    if q.exponent is None:
        noise = weights * errors / q.power**2
        noise = jnp.where(values == 0, _of_elements(_lost(q, rounding), q), noise)
    else:
        k = _of_elements(expansion.power(q.exponent), q)
        noise = weights * errors / jnp.square(k)
    return {
        "weights": jnp.mean(weights),
        "noise": jnp.mean(noise),
        "zero_share": share(values == 0),
        "max_share": share(jnp.abs(values) == q.format.max),
    }


def _stats(
    parameter: str,
    moment: str,
    q: QuantizedArray,
    means: dict[str, Float[Array, ""]],
    factor: float,
) -> MomentStats:
    """Returns the statistics of a moment from means over its elements.

    Args:
      parameter: The parameter's path.
      moment: The name of the moment's field.
      q: The moment.
      means: The result of `_means_of`.
      factor: The factor on the error: 1/2 if updates read the root of the moment.
    """
    k_counts = None
    if q.exponent is not None:
        numbers = on_last_axes(jnp.arange(_BINS, dtype=jnp.uint8), q.ndim + 1)
        bins = (q.exponent >> 4)[..., None] == numbers
        k_counts = jnp.sum(bins, axis=tuple(range(q.ndim)), dtype=jnp.int32)
    weight = jnp.where(means["weights"] == 0, 1.0, means["weights"])
    return MomentStats(
        parameter=parameter,
        moment=moment,
        format=q.format,
        size=q.size,
        power=q.power if q.exponent is None else None,
        k_counts=k_counts,
        zero_share=means["zero_share"],
        max_share=means["max_share"],
        error=factor * jnp.sqrt(means["noise"] / weight),
    )


def _lost(q: QuantizedArray, rounding: Rounding) -> Float[Array, "..."]:
    """Computes the mean square of numbers that round to zero, for each group.

    All groups must share one k. Let s be the smallest number above zero that the codes
    of a group stand for. With stochastic rounding, a number x up to s becomes
    zero with the probability 1 - x / s, so that the mean square is s^2 / 6. With
    rounding to nearest, all numbers below an edge e become zero, so that it is e^2 / 3.
    """
    top = q.scale.astype(jnp.float32) * q.format.max
    if rounding == "stochastic":
        return jnp.square(top * (q.format.smallest / q.format.max) ** (1 / q.power)) / 6
    least = q.format.smallest / 2 / q.format.max
    return jnp.square(top * least ** (1 / q.power)) / 3


def _of_elements(groups: Float[Array, "..."], q: QuantizedArray) -> Array:
    """Repeats each group's number for all elements of the group."""
    return jnp.repeat(groups, q.granularity.size, axis=-1)[..., : q.shape[-1]]


def share(where: Bool[Array, "... n"]) -> Float[Array, ""]:
    """Computes the share of elements that are true.

    Rows are counted in integers, since float32 cannot count beyond 2**24.
    """
    return jnp.mean(jnp.sum(where, axis=-1, dtype=jnp.int32) / where.shape[-1])


def _indices(codes: Array) -> Array:
    """Returns each code's index, 0 to 255, in a table of all codes."""
    return lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.int32)


def _values(format: Format) -> Float[np.ndarray, "256"]:
    """Returns the number that each of the 256 codes stands for."""
    codes = np.arange(256, dtype=np.uint8).view(format.dtype)
    with jax.ensure_compile_time_eval():
        return np.asarray(format.decode(jnp.asarray(codes)), np.float64)


@cache
def _rounding_errors(format: Format) -> Float[np.ndarray, "256"]:
    """Computes E[log(t / c)^2] over the numbers t that round to c, for every code c.

    log t is assumed to be uniformly distributed. Let log(t / c) be between a and b.
    Then the mean is (b^3 - a^3) / (3 (b - a)). No numbers are assumed beyond the last
    code. Zero and NaN have no error.
    """
    values = _values(format)
    errors = np.zeros(256, np.float32)
    ordered = np.unique(values[np.abs(values) <= format.max])
    means = (ordered[1:] + ordered[:-1]) / 2
    edges = np.concatenate([ordered[:1], means, ordered[-1:]])
    for index in np.flatnonzero((values != 0) & (np.abs(values) <= format.max)):
        place = np.searchsorted(ordered, values[index])
        a, b = np.log(edges[place : place + 2] / values[index])
        errors[index] = (b**3 - a**3) / (3 * (b - a))
    return errors


def _span(stats: MomentStats) -> str:
    """Returns the k to print: one number, or the range if each group has its own k."""
    if stats.k_counts is None:
        return f"{stats.power:g}"
    used = np.flatnonzero(stats.k_counts)
    return f"{used[0]}-{used[-1] + 1}" if used.size else "-"
