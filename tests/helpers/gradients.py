"""Oracles for backward passes, which share nothing with `coat_jax`.

`fake` quantizes and dequantizes in NumPy. `saved` lists the residuals of `jax.vjp` from
the program that computes them.
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
ROW = 128  # The group size of arrays that only matmuls read, where rows are no longer.


def flat(tree) -> np.ndarray:
    """Returns all leaves in one float64 vector."""
    leaves = [np.asarray(x).astype(np.float64).ravel() for x in jax.tree.leaves(tree)]
    return np.concatenate(leaves)


def cosine(a, b) -> float:
    """Returns the cosine between two trees of one structure, each taken as a vector."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    a, b = flat(a), flat(b)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def assert_close(actual, expected, tolerance: float):
    """Asserts that every leaf is within `tolerance` times the expected leaf's amax."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def distances(actual, expected) -> list[float]:
    """Returns the norm of each array's error, relative to the expected array's norm."""
    pairs = zip(*map(jax.tree.leaves, (actual, expected)), strict=True)
    wide = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs]
    return [float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in wide]


def compiled(fn, *args):
    """Returns `fn(*args)` under jit, compiled quickly rather than well."""
    options = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
    return jax.jit(fn).lower(*args).compile(options)(*args)


def value_and_vjp(fn, dy, *args):
    """Returns `fn(*args)` and the gradients of all arguments for the cotangent `dy`."""

    def run(dy, *args):
        y, vjp = jax.vjp(fn, *args)
        return y, vjp(dy)

    return compiled(run, dy, *args)


def fake(x, group: int | None = None, format: oracle.Format = oracle.E4M3):
    """Quantizes per group, or per tensor if `group` is None, and dequantizes."""
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
    """Returns the bytes of FP8 codes and scales: 2 per group, or 4 for a tensor."""
    if group is None:
        return math.prod(shape) + 4
    return math.prod(shape) + 2 * math.prod(shape[:-1]) * math.ceil(shape[-1] / group)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A residual of `jax.vjp`.

    Attributes:
      shape: The shape.
      dtype: The dtype.
      argument: The index of the argument leaf that the residual is, or None.
      from_activations: Whether the residual depends on arguments besides parameters;
        False if `saved` is not told which are parameters.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    argument: int | None
    from_activations: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def saved(fn, *args, params: int | None = None) -> list[Saved]:
    """Lists the residuals of `jax.vjp(fn, *args)`, each array once.

    `params` is the number of leading leaves of `args` that are parameters.
    """

    def residuals(*args):
        return jax.tree.leaves(jax.vjp(fn, *args)[1])

    jaxpr = jax.make_jaxpr(residuals)(*args).jaxpr
    active = set(jaxpr.invars[params:] if params is not None else ())
    for eqn in jaxpr.eqns:
        if any(v in active for v in eqn.invars if not hasattr(v, "val")):
            active.update(eqn.outvars)
    actual = dict.fromkeys(v for v in jaxpr.outvars if not hasattr(v, "val"))
    invars = {v: i for i, v in enumerate(jaxpr.invars)}
    return [
        Saved(v.aval.shape, v.aval.dtype, invars.get(v), v in active) for v in actual
    ]


def saved_bytes(residuals: list[Saved]) -> int:
    """Returns the bytes of residuals that are not arguments of the function."""
    return sum(r.nbytes for r in residuals if r.argument is None)
