"""Compares random programs under `fp8_remat` with the same programs without FP8.

The oracle is JAX itself: the program with `jax.lax.dot_general` in float32. A program
with an error beyond the bound can be ill-conditioned. To test this, the oracle's
matmuls and softmaxes get random errors as large as the rounding errors of codes. The
program is ill-conditioned if the oracle's error is then at least a sixth of the
program's.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

import coat_jax as coat
from experiments.rewrites.interpreter import interpreted
from experiments.rewrites.programs import Program
from experiments.rewrites.verdicts import Judged

_IS_WIDE = jnp.dtype(jnp.float8_e4m3fn).itemsize > 1
# The largest error relative to an array's norm, and the errors of single codes.
_BOUND, _CODE_ERROR = (0.02, 1e-3) if _IS_WIDE else (0.25, 0.04)
_FACTOR = 6  # Errors up to this times the noisy oracle's are due to the program.
# Gradients that are zero in exact arithmetic consist of rounding errors, so an array's
# root mean square counts as this at least; the gradient of the result has about 1.
_FLOOR = 0.05


def judged(program: Program) -> Judged:
    """Runs a program with and without FP8, and returns the verdict on it.

    The verdict compares results and gradients.
    """
    expected = _run(program.function(_exact, jnp.float32), program, jnp.float32)
    try:
        actual = _run(light(program), program, jnp.bfloat16)
        saved = marked_and_unmarked_bytes(program) if program.counts_bytes else (0, 0)
    except Exception as error:  # A program may fail in any way, which is a finding.
        return Judged("error", said=f"{type(error).__name__}: {error}"[:400])
    names, errors = _errors(actual, expected)
    worst = max(errors)
    if worst <= _BOUND:
        return Judged("within the bound", worst, saved=saved)
    conditions = [0.0] * len(errors)
    for seed in range(3):
        noisy = program.function(
            partial(_noisy, seed, itertools.count()),
            jnp.float32,
            softmax=_softmax_of_copies(seed),
        )
        _, noisy_errors = _errors(_run(noisy, program, jnp.float32), expected)
        conditions = list(map(max, conditions, noisy_errors))
    beyond = {
        name: (error, condition)
        for name, error, condition in zip(names, errors, conditions, strict=True)
        if error > max(_BOUND, _FACTOR * condition)
    }
    if not beyond:
        return Judged("ill-conditioned", worst, max(conditions), saved)
    message = ", ".join(f"{n} {e:.3g} ({c:.2g})" for n, (e, c) in beyond.items())
    return Judged("beyond the bound", worst, max(conditions), saved, message)


def light(program: Program, *, marked: bool = True) -> Callable:
    """Returns a program under `fp8_remat`, with the program's options.

    `marked` is whether the program has its marks.
    """
    policies = jax.checkpoint_policies
    options: dict[str, dict[str, Any]] = {
        "E5M2": {"format": coat.E5M2},
        "group of 32": {"group": 32},
        "where": {"where": lambda residual: residual.shape[-1] % 256 != 0},
        "nothing saveable": {"policy": policies.nothing_saveable},
        "dots saveable": {"policy": policies.dots_saveable},
        "key": {"key": jax.random.key(program.seed)},
    }
    fn = program.function(
        coat.fp8_dot_general, jnp.bfloat16, marked=marked, remat=coat.fp8_remat
    )
    return coat.fp8_remat(fn, **options.get(program.options, {}))


def marked_and_unmarked_bytes(program: Program) -> tuple[int, int]:
    """Returns the bytes that a program saves with its marks, and without them."""
    arguments = program.arguments(jnp.bfloat16)[:3]
    marked, unmarked = (
        _saved_bytes(light(program, marked=marked), *arguments)
        for marked in (True, False)
    )
    return marked, unmarked


def _saved_bytes(fn: Callable, *args: Any) -> int:
    def residuals(params, x, numbers):
        return jax.tree.leaves(jax.vjp(lambda p, x: fn(p, x, numbers), params, x)[1])

    program = jax.make_jaxpr(residuals)(*args).jaxpr
    outputs = {v for v in program.outvars if isinstance(v, core.Var)}
    saved = outputs - {*program.invars}
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in saved)


def _exact(lhs, rhs, dimension_numbers):
    return lax.dot_general(lhs, rhs, dimension_numbers, precision="highest")


def _noisy(seed, calls, lhs, rhs, dimension_numbers):
    """Computes a matmul with random relative errors in its operands and its result.

    The errors depend on `seed` and on the number of the call, which `calls` counts.
    """
    rng = np.random.default_rng((seed, next(calls)))

    def moved(x):
        noise = 1 + _CODE_ERROR * rng.normal(size=x.shape)
        return x * jnp.asarray(noise, x.dtype)

    return moved(_exact(moved(lhs), moved(rhs), dimension_numbers))


def _softmax_of_copies(seed: int) -> Callable[[jax.Array], jax.Array]:
    """Returns a softmax with noisy probabilities in its backward pass.

    The backward pass reads copies of the probabilities with random relative errors,
    like rounded copies. They do not sum to 1, which is a known limit of plain
    attention: gradients of queries have an error relative to the mean of the keys.
    """

    @jax.custom_vjp
    def softmax(x):
        return jax.nn.softmax(x)

    def forward(x):
        y = jax.nn.softmax(x)
        noise = np.random.default_rng(seed).normal(size=y.shape)
        return y, y * jnp.asarray(1 + _CODE_ERROR * noise, y.dtype)

    def backward(y, dy):
        return (y * (dy - jnp.sum(y * dy, axis=-1, keepdims=True)),)

    softmax.defvjp(forward, backward)
    return softmax


def _run(fn: Callable, program: Program, dtype: Any) -> Any:
    """Returns the result of `fn`, and the gradients of parameters and activations."""
    params, x, numbers, dy = program.arguments(dtype)

    def run(params, x, numbers, dy):
        y, pullback = jax.vjp(lambda params, x: fn(params, x, numbers), params, x)
        return {"result": y, "gradient": pullback(dy)}

    return interpreted(run, params, x, numbers, dy)


def _errors(actual: Any, expected: Any) -> tuple[list[str], list[float]]:
    """Returns the paths of all arrays, and each array's error relative to its norm."""
    paths, errors = [], []
    for (path, b), a in zip(
        jax.tree.leaves_with_path(expected), jax.tree.leaves(actual), strict=True
    ):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        paths.append(jax.tree_util.keystr(path))
        if not np.isfinite(b).all():
            errors.append(0.0 if not np.isfinite(a).all() else math.inf)
            continue
        size = max(np.linalg.norm(b), _FLOOR * math.sqrt(b.size))
        error = np.linalg.norm(a - b) / size if size else 0.0
        errors.append(error if math.isfinite(error) else math.inf)
    return paths, errors
