"""Adam's step on a tile of FP8 moments, in registers.

The work is bound by memory, 10 bytes a bfloat16 parameter, as long as the arithmetic
hides behind it. Behind matrix products, which leave the chip a lower clock, it does not
quite, and it takes as much of the issue slots as of the special function unit. So:

- A group's expansion acts on logarithms, and log2(0) = -inf lets zeros vanish without
  a select. The second moment is decoded as its root, whose square is free.
- Moments are carried without the factors of gradients, 1 - b1 and 1 - b2, and all
  others are folded into numbers of the group.
- The first moment's expansion is a cube: two multiplications. One reciprocal root
  serves both the stored ratio and the update.
- Eight neighbours round by the bits of one hash.
- Divisions are a guess by bits and a polynomial, off the special function unit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import mosaic
from pallas_kernels.codec import LANES
from pallas_kernels.reference import adam as reference
from pallas_kernels.reference.adam import AdamScalars

TILE = 16  # Groups that a warpgroup handles at a time,
TALL = 32  # or so many, with less to do for each group, and more registers.
UNIT = 32  # Of which groups are so many neighbours, up to 128.
_TINY = float(jnp.finfo(jnp.float32).tiny)
_LEAST_WEIGHT = 1e-20  # Of the moment, for what is divided by it: next to nothing.
_LOG2_MAX = math.log2(448.0)
_LOG2_RANGE = 16 * math.log2(448.0**2 / 2)


class State(NamedTuple):
    """What a step changes: arrays, or refs to them."""

    result: Any  # The parameters, or what updates are written to.
    mu: Any
    nu: Any
    mu_scale: Any
    nu_scale: Any
    nu_exponent: Any

    def map(self, array: Callable, per_group: Callable) -> "State":
        """Applies one function to arrays and another to what groups have one of."""
        return State(*map(array, self[:3]), *map(per_group, self[3:]))


class Inputs(NamedTuple):
    """What a step reads of a tile: refs, or functions that load."""

    grads: Any
    mu: Any
    nu: Any
    params: Any  # None where updates are wanted.
    mu_scale: Any
    nu_scale: Any
    nu_exponent: Any
    noise: Any  # None without stochastic rounding.

    @classmethod
    def of(cls, refs: State, grads: Any, noise: Any, with_params: bool) -> "Inputs":
        """What is read beside the gradients and the noise is also what changes."""
        scales = (refs.mu_scale, refs.nu_scale, refs.nu_exponent)
        params = refs.result if with_params else None
        return cls(grads, refs.mu, refs.nu, params, *scales, noise)

    def map(self, array: Callable, per_group: Callable) -> "Inputs":
        """Applies one function to arrays and another to what groups have one of."""
        arrays = jax.tree.map(array, self[:4])
        return Inputs(*arrays, *jax.tree.map(per_group, self[4:]))

    def loaded(self) -> "Inputs":
        """Loads at once, for functions that only return what they loaded."""

        def now(load):
            return functools.partial(lambda x: x, load())

        return self.map(now, now)


class Factors(NamedTuple):
    """What the kernel multiplies with.

    It carries m = mu / (1 - b1) and v = nu / (1 - b2), to which gradients are added as
    they are.
    """

    log2_mu: Array  # From log2(cbrt(c)) to log2(b1 * m / sqrt(b2 * v)).
    log2_root: Array  # From log2(nu) / 2 to log2(sqrt(b2 * v)).
    nu: Array  # 1 - b2: v to nu.
    log2_nu: Array
    ratio: Array  # m / sqrt(v) to mu / sqrt(nu).
    numerator: Array  # m to the update times its denominator.
    lookahead: Array  # The gradient's share in it, with Nesterov momentum.
    denominator: Array  # sqrt(v) to the update's denominator.
    eps_root: Array
    eps: Array
    keep: Array  # 1 - learning_rate * decay.


def factors(s: AdamScalars, with_params: bool) -> Float[Array, " factors"]:
    """`Factors` as one array."""
    s = AdamScalars(*(jnp.asarray(x, jnp.float32) for x in s))
    step = s.learning_rate if with_params else 1.0
    mu_weight = jnp.maximum(s.mu_weight, _LEAST_WEIGHT)
    unit, nu = 1 - s.b1, 1 - s.b2
    ratio = unit * lax.rsqrt(nu)
    root = jnp.sqrt(jnp.maximum(s.b2, _TINY))
    factors = Factors(
        log2_mu=jnp.log2(s.b1 / (ratio * root)) - _LOG2_MAX / 3,
        log2_root=jnp.log2(root) - 0.5 * jnp.log2(nu),
        nu=nu,
        log2_nu=jnp.log2(nu),
        ratio=ratio,
        numerator=step * mu_weight * unit,
        lookahead=s.grad_weight / (mu_weight * unit),
        denominator=jnp.sqrt(s.nu_weight * nu),
        eps_root=s.eps_root,
        eps=s.eps,
        keep=1 - s.learning_rate * s.decay,
    )
    return jnp.stack(factors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The arithmetic of a tile, for what is known when the kernel is compiled."""

    nesterov: bool
    eps_root: bool
    with_params: bool

    def tile(self, f: Factors, to: State, loads: Inputs) -> None:
        """Computes a tile from what `loads` return, and stores it."""
        g = loads.grads().astype(jnp.float32)
        ratio, root = _decoded(loads, f)
        m, v = ratio * root + g, root * root + g * g
        q = _reciprocal_root(v)
        mosaic.store(to.result, self._result(g, m, v, q, f, loads, to.result.dtype))
        _store((to.mu, to.mu_scale), _encoded_ratio(m * q, f))
        _store((to.nu, to.nu_scale, to.nu_exponent), _encoded_nu(v, f))

    def _result(self, g, m, v, q, f, loads, dtype):
        numerator = m
        if self.nesterov:
            numerator = m + g * f.lookahead
        if self.eps_root:  # Only 0 lets the reciprocal root q serve here.
            square = v * (f.denominator * f.denominator) + f.eps_root
            denominator = jnp.exp2(jnp.log2(square) * 0.5) + f.eps
        else:
            numerator, denominator = numerator * q, q * f.eps + f.denominator
        update = numerator * _reciprocal(denominator, terms=2) * f.numerator
        if not self.with_params:
            return update.astype(dtype)
        p = loads.params().astype(jnp.float32) * f.keep - update
        if loads.noise is None or dtype != jnp.bfloat16:
            return p.astype(dtype)
        return _stochastic(p, loads.noise())


def _decoded(loads: Inputs, f: Factors) -> tuple[Array, Array]:
    """b1 * m over the root of b2 * v, and that root."""
    half_root = 8.0 * _reciprocal(_float32(loads.nu_exponent()))
    log2_top = jnp.log2(_float32(loads.nu_scale())) + _LOG2_MAX
    base = 0.5 * log2_top + f.log2_root - _LOG2_MAX * half_root
    c = _float32(loads.nu())
    log2_root = jnp.log2(c) * _spread(half_root, c) + _spread(base, c)
    base = jnp.log2(_float32(loads.mu_scale())) + (_LOG2_MAX + f.log2_mu)
    c = _float32(loads.mu())
    log2_ratio = jnp.log2(jnp.abs(c)) * (1 / 3) + _spread(base, c)
    return _with_sign(jnp.exp2(log2_ratio), c), jnp.exp2(log2_root)


def _store(refs: tuple[Any, ...], values: tuple[Array, ...]) -> None:
    for ref, value in zip(refs, values, strict=True):
        mosaic.store(ref, value)


def _encoded_ratio(r: Array, f: Factors) -> tuple[Array, Array]:
    scale = _scale(jnp.max(jnp.abs(r), axis=1) * (f.ratio * (1 / 448)))
    unit = f.ratio * 448 ** (1 / 3 - 1)
    t = r * _spread(unit * _reciprocal(_float32(scale)), r)
    return (t * t * t).astype(jnp.float8_e4m3fn), scale


def _encoded_nu(v: Array, f: Factors) -> tuple[Array, Array, Array]:
    bits = _bits(v)  # Which compare as numbers that are not negative do.
    scale = _scale(_floats(jnp.max(bits, axis=1)) * (f.nu * (1 / 448)))
    # Of v, too.
    log2_top = jnp.log2(_float32(scale)) + (_LOG2_MAX - f.log2_nu)
    # What is below the first normal number wraps around, and is never the smallest.
    normal = jnp.uint32(0x00800000)
    smallest = _floats(jnp.min(bits - normal, axis=1) + normal)
    octaves = log2_top - jnp.log2(smallest)
    k = _LOG2_RANGE * _reciprocal(jnp.maximum(octaves, 1e-3))
    k = jnp.clip(k, 1.0, 255.0)
    k = jnp.where(octaves < 1e30, k, 255.0).astype(jnp.int32)
    power = k.astype(jnp.float32) * (1 / 16)
    shift = _spread(_LOG2_MAX - power * log2_top, v)
    codes = jnp.exp2(jnp.log2(v) * _spread(power, v) + shift)
    return codes.astype(jnp.float8_e4m3fn), scale, k.astype(jnp.uint8)


def _scale(x: Array) -> Array:
    """The stored scale; NaN for infinity too."""
    return (jnp.clip(x, _TINY, 2.0**119) + x * 0.0).astype(jnp.bfloat16)


def _stochastic(p: Array, noise: Array) -> Array:
    j = lax.broadcasted_iota(jnp.uint32, p.shape, 1)
    j = plgpu.layout_cast(j, _layout(*p.shape))
    up = reference.uniform16(_spread(noise, p), j)
    rounded = _floats((_bits(p) + up) & jnp.uint32(0xFFFF0000))
    return jnp.where(jnp.abs(p) < jnp.inf, rounded, p).astype(jnp.bfloat16)


def load(ref: Any, width: int) -> Array:
    """Loads a tile of groups of `width`, or what its groups have one of."""
    layout = _layout(ref.shape[0], width)
    if len(ref.shape) == 1:
        layout = layout.reduce(1)
    return plgpu.load(ref, layout=layout, optimized=False)


def _layout(groups: int, width: int) -> plgpu.Layout:
    """A fourth of the groups each warp; vectors of 8 neighbours a lane, or of 4."""
    lanes = LANES // groups  # Of a group.
    vector = 8 if width % (8 * lanes) == 0 else 4
    several = width > lanes * vector  # Vectors a lane; layouts name no axis of one.
    split = (lanes * vector,)
    tiles = ((groups, width), (groups // 4, width), *[split] * several, (vector,))
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles),
        warp_dims=(-5 - several,),
        lane_dims=(-3 - several, -2),
        vector_dim=-1,
    )


def _spread(x: Array, like: Array) -> Array:
    """One number a group to its elements."""
    wide = lax.broadcast_in_dim(x, like.shape, (0,))
    return plgpu.layout_cast(wide, _layout(*like.shape))


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _floats(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.float32)


def _with_sign(magnitude: Array, x: Array) -> Array:
    return _floats(_bits(magnitude) | (_bits(x) & jnp.uint32(0x80000000)))


def _float32(x: Array) -> Array:
    wide = x.astype(jnp.int32) if x.dtype == jnp.uint8 else x
    return wide.astype(jnp.float32)


def _reciprocal(x: Array, terms: int = 4) -> Array:
    """1 / x for positive x to 4e-7, off the special function unit.

    The bits' difference is a first guess to 5%; with its error e, 1 / (1 - e) follows,
    with two terms of its series to 1.3e-4.
    """
    guess = _floats(jnp.uint32(0x7EF31200) - _bits(x))
    e = 1.0 - x * guess
    series = e
    for _ in range(terms - 1):
        series = e + e * series
    return guess + guess * series


def _reciprocal_root(x: Array) -> Array:
    """1 / sqrt(x) to 2e-6 likewise; of 0 some finite number, and NaN of infinity.

    The first guess is known to 3.5%, and 1 / sqrt(1 - e) is a polynomial then.
    """
    guess = _floats(jnp.uint32(0x5F374700) - (_bits(x) >> jnp.uint32(1)))
    e = 1.0 - (x * guess) * guess
    return guess + guess * (e * (0.499999 + e * (0.376055 + e * 0.313764)))
