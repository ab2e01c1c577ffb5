"""Oracles for backward passes. Nothing here is shared with `coat_jax`.

`fake` is quantization and back again in NumPy, `saved` lists what `jax.vjp` keeps, from
the program that computes it.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from helpers import oracle

FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
GROUP = 16
ROW = 128  # Groups that only products read, where rows are no longer.


def flat(tree) -> np.ndarray:
    """All leaves in one float64 vector."""
    leaves = [np.asarray(x).astype(np.float64).ravel() for x in jax.tree.leaves(tree)]
    return np.concatenate(leaves)


def cosine(a, b) -> float:
    """Of the angle between two trees of one structure, as one vector each."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    a, b = flat(a), flat(b)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def assert_close(actual, expected, tolerance: float):
    """Every leaf is within `tolerance` of the expected one's largest magnitude."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def compiled(fn, *args):
    """`fn(*args)` under jit, compiled quickly rather than well."""
    options = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
    return jax.jit(fn).lower(*args).compile(options)(*args)


def value_and_vjp(fn, dy, *args):
    """`fn(*args)` and the gradients of all arguments for the cotangent `dy`."""

    def run(dy, *args):
        y, vjp = jax.vjp(fn, *args)
        return y, vjp(dy)

    return compiled(run, dy, *args)


def fake(x, group: int | None = None, format: oracle.Format = oracle.E4M3):
    """What comes back after quantization per group, or per tensor without one."""
    x = np.asarray(x)
    if group is None:
        scales, values = oracle.quantize(x, format, None)
        return (values * next(iter(scales.values()))).astype(x.dtype)
    short = -x.shape[-1] % group
    wide = np.pad(x.astype(np.float32), [(0, 0)] * (x.ndim - 1) + [(0, short)])
    wide = wide.reshape(*x.shape[:-1], -1, group)
    largest = np.abs(wide).max(axis=-1, keepdims=True)
    scale = (largest * np.float32(1 / format.max)).astype(ml_dtypes.bfloat16)
    scale = np.maximum(scale.astype(np.float32), np.float32(oracle.TINY))
    back = format.round(wide * (1 / scale)) * scale
    return back.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]].astype(x.dtype)


def fp8_bytes(shape: tuple[int, ...], group: int | None = GROUP) -> int:
    """Codes, and two bytes a group or four for the tensor."""
    if group is None:
        return math.prod(shape) + 4
    return math.prod(shape) + 2 * math.prod(shape[:-1]) * math.ceil(shape[-1] / group)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A residual: what it is, whether it is an argument, and what it follows from."""

    shape: tuple[int, ...]
    dtype: np.dtype
    argument: int | None
    from_activations: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def saved(fn, *args, params: int | None = None) -> list[Saved]:
    """What `jax.vjp(fn, *args)` saves, each array once.

    `params` is the number of leading leaves of `args` that are parameters.
    """

    def residuals(*args):
        return jax.tree.leaves(jax.vjp(fn, *args)[1])

    jaxpr = jax.make_jaxpr(residuals)(*args).jaxpr
    active = set(jaxpr.invars[params:] if params is not None else ())
    for eqn in jaxpr.eqns:
        if any(v in active for v in eqn.invars if not hasattr(v, "val")):
            active.update(eqn.outvars)
    found = dict.fromkeys(v for v in jaxpr.outvars if not hasattr(v, "val"))
    invars = {v: i for i, v in enumerate(jaxpr.invars)}
    return [
        Saved(v.aval.shape, v.aval.dtype, invars.get(v), v in active) for v in found
    ]


def saved_bytes(residuals: list[Saved]) -> int:
    """Bytes of all that is no argument: what exists only for the backward pass."""
    return sum(r.nbytes for r in residuals if r.argument is None)
