"""Reports of quantized moments, from the state alone: cheap enough to log."""

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.tree_util import keystr
from jaxtyping import Array, Bool, Float, Int32

from coat_jax.optimizers.state import Layout, QuantizedState, Rounding, moments_of
from coat_jax.optimizers.trees import is_quantized
from coat_jax.quantization import expansion
from coat_jax.quantization.array import Format, QuantizedArray

_BINS = 16
_TINY = float(np.finfo(np.float32).tiny)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MomentStats:
    """Statistics of a quantized moment of a parameter; see `moment_report`.

    Attributes:
      parameter: The parameter's path, joined with slashes.
      moment: The name of its field in the state, such as "mu" or "nu".
      format: What it is stored in.
      size: Number of elements.
      power: The k of all groups, if they share one; else None.
      k_counts: Else the number of groups with k in [0, 1), [1, 2), ... [15, 16).
      zero_share: Share of codes that stand for zero.
      max_share: Share of codes at the format's maximum, of either sign.
      error: Relative error that rounding this moment causes in updates, as expected.
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
        """A flat record of numbers and names; `k0` counts k in [0, 1), and so on."""
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
    """Statistics of a state's quantized moments; a pytree, and prints as a table.

    Attributes:
      moments: One entry a parameter and moment, in the state's order.
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
    """Statistics of FP8 moments: the powers k, codes at the ends, quantization error.

    Reads every code once, and returns a few numbers a parameter: cheap enough for every
    hundredth step, by itself or within a jitted step. Moments in float32 are left out.

    What rounding to nearest does is known from the spacing of codes: the value t that
    became code c lay within half steps of it, its logarithm is taken for uniformly
    distributed there, and an error dt / t becomes dx / x = dt / (k t) behind the
    expansion. `error` is what that does to u = mu / sqrt(nu), which updates read,
    relative to u's root mean square, had this moment alone been rounded, and once: for
    the first moment sqrt(sum((u dx / x)^2) / sum(u^2)), for the second, which u reads
    by its square root, half of it. Where there is one moment alone, u is that moment.
    Rounding stochastically makes the square twice as large. The error is within a tenth
    of the truth in floating formats on moments whose distribution is smooth. A code of
    zero counts as exact; where one k serves all groups, as anything that rounds to
    zero. What saturated, and what is left of earlier steps' errors, does not count.
    Where the first moment is stored over sqrt(nu) (`normalize_mu`), an error of the
    second does not reach u itself, only how old gradients weigh against new ones.

    Args:
      state: A `QuantizedState` or any tree that holds some, such as the state of
        `fp8_adamw`.

    Raises:
      ValueError: If there is no such state in it.

    Example:
      >>> import coat_jax as coat, jax.numpy as jnp
      >>> state = coat.fp8_adamw(1e-3).init({"w": jnp.ones((64, 128))})
      >>> report = coat.moment_report(state)
      >>> [(row["moment"], row["zero_share"]) for row in report.rows()]
      [('mu', 1.0), ('nu', 1.0)]
    """

    def is_state(node):
        return isinstance(node, QuantizedState)

    states = [s for s in jax.tree.leaves(state, is_leaf=is_state) if is_state(s)]
    if not states:
        raise ValueError(
            "moment_report needs a state of coat.fp8_adamw or another optimizer with "
            f"quantized moments, got {type(state).__name__} without one"
        )
    return _report(nnx.as_pure(states))


@jax.jit
def _report(states: list[QuantizedState]) -> MomentReport:
    return MomentReport(tuple(stats for state in states for stats in _of_state(state)))


def _of_state(state: QuantizedState) -> Iterator[MomentStats]:
    """Statistics of all quantized moments, those of a parameter side by side."""
    by_parameter: dict[Any, dict[Any, QuantizedArray]] = {}
    for field, path, moment in moments_of(state):
        if is_quantized(moment):
            by_parameter.setdefault(path, {})[field] = moment
    layout = state.layout
    for path, moments in by_parameter.items():
        name = keystr(path, simple=True, separator="/")
        weights = _weights(moments, layout)
        for field, q in moments.items():
            own = jnp.square(q.dequantize()) if weights is None else weights
            error = _relative_error(q, own, layout.rounding)
            half = dict(layout.moments)[field].squares
            yield _stats(name, field[-1].name, q, error / 2 if half else error)


def _weights(moments: dict[Any, QuantizedArray], layout: Layout) -> Array | None:
    """u^2 of u = mu / sqrt(nu), if there is a first moment and a second one."""
    kinds = dict(layout.moments)
    first = [f for f in moments if not kinds[f].squares]
    second = [f for f in moments if kinds[f].squares]
    if not first or not second:
        return None
    u = moments[first[0]].dequantize()
    if kinds[first[0]].over_root_of is None:
        u = u * lax.rsqrt(jnp.maximum(moments[second[0]].dequantize(), _TINY))
    return jnp.square(u)


def _stats(
    parameter: str, moment: str, q: QuantizedArray, error: Float[Array, ""]
) -> MomentStats:
    values = q.format.decode(q.codes)
    k_counts = None
    if q.exponent is not None:
        bins = (q.exponent >> 4)[..., None] == jnp.arange(_BINS)
        k_counts = jnp.sum(bins, axis=tuple(range(q.ndim)), dtype=jnp.int32)
    return MomentStats(
        parameter=parameter,
        moment=moment,
        format=q.format,
        size=q.size,
        power=q.power if q.exponent is None else None,
        k_counts=k_counts,
        zero_share=_share(values == 0),
        max_share=_share(jnp.abs(values) == q.format.max),
        error=error,
    )


def _relative_error(
    q: QuantizedArray, weights: Float[Array, "..."], rounding: Rounding
) -> Float[Array, ""]:
    """sqrt(sum(weights (dx / x)^2) / sum(weights)), from the codes."""
    errors = jnp.asarray(_rounding_errors(q.format))[_indices(q.codes)]
    if rounding == "stochastic":
        errors = 2 * errors
    if q.exponent is None:
        noise = weights * errors / q.power**2
        zero = q.format.decode(q.codes) == 0
        noise = jnp.where(zero, _of_elements(_lost(q, rounding), q), noise)
    else:
        k = _of_elements(expansion.power(q.exponent), q)
        noise = weights * errors / jnp.square(k)
    whole = jnp.sum(weights)
    return jnp.sqrt(jnp.sum(noise) / jnp.where(whole == 0, 1.0, whole))


def _lost(q: QuantizedArray, rounding: Rounding) -> Float[Array, "..."]:
    """The mean square of what becomes zero in each group, where all have one k."""
    top = q.scale.astype(jnp.float32) * q.format.max
    if rounding == "stochastic":  # The chance is 1 - x / s for x up to s.
        return jnp.square(top * (q.format.smallest / q.format.max) ** (1 / q.power)) / 6
    least = q.format.smallest / 2 / q.format.max
    return jnp.square(top * least ** (1 / q.power)) / 3


def _of_elements(groups: Float[Array, "..."], q: QuantizedArray) -> Array:
    """Each group's number for all of its elements."""
    return jnp.repeat(groups, q.granularity.size, axis=-1)[..., : q.shape[-1]]


def _share(where: Bool[Array, "... n"]) -> Float[Array, ""]:
    """The share of True; rows are counted in integers, which float32 would not hold."""
    return jnp.mean(jnp.sum(where, axis=-1, dtype=jnp.int32) / where.shape[-1])


def _indices(codes: Array) -> Array:
    """Codes as indices of a table of 256."""
    return lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.int32)


def _values(format: Format) -> Float[np.ndarray, "256"]:
    """Returns the number that each of the 256 codes stands for."""
    codes = np.arange(256, dtype=np.uint8).view(format.dtype)
    with jax.ensure_compile_time_eval():
        return np.asarray(format.decode(jnp.asarray(codes)), np.float64)


@cache
def _rounding_errors(format: Format) -> Float[np.ndarray, "256"]:
    """E[(log t / c)^2] of every code c: log t is uniform over what rounds to c.

    Over [a, b] around 0 its mean is (b^3 - a^3) / (3 (b - a)). Beyond the last code
    nothing is expected; zero and NaN have no error.
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
    """The k of most use: the shared one, or the range of the groups' own."""
    if stats.k_counts is None:
        return f"{stats.power:g}"
    used = np.flatnonzero(stats.k_counts)
    return f"{used[0]}-{used[-1] + 1}" if used.size else "-"
