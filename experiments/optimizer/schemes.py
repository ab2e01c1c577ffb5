"""Ways to store Adam's moments in 8 bits, and what the update reads back.

Moments are groups, arrays [groups, 128]; the update reads m / sqrt(v). Storing and
reading are the library's `coat.quantize` and `coat.dequantize`; here are only the
choices that the library does not make: other rules for a group's k, and stochastic
rounding.
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
# Gives each group's k, in sixteenths, from its elements and their sensitivities.
PowerRule = Callable[[Groups, Groups, coat.Format], UInt8[Array, "groups 1"]]
# What Adam adds to the root of a second moment, and so divides by where that is 0.
EPS = 1e-8
_TINY = float(jnp.finfo(jnp.float32).tiny)
_CANDIDATES = np.arange(1, 161, dtype=np.uint8)  # k up to 10

# The linear 8-bit code, for orientation: 255 levels.
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
    """How one moment is stored.

    Attributes:
      format: The 8-bit code.
      expand: As in `coat.quantize`, or a rule for each group's k.
      weighted: Whether such a rule weighs errors as the update feels them.
      stochastic: Whether to round at random to either neighbour, such that the mean
        is the number itself, instead of to the nearest.
      bfloat16_scale: Whether scales are rounded to bfloat16, as those of arrays are.
    """

    format: coat.Format = coat.E4M3
    expand: bool | float | PowerRule = False
    weighted: bool = True
    stochastic: bool = False
    bfloat16_scale: bool = False

    def store(self, x: Groups, sensitivity: Groups, key: Array) -> coat.QuantizedArray:
        """Quantizes groups whose errors the update feels times `sensitivity`."""
        if callable(self.expand):
            weight = sensitivity if self.weighted else jnp.ones_like(x)
            steps = self.expand(x, weight, self.format)
            q = quantize_by(x, steps, self.format)
        else:
            q = self._library(x)
        return round_stochastically(x, q, key) if self.stochastic else q

    def _library(self, x: Groups) -> coat.QuantizedArray:
        """Groups as optimizers store them, to nearest; linear ones as arrays are."""
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
    """Both moments as a scheme keeps them."""

    mu: coat.QuantizedArray | Groups
    nu: coat.QuantizedArray | Groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """How both moments are stored; None is in float32.

    Attributes:
      name: What it is called in tables.
      mu: Of the first moment.
      nu: Of the second.
      normalized: Whether the first moment is stored over the root of the second.
    """

    name: str
    mu: Code | None = None
    nu: Code | None = None
    normalized: bool = False

    def store(self, mu: Groups, nu: Groups, key: Array) -> Stored:
        """What is kept of moments."""
        update = exact_update(mu, nu)
        root = lax.rsqrt(jnp.maximum(nu, _TINY))
        counted = (nu >= _TINY).astype(jnp.float32)
        of_mu, of_nu = root * counted, 0.5 * update * root * root
        kept = update if self.normalized else mu
        of_kept = counted if self.normalized else of_mu
        key_mu, key_nu = jax.random.split(key)
        return Stored(
            self.mu.store(kept, of_kept, key_mu) if self.mu else kept,
            self.nu.store(nu, of_nu, key_nu) if self.nu else nu,
        )

    def read(self, stored: Stored) -> tuple[Groups, Groups]:
        """The moments that the next update finds."""
        mu, nu = (
            part.dequantize() if isinstance(part, coat.QuantizedArray) else part
            for part in stored
        )
        return mu * jnp.sqrt(nu) if self.normalized else mu, nu

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of both moments and of what belongs to their groups."""
        x = jax.ShapeDtypeStruct((1, GROUP), jnp.float32)
        stored = jax.eval_shape(self.store, x, x, jax.random.key(0))
        leaves = jax.tree.leaves(stored)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / GROUP


def exact_update(mu: Groups, nu: Groups) -> Groups:
    """Computes m / sqrt(v), which is 0 where v counts as 0."""
    return jnp.where(nu < _TINY, 0.0, mu * lax.rsqrt(jnp.maximum(nu, _TINY)))


def read_update(mu: Groups, nu: Groups) -> Groups:
    """Computes m / sqrt(v) of moments as read; where v is lost Adam divides by eps."""
    return mu / jnp.where(nu == 0, EPS, jnp.sqrt(nu))


class UpdateError(NamedTuple):
    """How far m / sqrt(v) is off, over elements whose v is not zero.

    Attributes:
      mse: Mean squared error where the stored v is not zero either.
      mse_with_lost: Mean squared error of all.
      lost: The share whose stored v is zero.
    """

    mse: Float32[Array, ""]
    mse_with_lost: Float32[Array, ""]
    lost: Float32[Array, ""]


def update_error(mu: Groups, nu: Groups, read_mu: Groups, read_nu: Groups):
    """The `UpdateError` of reading `read_mu` and `read_nu` for `mu` and `nu`."""
    counted = nu >= _TINY
    lost = counted & (read_nu == 0)
    error = read_update(read_mu, read_nu) - exact_update(mu, nu)
    squares = jnp.where(counted, error * error, 0.0)
    number = jnp.maximum(jnp.sum(counted), 1)
    kept = jnp.maximum(jnp.sum(counted & ~lost), 1)
    return UpdateError(
        mse=jnp.sum(jnp.where(lost, 0.0, squares)) / kept,
        mse_with_lost=jnp.sum(squares) / number,
        lost=jnp.sum(lost) / number,
    )


def read_back(
    scheme: Scheme, mu: Groups, nu: Groups, key: Array
) -> tuple[Groups, Groups]:
    """Moments after having been stored once."""
    return scheme.read(scheme.store(mu, nu, key))


def quantize_by(
    x: Groups, steps: UInt8[Array, "groups 1"], format: coat.Format
) -> coat.QuantizedArray:
    """`coat.quantize` with range expansion, but with these k, in sixteenths."""
    q = coat.quantize(x, format=format, granularity=coat.PerGroup(GROUP))
    top = q.scale.astype(jnp.float32) * format.max
    stretched = expansion.expand(x, top, expansion.power(steps)) * format.max
    # As in `coat.quantize`: XLA may cancel a conversion to 8 bits and back.
    codes = lax.optimization_barrier(format.encode(jnp.copysign(stretched, x)))
    return dataclasses.replace(q, codes=codes, exponent=steps)


@partial(jax.jit, static_argnames="format")
def best_power(
    x: Groups, sensitivity: Groups, format: coat.Format
) -> UInt8[Array, "groups 1"]:
    """The k of the least squared error times sensitivity, found by trying them all."""

    def attempt(best, candidate):
        steps = jnp.full((len(x), 1), candidate)
        error = (quantize_by(x, steps, format).dequantize() - x) * sensitivity
        error = jnp.sum(error * error, axis=1, keepdims=True)
        better = error < best[0]
        found = jnp.where(better, error, best[0]), jnp.where(better, steps, best[1])
        return found, None

    start = jnp.full((len(x), 1), jnp.inf), jnp.full((len(x), 1), jnp.uint8(16))
    return lax.scan(attempt, start, jnp.asarray(_CANDIDATES))[0][1]


@dataclasses.dataclass(frozen=True)
class PeakOverRms:
    """The closed form k = c / log2(peak / rms): flat groups are stretched further.

    Attributes:
      c: The octaves that a peak of its group stands above the mean after expansion.
    """

    c: float

    def __call__(
        self, x: Groups, sensitivity: Groups, format: coat.Format
    ) -> UInt8[Array, "groups 1"]:
        """Each group's k, in sixteenths and between 1/16 and 6."""
        peak = jnp.max(jnp.abs(x), axis=1, keepdims=True)
        rms = jnp.sqrt(jnp.mean(x * x, axis=1, keepdims=True))
        octaves = jnp.log2(jnp.maximum(peak / jnp.maximum(rms, _TINY), 1.01))
        return jnp.clip(16 * self.c / octaves, 1, 96).astype(jnp.uint8)


def round_stochastically(
    x: Groups, q: coat.QuantizedArray, key: Array
) -> coat.QuantizedArray:
    """`q` with its codes rounded at random to a neighbour of `x`, with mean `x`.

    The mean is that of the numbers read, not of the expanded ones. It is less than `x`
    only above the group's largest code, which a rounded scale can put 0.4% too low.
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
    """What the codes of a format can be in magnitude, in ascending order."""
    values = format.table or np.arange(256, dtype=np.uint8).view(format.dtype)
    values = np.abs(np.asarray(values, np.float32))
    return jnp.asarray(np.unique(values[np.isfinite(values)]))


class Trajectory(NamedTuple):
    """Adam with stored moments beside exact Adam, step by step.

    Attributes:
      update_error: Mean squared error of the update, over its mean square.
      sum_error: The same of all updates so far, summed.
      nu_ratio: Median of v over the exact v, before it is stored.
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
    """Feeds gradients to exact Adam and to one that stores its moments by a scheme.

    Both start from `mu` and `nu`, and divide by the root of v alone: corrections of the
    bias and the learning rate are the same for both.
    """

    def step(carry, inputs):
        exact, moments, sums = carry
        gradient, key = inputs
        exact = _adam(*exact, gradient, b1, b2)
        moments = _adam(*read_back(scheme, *moments, key), gradient, b1, b2)
        counted = exact[1] >= _TINY
        updates = exact_update(*exact), jnp.where(counted, read_update(*moments), 0.0)
        sums = sums[0] + updates[0], sums[1] + updates[1]
        ratio = jnp.where(counted, moments[1] / exact[1], jnp.nan)
        # A sixteenth of the elements is enough for a median, which is slow to find.
        found = Trajectory(
            update_error=_relative_error(*updates),
            sum_error=_relative_error(*sums),
            nu_ratio=jnp.nanmedian(ratio[:, ::16]),
        )
        return (exact, moments, sums), found

    zeros = jnp.zeros_like(mu)
    carry = (mu, nu), (mu, nu), (zeros, zeros)
    inputs = gradients, jax.random.split(key, len(gradients))
    return lax.scan(step, carry, inputs)[1]


def _adam(mu: Groups, nu: Groups, gradient: Groups, b1: float, b2: float):
    nu = b2 * nu + (1 - b2) * gradient * gradient
    return b1 * mu + (1 - b1) * gradient, nu


def _relative_error(exact: Groups, found: Groups) -> Float32[Array, ""]:
    return jnp.mean(jnp.square(found - exact)) / jnp.mean(jnp.square(exact))
