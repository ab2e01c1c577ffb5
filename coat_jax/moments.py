"""What FP8 does to Adam's moments, from the state alone: cheap enough to log."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from coat_jax import expansion
from coat_jax.quantized import Format, QuantizedArray
from coat_jax.state import ScaleByFP8AdamState, is_quantized

_BINS = 16
_TINY = float(np.finfo(np.float32).tiny)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MomentStats:
    """One quantized moment of one parameter; see `moment_report`.

    Attributes:
      parameter: The parameter's path, joined with slashes.
      moment: "mu" or "nu".
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
        """One flat record an entry."""
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

    What rounding did is known from the spacing of codes: the value t that became code
    c lay within half steps of it, its logarithm is taken for uniformly distributed
    there, and an error dt / t becomes dx / x = dt / (k t) behind the expansion. `error`
    is what that does to u = mu / sqrt(nu), which updates read, relative to u's root
    mean square, had this moment alone been rounded, and once: for the first moment
    sqrt(sum((u dx / x)^2) / sum(u^2)), for the second, which u reads by its square
    root, half of it. It is within a tenth of the truth in floating formats on moments
    whose distribution is smooth. A code of zero counts as exact; where one k serves all
    groups, as anything that rounds to zero. What saturated, and what is left of earlier
    steps' errors, does not count. Where the first moment is stored over sqrt(nu)
    (`normalize_mu`), an error of the second does not reach u itself, only how old
    gradients weigh against new ones.

    Args:
      state: A `ScaleByFP8AdamState` or any tree that holds some, such as the state of
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
        return isinstance(node, ScaleByFP8AdamState)

    states = [s for s in jax.tree.leaves(state, is_leaf=is_state) if is_state(s)]
    if not states:
        raise ValueError(
            "moment_report needs a state of coat.fp8_adamw or coat.scale_by_fp8_adam, "
            f"got {type(state).__name__} without one"
        )
    return _report(nnx.as_pure(states))


@jax.jit
def _report(states: list[ScaleByFP8AdamState]) -> MomentReport:
    moments = []
    for state in states:
        mus, nus = (
            jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantized)
            for tree in (state.mu, state.nu)
        )
        for (path, mu), (_, nu) in zip(mus, nus, strict=True):
            if is_quantized(mu):
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                weights = _squared_ratio(mu, nu, state.scaling.normalized)
                moments.append(_stats(name, "mu", mu, weights))
                moments.append(_stats(name, "nu", nu, weights))
    return MomentReport(tuple(moments))


def _squared_ratio(
    mu: QuantizedArray, nu: QuantizedArray, normalized: bool
) -> Float[Array, "..."]:
    """u^2 = mu^2 / nu of every element."""
    u = mu.dequantize()
    if not normalized:
        u = u * lax.rsqrt(jnp.maximum(nu.dequantize(), _TINY))
    return jnp.square(u)


def _stats(
    parameter: str, moment: str, q: QuantizedArray, weights: Float[Array, "..."]
) -> MomentStats:
    values = q.format.decode(q.codes)
    error = _relative_error(q, values, weights)
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
        error=error if moment == "mu" else error / 2,
    )


def _relative_error(
    q: QuantizedArray, values: Float[Array, "..."], weights: Float[Array, "..."]
) -> Float[Array, ""]:
    """sqrt(sum(weights (dx / x)^2) / sum(weights)), from codes of these values."""
    rounding = jnp.asarray(_rounding_errors(q.format))[_indices(q.codes)]
    if q.exponent is None:
        noise = weights * rounding / q.power**2
        noise = jnp.where(values == 0, _of_elements(_lost(q), q), noise)
    else:
        k = _of_elements(expansion.power(q.exponent), q)
        noise = weights * rounding / jnp.square(k)
    whole = jnp.sum(weights)
    return jnp.sqrt(jnp.sum(noise) / jnp.where(whole == 0, 1.0, whole))


def _lost(q: QuantizedArray) -> Float[Array, "..."]:
    """The mean square of what becomes zero in each group, where all have one k."""
    smallest = min(v for v in _values(q.format) if v > 0)
    top = q.scale.astype(jnp.float32) * q.format.max
    return jnp.square(top * (smallest / 2 / q.format.max) ** (1 / q.power)) / 3


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
    """What each of the 256 codes stands for."""
    if format.table is not None:
        return np.asarray(format.table)
    return np.arange(256, dtype=np.uint8).view(format.dtype).astype(np.float64)


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
