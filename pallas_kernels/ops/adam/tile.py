"""Adam's step on a tile of FP8 moments, in registers.

The step is limited by memory traffic, 10 bytes per bfloat16 parameter, as long as all
arithmetic overlaps with it. After matmuls, which leave the chip at a lower clock, part
of the arithmetic does not overlap. Arithmetic uses issue slots and the special function
unit equally. So:

- Range expansion works on logarithms. As log2(0) = -inf, zeros stay zeros without a
  select. The second moment is decoded as its root, because squaring the root is free.
- Moments are carried without the factors of gradients, 1 - b1 and 1 - b2. All other
  factors are folded into per-group numbers.
- The expansion of the first moment is a cube, which takes two multiplications. One
  reciprocal root serves both the stored ratio and the update. One logarithm serves both
  that root and the code of the second moment.
- Random bits cost one addition per element. Rounding with them costs an addition and a
  mask.
- A division is a guess from the bits and a polynomial. It does not use the special
  function unit.
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
from pallas_kernels.numerics import TINY, float_bits, floats
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

TILE = 16  # Groups of a tile, which a warpgroup handles at a time.
TALL = 32  # Groups of a tile in the pipeline.
UNIT = 32  # A group's length is a multiple of this number, up to 128.
# The first moment's weight is at least this negligible number, as it is a divisor.
_LEAST_WEIGHT = 1e-20
_MU_ROOT = MU_MAX ** (1 / 3)
_BEND_SHIFT = 10 - round(math.log2(MU_BEND))
_LOG2_NU_MAX = math.log2(NU_MAX)
_LOG2_NU_RANGE = 16 * math.log2(NU_MAX / UE4M4_SMALLEST)


# The length and stride of each axis, the innermost axis first.
Axes = tuple[tuple[int, int], ...]


class State(NamedTuple):
    """The arrays that a step changes, or refs to them."""

    result: Any  # The parameters, or the array for updates.
    mu: Any
    nu: Any
    mu_scale: Any
    nu_scale: Any
    nu_exponent: Any

    def map(self, array: Callable, per_group: Callable) -> "State":
        """Applies `array` to arrays, and `per_group` to per-group numbers."""
        return State(*map(array, self[:3]), *map(per_group, self[3:]))


class Inputs(NamedTuple):
    """The inputs of a tile: refs, or functions that load them."""

    grads: Any
    mu: Any
    nu: Any
    params: Any  # None if the step returns updates.
    mu_scale: Any
    nu_scale: Any
    nu_exponent: Any

    @classmethod
    def of(cls, refs: State, grads: Any, with_params: bool) -> "Inputs":
        """Combines gradients with the arrays of `refs`, which a step also reads."""
        scales = (refs.mu_scale, refs.nu_scale, refs.nu_exponent)
        params = refs.result if with_params else None
        return cls(grads, refs.mu, refs.nu, params, *scales)

    def map(self, array: Callable, per_group: Callable) -> "Inputs":
        """Applies `array` to arrays, and `per_group` to per-group numbers."""
        arrays = jax.tree.map(array, self[:4])
        return Inputs(*arrays, *jax.tree.map(per_group, self[4:]))

    def loaded(self) -> "Inputs":
        """Loads everything now; returns functions that return the loaded values."""

        def now(load):
            return functools.partial(lambda x: x, load())

        return self.map(now, now)


class Factors(NamedTuple):
    """The factors of a step, in the form that the kernel needs.

    The kernel carries m = mu / (1 - b1) and v = nu / (1 - b2). It adds gradients to
    them without a factor: m = b1 * m + g and v = b2 * v + g**2.
    """

    log2_mu: Array  # The offset from log2(s * cbrt(c)) to log2(b1 * m / sqrt(b2 * v)).
    log2_root: Array  # The offset from log2(nu) / 2 to log2(sqrt(b2 * v)).
    log2_nu: Array  # The offset from log2(v) to log2(nu).
    log2_largest: Array  # The largest log2(v) that is stored.
    ratio: Array  # The factor from m / sqrt(v) to mu / sqrt(nu).
    numerator: Array  # The factor from m to the update times its denominator.
    lookahead: Array  # The gradient's weight relative to m, with Nesterov momentum.
    denominator: Array  # The factor from sqrt(v) to the update's denominator.
    eps_root: Array
    eps: Array
    keep: Array  # The factor of parameters, 1 - learning_rate * decay.


def factors(s: AdamScalars, with_params: bool) -> Float[Array, " factors"]:
    """Computes `Factors` as one array.

    `with_params` says whether the step changes parameters instead of returning updates.
    """
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
    """Merges axes into as few as possible, from which the kernel computes positions.

    Args:
      lengths: The length of each axis.
      strides: The distance between the positions of neighbours along each axis.

    Returns:
      The length and stride of each merged axis, the innermost first. The length of the
      outermost axis is 0, because the kernel does not need it.
    """
    axes: list[tuple[int, int]] = []
    for length, stride in zip(reversed(lengths), reversed(strides), strict=True):
        if axes and axes[-1][0] * axes[-1][1] == stride:
            axes[-1] = (axes[-1][0] * length, axes[-1][1])
        else:
            axes.append((length, stride))
    # The kernel takes no index modulo the outermost length. It is set to 0, so that
    # other lengths do not compile the kernel again.
    axes = axes or [(1, 0)]
    return tuple((n, s & 0xFFFFFFFF) for n, s in (*axes[:-1], (0, axes[-1][1])))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The arithmetic of a tile, with options known when the kernel is compiled."""

    nesterov: bool
    eps_root: bool
    with_params: bool
    stochastic: bool  # True if parameters are rounded stochastically, too.
    rows: Axes  # Axes that give the position of a row in the whole array.
    column: int  # The distance between the positions of neighbouring groups in a row.

    def words(self, seed: Array, start: Array, column: Array, like: Any) -> Array:
        """Returns the random words of a tile's groups.

        The tile has the shape of `like`, and begins at row `start` and group `column`.
        """
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
        """Computes the step of a tile, and stores the results.

        Args:
          f: The factors of the step.
          salt: The number that makes parameters' random bits differ from moments' bits.
          to: Refs to the tile's results.
          loads: Functions that load the tile's inputs.
          words: A function that returns the random words of the tile's groups.
        """
        g = loads.grads().astype(jnp.float32)
        ratio, root = _decoded(loads, f)
        m, v = ratio * root + g, root * root + g * g
        log2_v = jnp.log2(v)
        # q = 1 / sqrt(v) is finite where v is 0. It is 0 where v overflowed, so that
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
        if self.eps_root:
            # Without eps_root the reciprocal root q would serve.
            square = v * (f.denominator * f.denominator) + f.eps_root
            denominator = jnp.exp2(jnp.log2(square) * 0.5) + f.eps
        else:
            # Numerator and denominator are both multiplied by q = 1 / sqrt(v).
            numerator, denominator = numerator * q, q * f.eps + f.denominator
        update = numerator * _reciprocal(denominator, terms=2) * f.numerator
        if not self.with_params:
            return update.astype(dtype)
        p = loads.params().astype(jnp.float32) * f.keep - update
        if not self.stochastic:
            return p.astype(dtype)
        up = _bits_of_elements(hash32(words), p) >> jnp.uint32(16)
        rounded = floats((float_bits(p) + up) & jnp.uint32(0xFFFF0000))
        return jnp.where(jnp.abs(p) < jnp.inf, rounded, p).astype(dtype)


def _decoded(loads: Inputs, f: Factors) -> tuple[Array, Array]:
    """Returns b1 * m / sqrt(b2 * v), and sqrt(b2 * v)."""
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
    # The cube is linear in the moment up to the smallest code; see the reference.
    cube = t * jnp.maximum(t * t, 1 / 64)
    denormal = cube < 2.0**-6
    offset = jnp.where(denormal, 2.0**-6, 0.0)
    raised = float_bits(cube + offset)
    # The bend is f * (1 - f) * MU_BEND of a code's step, in integers; see `bend_of`.
    part = (raised >> jnp.uint32(5)) & jnp.uint32(0x7FFF)
    part = jnp.where(denormal, jnp.uint32(0), part)
    bend = (part * (jnp.uint32(0x8000) - part)) >> jnp.uint32(_BEND_SHIFT)
    raised = raised + bend + (bits >> jnp.uint32(12))
    # Numbers that round beyond the largest code saturate in the conversion.
    cube = floats(raised & jnp.uint32(0xFFF00000)) - offset
    return _with_sign(cube, r).astype(jnp.float8_e4m3fn), scale


def _encoded_nu(log2_v: Array, f: Factors, bits: Array) -> tuple[Array, Array, Array]:
    log2_top = jnp.clip(jnp.max(log2_v, axis=1), -126.0, f.log2_largest)
    scale = _scale(jnp.exp2(log2_top + (f.log2_nu - _LOG2_NU_MAX)))
    # The addition makes logarithms positive, so that their bits compare like integers.
    # The bits of log2(0) = -inf are the largest integer, so the minimum skips zeros.
    lifted = floats(jnp.min(float_bits(log2_v + 256.0), axis=1)) - 256.0
    octaves = jnp.clip(log2_top - lifted, 1e-3, float(OCTAVES))
    k = jnp.clip(_LOG2_NU_RANGE * _reciprocal(octaves), 1.0, 255.0)
    # A group of zeros gets 255.
    k = jnp.where(lifted > -1e30, k, 255.0).astype(jnp.int32)
    power = k.astype(jnp.float32) * (1 / 16)
    shift = _spread(_LOG2_NU_MAX - power * log2_top, log2_v)
    t = float_bits(jnp.exp2(log2_v * _spread(power, log2_v) + shift))
    # A zero minus 1 wraps around to the largest integer. So the maximum raises all
    # numbers but zero to the smallest code.
    t = jnp.maximum(t - jnp.uint32(1), _bits_of(UE4M4_SMALLEST) - jnp.uint32(1))
    t = t + (bits >> jnp.uint32(13)) + jnp.uint32(1)
    t = jnp.minimum(t, _bits_of(NU_MAX)) & jnp.uint32(0xFFF80000)
    return pack_ue4m4(floats(t)), scale, k.astype(jnp.uint8)


def _scale(x: Array) -> Array:
    """Returns the stored scale, max(x, TINY); NaN if x is infinite."""
    return jnp.maximum(x, TINY) + x * 0.0


def _bits_of_elements(words: Array, like: Array) -> Array:
    """Returns the random bits of a tile's elements, from the words of its groups."""
    j = lax.broadcasted_iota(jnp.uint32, like.shape, 1)
    j = plgpu.layout_cast(j, _layout(*like.shape))
    return element_bits(_spread(words, like), j)


def load(ref: Any, width: int) -> Array:
    """Loads a tile of groups of `width` elements, or one number per group."""
    layout = _layout(ref.shape[0], width)
    if len(ref.shape) == 1:
        layout = layout.reduce(1)
    return plgpu.load(ref, layout=layout, optimized=False)


def _layout(groups: int, width: int) -> plgpu.Layout:
    """Returns the register layout of a tile.

    Each warp has a quarter of the groups. A lane has vectors of 8 or 4 neighbours.
    """
    lanes = LANES // groups  # The number of lanes per group.
    vector = 8 if width % (8 * lanes) == 0 else 4
    # The layout has an axis for a lane's vectors only if a lane has several.
    several = width > lanes * vector
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


def _bits_of(x: float) -> Array:
    return jnp.uint32(np.float32(x).view(np.uint32))


def _with_sign(magnitude: Array, x: Array) -> Array:
    return floats(float_bits(magnitude) | (float_bits(x) & jnp.uint32(0x80000000)))


def _float32(x: Array) -> Array:
    wide = x.astype(jnp.int32) if x.dtype == jnp.uint8 else x
    return wide.astype(jnp.float32)


def _reciprocal(x: Array, terms: int = 4) -> Array:
    """Computes 1 / x for positive x, without the special function unit.

    A difference of bits gives a guess with an error e = 1 - x * guess of up to 5%. Then
    1 / x = guess / (1 - e) is computed as a series. Four terms have a relative error of
    up to 5e-7, two terms of up to 1.3e-4.
    """
    guess = floats(jnp.uint32(0x7EF31200) - float_bits(x))
    e = 1.0 - x * guess
    series = e
    for _ in range(terms - 1):
        series = e + e * series
    return guess + guess * series


def _log2(x: Array) -> Array:
    """Computes log2(x) with an error of up to 4e-7; NaN for infinity.

    For x far from 1 the error is half the last bit of the result. Every step reads
    the largest number of a group through this function, and stores it again. So larger
    errors would add up.
    """
    bits = float_bits(x)
    exponent = (bits >> jnp.uint32(23)).astype(jnp.int32).astype(jnp.float32) - 127.0
    mantissa = (bits & jnp.uint32(0x007FFFFF)) | jnp.uint32(0x3F800000)
    return exponent + jnp.log2(floats(mantissa)) + x * 0.0
