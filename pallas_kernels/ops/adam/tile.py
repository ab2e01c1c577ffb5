"""Adam's step on a tile of FP8 moments, in registers.

The work is bound by memory, 10 bytes a bfloat16 parameter, as long as the arithmetic
hides behind it. Behind matrix products, which leave the chip a lower clock, it does not
quite, and it takes as much of the issue slots as of the special function unit. So:

- A group's expansion acts on logarithms, and log2(0) = -inf lets zeros vanish without
  a select. The second moment is decoded as its root, whose square is free.
- Moments are carried without the factors of gradients, 1 - b1 and 1 - b2, and all
  others are folded into numbers of the group.
- The first moment's expansion is a cube: two multiplications. One reciprocal root
  serves both the stored ratio and the update, and one logarithm it and the code.
- Random bits cost one addition an element, and rounding by them is an addition and a
  mask.
- Divisions are a guess by bits and a polynomial, off the special function unit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.mosaic.codec import LANES
from pallas_kernels.numerics import TINY
from pallas_kernels.ops.adam.reference import (
    LARGEST_NU,
    MU_BEND,
    MU_MAX,
    NU_MAX,
    OCTAVES,
    AdamScalars,
)
from pallas_kernels.rounding import (
    UE4M4_SMALLEST,
    element_bits,
    hash32,
    pack_ue4m4,
    unpack_ue4m4,
)

TILE = 16  # Groups that a warpgroup handles at a time,
TALL = 32
UNIT = 32  # Narrow groups have a multiple of so many elements, up to 128.
_LEAST_WEIGHT = 1e-20  # Weights of the moment are divisors, and no less.
_MU_ROOT = MU_MAX ** (1 / 3)
_BEND_SHIFT = 10 - round(math.log2(MU_BEND))
_LOG2_NU_MAX = math.log2(NU_MAX)
_LOG2_NU_RANGE = 16 * math.log2(NU_MAX / UE4M4_SMALLEST)


# Lengths and strides of axes.
Axes = tuple[tuple[int, int], ...]


class State(NamedTuple):
    """The arrays that a step changes, or refs to them."""

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
    """The inputs of a tile: refs, or functions that load."""

    grads: Any
    mu: Any
    nu: Any
    params: Any  # None where updates are wanted.
    mu_scale: Any
    nu_scale: Any
    nu_exponent: Any

    @classmethod
    def of(cls, refs: State, grads: Any, with_params: bool) -> "Inputs":
        """Returns the inputs; all but the gradients are also outputs."""
        scales = (refs.mu_scale, refs.nu_scale, refs.nu_exponent)
        params = refs.result if with_params else None
        return cls(grads, refs.mu, refs.nu, params, *scales)

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
    """The factors of a step, in the kernel's form.

    It carries m = mu / (1 - b1) and v = nu / (1 - b2), to which gradients are added as
    they are.
    """

    log2_mu: Array  # Leads from log2(cbrt(c)) to log2(b1 * m / sqrt(b2 * v)).
    log2_root: Array  # Leads from log2(nu) / 2 to log2(sqrt(b2 * v)).
    log2_nu: Array  # Leads from log2(v) to log2(nu).
    log2_largest: Array  # The largest v that is stored, as log2.
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
    root = jnp.sqrt(jnp.maximum(s.b2, TINY))
    factors = Factors(
        log2_mu=jnp.log2(s.b1 / (ratio * root)) + 2 / 3 * math.log2(MU_MAX),
        log2_root=jnp.log2(root) - 0.5 * jnp.log2(nu),
        log2_nu=jnp.log2(nu),
        log2_largest=math.log2(LARGEST_NU) - jnp.log2(nu),
        ratio=ratio,
        numerator=step * mu_weight * unit,
        lookahead=s.grad_weight / (mu_weight * unit),
        denominator=jnp.sqrt(s.nu_weight * nu),
        eps_root=s.eps_root,
        eps=s.eps,
        keep=1 - s.learning_rate * s.decay,
    )
    return jnp.stack(factors)


def merged(lengths: tuple[int, ...], strides: tuple[int, ...]) -> Axes:
    """Axes as few as possible, the innermost first, whose index is one number."""
    axes: list[tuple[int, int]] = []
    for length, stride in zip(reversed(lengths), reversed(strides), strict=True):
        if axes and axes[-1][0] * axes[-1][1] == stride:
            axes[-1] = (axes[-1][0] * length, axes[-1][1])
        else:
            axes.append((length, stride))
    # Nothing is taken modulo the outermost length, which would compile anew.
    axes = axes or [(1, 0)]
    return tuple((n, s & 0xFFFFFFFF) for n, s in (*axes[:-1], (0, axes[-1][1])))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The arithmetic of a tile, for what is known when the kernel is compiled."""

    nesterov: bool
    eps_root: bool
    with_params: bool
    stochastic: bool  # True if parameters, too, are rounded stochastically.
    rows: Axes  # Where the groups of a row are in the whole array,
    column: int  # and by how much their places are apart.

    def words(self, seed: Array, start: Array, column: Array, like: Any) -> Array:
        """The random words of a tile's groups, in a column of rows from `start`."""
        layout = _layout(*like.shape).reduce(1)
        index = lax.broadcasted_iota(jnp.uint32, like.shape[:1], 0)
        index = plgpu.layout_cast(index, layout) + start.astype(jnp.uint32)
        place = seed + column.astype(jnp.uint32) * jnp.uint32(self.column & 0xFFFFFFFF)
        *inner, (_, outermost) = self.rows
        for length, stride in inner:
            place = place + lax.rem(index, jnp.uint32(length)) * jnp.uint32(stride)
            index = lax.div(index, jnp.uint32(length))
        return hash32(index * jnp.uint32(outermost) + place)

    def tile(
        self, f: Factors, salt: Array, to: State, loads: Inputs, words: Callable
    ) -> None:
        """Computes a tile from what `loads` and `words` return, and stores it."""
        g = loads.grads().astype(jnp.float32)
        ratio, root = _decoded(loads, f)
        m, v = ratio * root + g, root * root + g * g
        log2_v = jnp.log2(v)
        # The reciprocal root: finite where v is 0, and 0 where v overflowed, so that
        # the update is 0, as in optax.
        q = jnp.exp2(-0.5 * jnp.maximum(log2_v, -126.0))
        words = words()
        result = self._result(g, m, v, q, f, loads, words ^ salt, to.result.dtype)
        mosaic.store(to.result, result)
        bits = _bits_of_elements(words, v)
        _store((to.mu, to.mu_scale), _encoded_ratio(m * q, f, bits))
        nu = _encoded_nu(log2_v, f, bits)
        _store((to.nu, to.nu_scale, to.nu_exponent), nu)

    def _result(self, g, m, v, q, f, loads, words, dtype):
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
        if not self.stochastic:
            return p.astype(dtype)
        up = _bits_of_elements(hash32(words), p) >> jnp.uint32(16)
        rounded = _floats((_bits(p) + up) & jnp.uint32(0xFFFF0000))
        return jnp.where(jnp.abs(p) < jnp.inf, rounded, p).astype(dtype)


def _decoded(loads: Inputs, f: Factors) -> tuple[Array, Array]:
    """Returns b1 * m over the root of b2 * v, and that root."""
    half_root = 8.0 * _reciprocal(_float32(loads.nu_exponent()))
    base = 0.5 * _log2(loads.nu_scale()) + (f.log2_root + 0.5 * _LOG2_NU_MAX)
    base = base - half_root * _LOG2_NU_MAX
    c = unpack_ue4m4(loads.nu())
    root = jnp.exp2(jnp.log2(c) * _spread(half_root, c) + _spread(base, c))
    base = _log2(loads.mu_scale()) + f.log2_mu
    c = _float32(loads.mu())
    log2_ratio = jnp.log2(jnp.abs(c)) * (1 / 3) + _spread(base, c)
    return _with_sign(jnp.exp2(log2_ratio), c), root


def _store(refs: tuple[Any, ...], values: tuple[Array, ...]) -> None:
    for ref, value in zip(refs, values, strict=True):
        mosaic.store(ref, value)


def _encoded_ratio(r: Array, f: Factors, bits: Array) -> tuple[Array, Array]:
    largest = jnp.max(jnp.abs(r), axis=1) * f.ratio
    scale = _scale(largest * (1 / MU_MAX))
    unit = (f.ratio * (_MU_ROOT / MU_MAX)) * _reciprocal(scale)
    t = jnp.abs(r) * _spread(unit, r)
    # Linear in the moment up to the smallest code; see the reference.
    cube = t * jnp.maximum(t * t, 1 / 64)
    denormal = cube < 2.0**-6
    offset = jnp.where(denormal, 2.0**-6, 0.0)
    raised = _bits(cube + offset)
    # f * (1 - f) * MU_BEND of a code's step, in integers.
    part = (raised >> jnp.uint32(5)) & jnp.uint32(0x7FFF)
    part = jnp.where(denormal, jnp.uint32(0), part)
    bend = (part * (jnp.uint32(0x8000) - part)) >> jnp.uint32(_BEND_SHIFT)
    raised = raised + bend + (bits >> jnp.uint32(12))
    # Numbers that round beyond the largest code saturate in the conversion.
    cube = _floats(raised & jnp.uint32(0xFFF00000)) - offset
    return _with_sign(cube, r).astype(jnp.float8_e4m3fn), scale


def _encoded_nu(log2_v: Array, f: Factors, bits: Array) -> tuple[Array, Array, Array]:
    log2_top = jnp.clip(jnp.max(log2_v, axis=1), -126.0, f.log2_largest)
    scale = _scale(jnp.exp2(log2_top + (f.log2_nu - _LOG2_NU_MAX)))
    # Logarithms made positive compare as integers do. That of zero, -infinity, is the
    # largest of them, and never the smallest of a group.
    lifted = _floats(jnp.min(_bits(log2_v + 256.0), axis=1)) - 256.0
    octaves = jnp.clip(log2_top - lifted, 1e-3, float(OCTAVES))
    k = jnp.clip(_LOG2_NU_RANGE * _reciprocal(octaves), 1.0, 255.0)
    k = jnp.where(lifted > -1e30, k, 255.0).astype(jnp.int32)
    power = k.astype(jnp.float32) * (1 / 16)
    shift = _spread(_LOG2_NU_MAX - power * log2_top, log2_v)
    t = _bits(jnp.exp2(log2_v * _spread(power, log2_v) + shift))
    # Less one, zero is the largest integer: it alone is not raised to the smallest
    # code.
    t = jnp.maximum(t - jnp.uint32(1), _bits_of(UE4M4_SMALLEST) - jnp.uint32(1))
    t = t + (bits >> jnp.uint32(13)) + jnp.uint32(1)
    t = jnp.minimum(t, _bits_of(NU_MAX)) & jnp.uint32(0xFFF80000)
    return pack_ue4m4(_floats(t)), scale, k.astype(jnp.uint8)


def _scale(x: Array) -> Array:
    """The stored scale; NaN for infinity too."""
    return jnp.maximum(x, TINY) + x * 0.0


def _bits_of_elements(words: Array, like: Array) -> Array:
    """The random bits of a tile's elements from those of its groups."""
    j = lax.broadcasted_iota(jnp.uint32, like.shape, 1)
    j = plgpu.layout_cast(j, _layout(*like.shape))
    return element_bits(_spread(words, like), j)


def load(ref: Any, width: int) -> Array:
    """Loads a tile of groups of `width`, or what its groups have one of."""
    layout = _layout(ref.shape[0], width)
    if len(ref.shape) == 1:
        layout = layout.reduce(1)
    return plgpu.load(ref, layout=layout, optimized=False)


def _layout(groups: int, width: int) -> plgpu.Layout:
    """A fourth of the groups each warp; vectors of 8 neighbours a lane, or of 4."""
    lanes = LANES // groups  # The lanes of a group.
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
    """Broadcasts one number per group to its elements."""
    wide = lax.broadcast_in_dim(x, like.shape, (0,))
    return plgpu.layout_cast(wide, _layout(*like.shape))


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _bits_of(x: float) -> Array:
    return jnp.uint32(np.float32(x).view(np.uint32))


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


def _log2(x: Array) -> Array:
    """log2(x) to 4e-7, and for x far from 1 to half its own last bit; NaN of infinity.

    The group's largest number is read and written by it in every step, and its error
    would add up.
    """
    bits = _bits(x)
    exponent = (bits >> jnp.uint32(23)).astype(jnp.int32).astype(jnp.float32) - 127.0
    mantissa = (bits & jnp.uint32(0x007FFFFF)) | jnp.uint32(0x3F800000)
    return exponent + jnp.log2(_floats(mantissa)) + x * 0.0
