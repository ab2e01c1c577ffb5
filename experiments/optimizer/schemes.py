"""Schemes that store Adam's moments in 8 bits, and the error of the update.

Moments are groups, arrays [groups, 128], and the update is m / sqrt(v). The library
stores and reads them, with `coat.quantize`, `quantize_moment` and `dequantize`. This
module adds only other rules for a group's k, the exponent of range expansion, and
stochastic rounding with any rule.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, UInt8

import coat_jax as coat
from coat_jax.quantization import expansion
from coat_jax.quantization.array import quantize_moment
from experiments.optimizer.moments import GROUP

Groups = Float32[Array, "groups 128"]
# A function that returns each group's k in sixteenths, given the elements, their
# sensitivities and the format.
PowerRule = Callable[[Groups, Groups, coat.Format], UInt8[Array, "groups 1"]]
# Adam's epsilon: the update divides by sqrt(v) + EPS, so by EPS where v is 0.
EPS = 1e-8
_TINY = float(jnp.finfo(jnp.float32).tiny)
_CANDIDATES = np.arange(1, 161, dtype=np.uint8)  # In sixteenths: k from 1/16 to 10.

# A linear 8-bit code with 255 levels, for comparison.
INT8 = coat.Format(
    name="INT8",
    dtype=jnp.dtype(jnp.uint8),
    max=127.0,
    dynamic_range=127.0,
    power=1.0,
    table=tuple(float(level) for level in range(-127, 128)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Code:
    """A way to store one moment.

    Attributes:
      format: The 8-bit format.
      expand: The `expand` argument of `coat.quantize`, or a rule for each group's k.
      weighted: Whether a rule weighs each error by its effect on the update.
      stochastic: Whether to round at random to one of the two neighbours, so that the
        mean is the number itself, instead of to the nearest.
      bfloat16_scale: Whether scales are rounded to bfloat16, as `coat.quantize` does.
    """

    format: coat.Format = coat.E4M3
    expand: bool | float | PowerRule = False
    weighted: bool = True
    stochastic: bool = False
    bfloat16_scale: bool = False

    def store(self, x: Groups, sensitivity: Groups, key: Array) -> coat.QuantizedArray:
        """Returns quantized groups.

        Args:
          x: The moment's groups.
          sensitivity: The factor between an error of `x` and the update's error.
          key: The random key of stochastic rounding.
        """
        if callable(self.expand):
            weight = sensitivity if self.weighted else jnp.ones_like(x)
            steps = self.expand(x, weight, self.format)
            q = quantize_by(x, steps, self.format)
        else:
            q = self._library(x)
        return round_stochastically(x, q, key) if self.stochastic else q

    def _library(self, x: Groups) -> coat.QuantizedArray:
        """Returns groups that the library has quantized, rounded to nearest.

        Codes with range expansion and float32 scales are quantized as in the library's
        optimizers, and all others by `coat.quantize`.
        """
        granularity = coat.PerGroup(GROUP)
        if self.expand is False or self.bfloat16_scale:
            return coat.quantize(
                x, format=self.format, granularity=granularity, expand=self.expand
            )
        power = None if self.expand is True else self.expand
        return quantize_moment(
            x, format=self.format, granularity=granularity, power=power, noise=None
        )


class Stored(NamedTuple):
    """The two moments as a scheme stores them: quantized, or groups in float32."""

    mu: coat.QuantizedArray | Groups
    nu: coat.QuantizedArray | Groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """A way to store both moments.

    Attributes:
      name: The name in tables.
      mu: The code of the first moment; None stores it in float32.
      nu: The code of the second moment; None stores it in float32.
      normalized: Whether m / sqrt(v) is stored instead of the first moment m.
    """

    name: str
    mu: Code | None = None
    nu: Code | None = None
    normalized: bool = False

    def store(self, mu: Groups, nu: Groups, key: Array) -> Stored:
        """Returns both moments as stored.

        Rules for k weigh errors by sensitivities: the derivatives of the update u = m /
        sqrt(v), du/dm = 1 / sqrt(v) and |du/dv| = |u| / (2 v). If v is below the
        smallest normal float32, they are 0. If u itself is stored, its sensitivity is 1
        in place of du/dm.
        """
        update = exact_update(mu, nu)
        root = lax.rsqrt(jnp.maximum(nu, _TINY))
        counted = (nu >= _TINY).astype(jnp.float32)
        of_mu, of_nu = root * counted, 0.5 * update * root * root
        first = update if self.normalized else mu
        of_kept = counted if self.normalized else of_mu
        key_mu, key_nu = jax.random.split(key)
        return Stored(
            self.mu.store(first, of_kept, key_mu) if self.mu else first,
            self.nu.store(nu, of_nu, key_nu) if self.nu else nu,
        )

    def read(self, stored: Stored) -> tuple[Groups, Groups]:
        """Returns the moments m and v that the next update reads."""
        mu, nu = (
            moment.dequantize() if isinstance(moment, coat.QuantizedArray) else moment
            for moment in stored
        )
        return mu * jnp.sqrt(nu) if self.normalized else mu, nu

    @property
    def bytes_per_parameter(self) -> float:
        """The bytes per parameter of both moments, with their groups' scales and k."""
        x = jax.ShapeDtypeStruct((1, GROUP), jnp.float32)
        stored = jax.eval_shape(self.store, x, x, jax.random.key(0))
        leaves = jax.tree.leaves(stored)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / GROUP


def exact_update(mu: Groups, nu: Groups) -> Groups:
    """Computes m / sqrt(v), or 0 where v is below the smallest normal float32."""
    return jnp.where(nu < _TINY, 0.0, mu * lax.rsqrt(jnp.maximum(nu, _TINY)))


def read_update(mu: Groups, nu: Groups) -> Groups:
    """Computes m / sqrt(v) of moments that were read, or m / EPS where v is 0."""
    return mu / jnp.where(nu == 0, EPS, jnp.sqrt(nu))


class UpdateError(NamedTuple):
    """The error of m / sqrt(v), over elements with an exact v other than zero.

    Subnormal v count as zero here. An element is lost if its stored v is zero.

    Attributes:
      mse: The mean squared error over the elements that are not lost.
      mse_with_lost: The mean squared error over all these elements, including lost
        ones.
      lost: The share of lost elements.
    """

    mse: Float32[Array, ""]
    mse_with_lost: Float32[Array, ""]
    lost: Float32[Array, ""]


def update_error(mu: Groups, nu: Groups, read_mu: Groups, read_nu: Groups):
    """Returns the error of the update with `read_mu` and `read_nu`, an `UpdateError`.

    The exact moments are `mu` and `nu`.
    """
    counted = nu >= _TINY
    lost = counted & (read_nu == 0)
    error = read_update(read_mu, read_nu) - exact_update(mu, nu)
    squares = jnp.where(counted, error * error, 0.0)
    number = jnp.maximum(jnp.sum(counted), 1)
    count = jnp.maximum(jnp.sum(counted & ~lost), 1)
    return UpdateError(
        mse=jnp.sum(jnp.where(lost, 0.0, squares)) / count,
        mse_with_lost=jnp.sum(squares) / number,
        lost=jnp.sum(lost) / number,
    )


def read_back(
    scheme: Scheme, mu: Groups, nu: Groups, key: Array
) -> tuple[Groups, Groups]:
    """Returns the moments m and v after a scheme has stored and read them once."""
    return scheme.read(scheme.store(mu, nu, key))


def quantize_by(
    x: Groups, steps: UInt8[Array, "groups 1"], format: coat.Format
) -> coat.QuantizedArray:
    """Quantizes like `coat.quantize` with range expansion, but with the given k.

    Args:
      x: The groups.
      steps: Each group's k in sixteenths.
      format: The format of the codes.
    """
    q = coat.quantize(x, format=format, granularity=coat.PerGroup(GROUP))
    top = q.scale.astype(jnp.float32) * format.max
    stretched = expansion.expand(x, top, expansion.power(steps)) * format.max
    # The barrier is needed because XLA may cancel a conversion to 8 bits and back, as
    # in `coat.quantize`.
    codes = lax.optimization_barrier(format.encode(jnp.copysign(stretched, x)))
    return dataclasses.replace(q, codes=codes, exponent=steps)


@partial(jax.jit, static_argnames="format")
def best_power(
    x: Groups, sensitivity: Groups, format: coat.Format
) -> UInt8[Array, "groups 1"]:
    """Returns each group's k, in sixteenths, with the least weighted squared error.

    The error is the sum of (error * sensitivity)^2. All k from 1/16 to 10 are tried.
    """

    def attempt(best, candidate):
        steps = jnp.full((len(x), 1), candidate)
        error = (quantize_by(x, steps, format).dequantize() - x) * sensitivity
        error = jnp.sum(error * error, axis=1, keepdims=True)
        better = error < best[0]
        improved = jnp.where(better, error, best[0]), jnp.where(better, steps, best[1])
        return improved, None

    start = jnp.full((len(x), 1), jnp.inf), jnp.full((len(x), 1), jnp.uint8(16))
    return lax.scan(attempt, start, jnp.asarray(_CANDIDATES))[0][1]


@dataclasses.dataclass(frozen=True)
class PeakOverRms:
    """The rule k = c / log2(amax / rms), which expands flat groups more.

    Attributes:
      c: The octaves between the group's amax and its root mean square after expansion.
    """

    c: float

    def __call__(
        self, x: Groups, sensitivity: Groups, format: coat.Format
    ) -> UInt8[Array, "groups 1"]:
        """Returns the k of each group in sixteenths, between 1/16 and 6."""
        peak = jnp.max(jnp.abs(x), axis=1, keepdims=True)
        rms = jnp.sqrt(jnp.mean(x * x, axis=1, keepdims=True))
        octaves = jnp.log2(jnp.maximum(peak / jnp.maximum(rms, _TINY), 1.01))
        return jnp.clip(16 * self.c / octaves, 1, 96).astype(jnp.uint8)


def round_stochastically(
    x: Groups, q: coat.QuantizedArray, key: Array
) -> coat.QuantizedArray:
    """Returns `q` with each code rounded at random to one of the neighbours of `x`.

    `q` is `x` quantized to nearest. The probabilities are such that the mean of the
    dequantized numbers is `x`. The mean is below `x` only if `x` exceeds the group's
    largest code, because rounding can make a scale 0.4% too small.
    """
    magnitudes, top = _magnitudes(q.format), q.scale.astype(jnp.float32) * q.format.max
    k = q.power if q.exponent is None else expansion.power(q.exponent)
    stretched = expansion.expand(x, top, k) * q.format.max
    below = jnp.searchsorted(magnitudes, stretched, side="right") - 1
    below = jnp.clip(below, 0, len(magnitudes) - 2)

    def value(code):
        return expansion.contract(magnitudes[code] / q.format.max, top, k)

    low, high = value(below), value(below + 1)
    up = jax.random.uniform(key, x.shape) < (jnp.abs(x) - low) / (high - low)
    rounded = jnp.copysign(magnitudes[below + up], x)
    return dataclasses.replace(q, codes=q.format.encode(rounded))


def _magnitudes(format: coat.Format) -> Float32[Array, " n"]:
    """Returns the distinct finite magnitudes of a format's codes, ascending."""
    values = format.table or np.arange(256, dtype=np.uint8).view(format.dtype)
    values = np.abs(np.asarray(values, np.float32))
    return jnp.asarray(np.unique(values[np.isfinite(values)]))


class Trajectory(NamedTuple):
    """Errors of Adam with stored moments against exact Adam, step by step.

    Attributes:
      update_error: The mean squared error of the update, relative to the mean square of
        the exact update.
      sum_error: The same ratio for the sum of all updates so far.
      nu_ratio: The median of v over the exact v, before v is stored.
    """

    update_error: Float32[Array, " steps"]
    sum_error: Float32[Array, " steps"]
    nu_ratio: Float32[Array, " steps"]


@partial(jax.jit, static_argnames="scheme")
def replay(
    scheme: Scheme,
    mu: Groups,
    nu: Groups,
    gradients: Float32[Array, "steps groups 128"],
    key: Array,
    *,
    b1: float,
    b2: float,
) -> Trajectory:
    """Returns the errors of Adam that stores its moments by a scheme, step by step.

    Exact Adam and this Adam read the same gradients, and start from `mu` and `nu`. The
    update is m / sqrt(v), without bias correction and learning rate, which are the same
    for both.
    """

    def step(carry, inputs):
        exact, moments, sums = carry
        gradient, key = inputs
        exact = adam(*exact, gradient, b1, b2)
        moments = adam(*read_back(scheme, *moments, key), gradient, b1, b2)
        counted = exact[1] >= _TINY
        updates = exact_update(*exact), jnp.where(counted, read_update(*moments), 0.0)
        sums = sums[0] + updates[0], sums[1] + updates[1]
        ratio = jnp.where(counted, moments[1] / exact[1], jnp.nan)
        # A median is slow to compute, and a sixteenth of the elements is enough for it.
        trajectory = Trajectory(
            update_error=_relative_error(*updates),
            sum_error=_relative_error(*sums),
            nu_ratio=jnp.nanmedian(ratio[:, ::16]),
        )
        return (exact, moments, sums), trajectory

    zeros = jnp.zeros_like(mu)
    carry = (mu, nu), (mu, nu), (zeros, zeros)
    inputs = gradients, jax.random.split(key, len(gradients))
    return lax.scan(step, carry, inputs)[1]


def adam(
    mu: Groups, nu: Groups, gradient: Groups, b1: float, b2: Array | float
) -> tuple[Groups, Groups]:
    """Returns the moments after a step of Adam with a gradient g.

    They are b1 mu + (1 - b1) g and b2 nu + (1 - b2) g^2.
    """
    nu = b2 * nu + (1 - b2) * gradient * gradient
    return b1 * mu + (1 - b1) * gradient, nu


def _relative_error(exact: Groups, approximate: Groups) -> Float32[Array, ""]:
    return jnp.mean(jnp.square(approximate - exact)) / jnp.mean(jnp.square(exact))
