"""Adam's step on FP8 moments: everything is read once and written once, in place.

The work is bound by memory, 10 bytes a bfloat16 parameter, as long as the arithmetic
hides behind it, and what that is short of is the special function unit. So:

- A group's expansion acts on logarithms, and log2(0) = -inf lets zeros vanish without
  a select. The second moment is decoded as its root, whose square is free.
- Factors are folded into numbers of the group.
- The first moment's expansion is a cube: two multiplications. One reciprocal root
  serves both the stored ratio and the update.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt32

from pallas_kernels import dispatch, reference
from pallas_kernels.reference import GROUP, AdamScalars, Moments

_TILE = 16  # Groups that a warpgroup handles at a time.
# 4 warps x 4 groups, 8 lanes a group, two vectors of 8 neighbours a lane.
_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((_TILE, GROUP), (4, GROUP), (64,), (8,))),
    warp_dims=(-6,),
    lane_dims=(-4, -2),
    vector_dim=-1,
)
_PER_GROUP = _LAYOUT.reduce(1)
_TINY = float(jnp.finfo(jnp.float32).tiny)
_LOG2_MAX = math.log2(448.0)
_LOG2_RANGE = 16 * math.log2(448.0**2 / 2)
_DTYPES = (jnp.bfloat16, jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the kernel is laid over the GPU.

    Attributes:
      tiles: Tiles of 16 groups a pipeline step.
      stages: Pipeline steps in flight.
      ctas: Thread blocks on each multiprocessor.
      sms: Multiprocessors.
    """

    tiles: int = 2
    stages: int = 2
    ctas: int = 4
    sms: int = 132


def adam(
    scalars: AdamScalars,
    grads: Float[Array, "... n"],
    moments: Moments,
    params: Float[Array, "... n"] | None = None,
    noise: UInt32[Array, "... g"] | None = None,
    *,
    implementation: dispatch.Implementation | None = None,
    tuning: Tuning | None = None,
) -> tuple[Float[Array, "... n"], Moments]:
    """One parameter's Adam step; see `AdamScalars` for the arithmetic, in float32.

    Args:
      scalars: The step's factors.
      grads: Gradients, bfloat16 or float32.
      moments: Moments before the step.
      params: Parameters, bfloat16 or float32; None returns Adam's update instead.
      noise: Random bits, one word a group of 128, with which bfloat16 parameters are
        rounded stochastically; None rounds them to nearest.
      implementation: What to run; None means the kernel where it can run.
      tuning: How to lay the kernel over the GPU.

    Returns:
      The parameters after the step, or without `params` the update in the gradients'
      dtype; and the moments after the step.
    """
    chosen = dispatch.choose(implementation, _obstacle(grads, params))
    if chosen == "reference":
        return reference.adam(scalars, grads, moments, params, noise)
    return _mosaic(scalars, grads, moments, params, noise, tuning or Tuning())


def _obstacle(grads: Array, params: Array | None) -> str | None:
    """Why the kernel cannot run; None if it can."""
    for name, x in (("gradients", grads), ("parameters", params)):
        if x is not None and x.dtype not in _DTYPES:
            return f"{name} must be bfloat16 or float32, got {x.dtype}"
    if not grads.ndim or grads.size < _TILE * GROUP:
        return f"it takes {_TILE * GROUP} elements or more, got {grads.size}"
    return None


class _State(NamedTuple):
    """What a step changes, as [groups, 128] and [groups]: arrays, or refs to them."""

    result: Array  # The parameters; without them the gradients, which updates replace.
    mu: Array
    mu_scale: Array
    nu: Array
    nu_scale: Array
    nu_exponent: Array


class _Factors(NamedTuple):
    """What the kernel multiplies with.

    It carries m = ratio * mu, for a ratio that lets the gradient enter both moments as
    h = sqrt(1 - b2) * g.
    """

    gradient: Array  # sqrt(1 - b2): g to h.
    log2_mu: Array  # From log2(cbrt(c) * sqrt(b2 * nu)) to log2(b1 * m).
    log2_root: Array  # log2(sqrt(b2)).
    unit: Array  # 1 / ratio: m to mu.
    numerator: Array  # m to the update times its denominator.
    lookahead: Array  # h's share in the numerator, with Nesterov momentum.
    denominator: Array  # sqrt(nu) to the update's denominator.
    eps_root: Array
    eps: Array
    keep: Array  # 1 - learning_rate * decay.


def _factors(s: AdamScalars, with_params: bool) -> Float[Array, " factors"]:
    s = AdamScalars(*(jnp.asarray(x, jnp.float32) for x in s))
    step = s.learning_rate if with_params else 1.0
    gradient = jnp.sqrt(1 - s.b2)
    unit = (1 - s.b1) / gradient
    root = jnp.sqrt(jnp.maximum(s.b2, _TINY))
    factors = _Factors(
        gradient=gradient,
        log2_mu=jnp.log2(s.b1 / (unit * root)) - _LOG2_MAX / 3,
        log2_root=jnp.log2(root),
        unit=unit,
        numerator=step * s.mu_weight * unit,
        lookahead=s.grad_weight / (s.mu_weight * unit * gradient),
        denominator=jnp.sqrt(s.nu_weight),
        eps_root=s.eps_root,
        eps=s.eps,
        keep=1 - s.learning_rate * s.decay,
    )
    return jnp.stack(factors)


def _is_zero(x: Array | float) -> bool:
    return isinstance(x, int | float) and x == 0


def _mosaic(scalars, grads, moments, params, noise, tuning):
    shape, short = grads.shape, -grads.shape[-1] % GROUP
    result = grads if params is None else params
    big = (result, grads, moments.mu, moments.nu)
    if short:  # Rows of whole groups are one flat array of groups; others are padded.
        widths = [(0, 0)] * (len(shape) - 1) + [(0, short)]
        big = tuple(jnp.pad(x, widths) for x in big)
    result, grads, mu, nu = (x.reshape(-1, GROUP) for x in big)
    scales = (moments.mu_scale, moments.nu_scale, moments.nu_exponent)
    mu_scale, nu_scale, nu_exponent = (x.reshape(-1) for x in scales)
    step = _Step(
        nesterov=not _is_zero(scalars.grad_weight),
        eps_root=not _is_zero(scalars.eps_root),
        with_params=params is not None,
    )
    state = _run(
        step,
        _State(result, mu, mu_scale, nu, nu_scale, nu_exponent),
        grads if step.with_params else None,
        None if noise is None else noise.reshape(-1),
        _factors(scalars, step.with_params),
        tuning,
    )

    def whole(x):
        return x.reshape(*shape[:-1], -1)[..., : shape[-1]]

    moments = Moments(
        mu=whole(state.mu),
        mu_scale=state.mu_scale.reshape(moments.mu_scale.shape),
        nu=whole(state.nu),
        nu_scale=state.nu_scale.reshape(moments.nu_scale.shape),
        nu_exponent=state.nu_exponent.reshape(moments.nu_exponent.shape),
    )
    return whole(state.result), moments


# Jitted, so that a model's many parameters of one shape are compiled once.
@functools.partial(jax.jit, static_argnames=("step", "tuning"))
def _run(step, state, grads, noise, factors, tuning) -> _State:
    """Updates the state in place: as refs it aliases the kernel's outputs."""
    groups = state.mu.shape[0]
    tiles, rest = divmod(groups, _TILE)
    tiles -= rest > 0
    refs = _State(*(jax.new_ref(x) for x in state))
    reads = [x for x in (grads, noise) if x is not None]

    def kernel(body, ctas):
        return plgpu.kernel(
            body,
            out_type=(),
            grid=(ctas,),
            grid_names=("cta",),
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                lowering_semantics=plgpu.LoweringSemantics.Lane,
                # A lane writes what it has read itself, and nothing else.
                unsafe_no_auto_barriers=True,
            ),
        )

    def split(args):
        refs, reads, factors = _State(*args[:6]), list(args[6:-1]), args[-1]
        factors = _Factors(*(factors[j] for j in range(len(_Factors._fields))))
        grads = reads.pop(0) if step.with_params else None
        return refs, grads, reads.pop() if reads else None, factors

    if tiles:
        steps = -(-tiles // tuning.tiles)
        ctas = min(steps, tuning.ctas * tuning.sms)
        kernel(lambda *args: _pipeline(step, *split(args), tiles, ctas, tuning), ctas)(
            *refs, *reads, factors
        )
    if rest:
        kernel(lambda *args: _tail(step, *split(args), groups), 1)(
            *refs, *reads, factors
        )
    return _State(*(jax.freeze(r) for r in refs))


def _pipeline(step, refs, grads, noise, factors, tiles, ctas, tuning) -> None:
    """Strides over blocks of tiles, the next ones' loads ahead; stores are direct."""
    block = tuning.tiles * _TILE
    blocks = -(-tiles // tuning.tiles)
    cta = lax.axis_index("cta")
    inputs = [refs.result, refs.mu, refs.nu] + ([] if grads is None else [grads])
    per_group = [refs.mu_scale, refs.nu_scale, refs.nu_exponent]
    per_group += [] if noise is None else [noise]

    def width(ref):  # The copy engine writes 128 bytes or more.
        return max(block, 128 // jnp.dtype(ref.dtype).itemsize)

    def group_spec(width):
        return pl.BlockSpec(
            (width,), lambda j: (lax.div((cta + j * ctas) * block, width),)
        )

    def body(indices, *smem):
        start = (cta + indices[0] * ctas) * block
        for tile in range(tuning.tiles):
            rows = pl.ds(tile * _TILE, _TILE)
            arrays = [functools.partial(_load, s, rows) for s in smem[: len(inputs)]]
            scalars = []
            for s, r in zip(smem[len(inputs) :], per_group, strict=True):
                at = pl.ds(lax.rem(start, width(r)) + tile * _TILE, _TILE)
                scalars.append(functools.partial(_load, s, at, _PER_GROUP))
            if tile == tuning.tiles - 1:
                # All warps have to have read the stage before it is filled again; to
                # wait after the stores would be to wait for the stores.
                arrays, scalars = (_now(loads) for loads in (arrays, scalars))
                plgpu.commit_smem()
            values = _Loads.of(arrays, scalars, grads, noise)
            at = start + tile * _TILE
            update = functools.partial(
                step.tile, refs, pl.ds(at, _TILE), factors, values
            )
            if tiles % tuning.tiles:
                pl.when(at < tiles * _TILE)(update)
            else:
                update()

    specs = [pl.BlockSpec((block, GROUP), lambda j: (cta + j * ctas, 0))] * len(inputs)
    specs += [group_spec(width(r)) for r in per_group]
    plgpu.emit_pipeline(
        body,
        grid=((blocks - cta + ctas - 1) // ctas,),
        in_specs=specs,
        out_specs=[],
        max_concurrent_steps=tuning.stages,
    )(*inputs, *per_group)


def _tail(step, refs, grads, noise, factors, groups: int) -> None:
    """The last full tile and the groups behind it, as two tiles that overlap.

    Both are read before either is written; what they share, both write alike.
    """
    windows = [
        pl.ds(groups // _TILE * _TILE - _TILE, _TILE),
        pl.ds(groups - _TILE, _TILE),
    ]
    values = []
    for rows in windows:
        arrays = [refs.result, refs.mu, refs.nu] + ([] if grads is None else [grads])
        scalars = [refs.mu_scale, refs.nu_scale, refs.nu_exponent]
        scalars += [] if noise is None else [noise]
        arrays = _now(functools.partial(_load, r, rows) for r in arrays)
        scalars = _now(functools.partial(_load, r, rows, _PER_GROUP) for r in scalars)
        values.append(_Loads.of(arrays, scalars, grads, noise))
    for rows, loaded in zip(windows, values, strict=True):
        step.tile(refs, rows, factors, loaded)


class _Loads(NamedTuple):
    """Functions that load a tile's inputs when they are needed."""

    result: Callable[[], Array]
    mu: Callable[[], Array]
    nu: Callable[[], Array]
    grads: Callable[[], Array]
    mu_scale: Callable[[], Array]
    nu_scale: Callable[[], Array]
    nu_exponent: Callable[[], Array]
    noise: Callable[[], Array] | None

    @classmethod
    def of(cls, arrays, scalars, grads, noise):
        gradient = arrays[0] if grads is None else arrays[3]
        return cls(
            *arrays[:3], gradient, *scalars[:3], None if noise is None else scalars[3]
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Step:
    """The arithmetic of a tile, for what is known when the kernel is compiled."""

    nesterov: bool
    eps_root: bool
    with_params: bool

    def tile(self, refs: _State, rows, f: _Factors, loads: _Loads) -> None:
        h = loads.grads().astype(jnp.float32) * f.gradient
        m, root = _decoded(loads, f)
        m, v = m + h, root * root + h * h
        log2_v = jnp.log2(v)
        # At most the root of the smallest normal number, inverted: what is below is 0.
        q = jnp.exp2(jnp.minimum(log2_v * -0.5, 63.0))
        refs.result[rows] = self._result(h, m, v, q, f, loads, refs.result.dtype)
        codes, scale = _encoded_ratio(m * q, f)
        refs.mu[rows], refs.mu_scale[rows] = codes, scale
        codes, scale, k = _encoded_nu(v, log2_v)
        refs.nu[rows], refs.nu_scale[rows], refs.nu_exponent[rows] = codes, scale, k

    def _result(self, h, m, v, q, f, loads, dtype):
        numerator = m
        if self.nesterov:
            numerator = m + h * f.lookahead
        if self.eps_root:  # Only 0 lets the reciprocal root q serve here.
            square = v * (f.denominator * f.denominator) + f.eps_root
            denominator = jnp.exp2(jnp.log2(square) * 0.5) + f.eps
        else:
            numerator, denominator = numerator * q, q * f.eps + f.denominator
        update = numerator * _reciprocal(denominator) * f.numerator
        if not self.with_params:
            return update.astype(dtype)
        p = loads.result().astype(jnp.float32) * f.keep - update
        if loads.noise is None or dtype != jnp.bfloat16:
            return p.astype(dtype)
        return _stochastic(p, loads.noise())


def _decoded(loads: _Loads, f: _Factors) -> tuple[Array, Array]:
    """The carried b1 * m, and the root of b2 * nu."""
    half_root = 8.0 / _float32(loads.nu_exponent())
    log2_top = jnp.log2(_float32(loads.nu_scale())) + _LOG2_MAX
    base = 0.5 * log2_top + f.log2_root - _LOG2_MAX * half_root
    c = _float32(loads.nu())
    log2_root = jnp.log2(c) * _spread(half_root) + _spread(base)
    base = jnp.log2(_float32(loads.mu_scale())) + (_LOG2_MAX + f.log2_mu)
    c = _float32(loads.mu())
    log2_m = jnp.log2(jnp.abs(c)) * (1 / 3) + (log2_root + _spread(base))
    return _with_sign(jnp.exp2(log2_m), c), jnp.exp2(log2_root)


def _encoded_ratio(r: Array, f: _Factors) -> tuple[Array, Array]:
    scale = _scale(jnp.max(jnp.abs(r), axis=1) * (f.unit * (1 / 448)))
    unit = f.unit * 448 ** (1 / 3 - 1)
    t = r * _spread(unit / _float32(scale))
    return (t * t * t).astype(jnp.float8_e4m3fn), scale


def _encoded_nu(v: Array, log2_v: Array) -> tuple[Array, Array, Array]:
    scale = _scale(jnp.max(v, axis=1) * (1 / 448))
    log2_top = jnp.log2(_float32(scale)) + _LOG2_MAX
    # What is below the first normal number wraps around, and is never the smallest.
    normal = jnp.uint32(0x00800000)
    smallest = _floats(jnp.min(_bits(v) - normal, axis=1) + normal)
    octaves = log2_top - jnp.log2(smallest)
    k = jnp.clip(_LOG2_RANGE / jnp.maximum(octaves, 1e-3), 1.0, 255.0)
    k = jnp.where(octaves < 1e30, k, 255.0).astype(jnp.int32)
    power = k.astype(jnp.float32) * (1 / 16)
    codes = jnp.exp2(log2_v * _spread(power) + _spread(_LOG2_MAX - power * log2_top))
    return codes.astype(jnp.float8_e4m3fn), scale, k.astype(jnp.uint8)


def _scale(x: Array) -> Array:
    """The stored scale; NaN for infinity too."""
    return (jnp.clip(x, _TINY, 2.0**119) + x * 0.0).astype(jnp.bfloat16)


def _stochastic(p: Array, noise: Array) -> Array:
    j = plgpu.layout_cast(lax.broadcasted_iota(jnp.uint32, p.shape, 1), _LAYOUT)
    up = reference.hash32(_spread(noise) + j) >> jnp.uint32(16)
    rounded = _floats((_bits(p) + up) & jnp.uint32(0xFFFF0000))
    return jnp.where(jnp.abs(p) < jnp.inf, rounded, p).astype(jnp.bfloat16)


def _load(ref, rows, layout=_LAYOUT) -> Array:
    return plgpu.load(ref.at[rows], layout=layout, optimized=False)


def _now(loads: Iterable[Callable[[], Array]]) -> list[Callable[[], Array]]:
    """Loads at once, for functions that only return what they loaded."""
    return [functools.partial(lambda x: x, load()) for load in loads]


def _spread(x: Array) -> Array:
    """One number a group to its elements."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (_TILE, GROUP), (0,)), _LAYOUT)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _floats(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.float32)


def _with_sign(magnitude: Array, x: Array) -> Array:
    return _floats(_bits(magnitude) | (_bits(x) & jnp.uint32(0x80000000)))


def _float32(x: Array) -> Array:
    wide = x.astype(jnp.int32) if x.dtype == jnp.uint8 else x
    return wide.astype(jnp.float32)


def _reciprocal(x: Array) -> Array:
    """1 / x for positive x to 7e-6, off the special function unit.

    The bits' difference is a first guess to 5%; with its error e, 1 / (1 - e) follows.
    """
    guess = _floats(jnp.uint32(0x7EF31000) - _bits(x))
    e = 1.0 - x * guess
    return guess + guess * (e + e * (e + e * e))
