"""Tests the kernel that applies RoPE's inverse, joins heads and quantizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.kernels import (
    BF16,
    E4M3,
    E5M2,
    F32,
    assert_identical,
    every_implementation,
    every_kernel,
    numbers,
    run,
    run_each,
)
from helpers.marks import slow

import pallas_kernels as pk

SCALE = 2.0**-3


def angles(length, half, seed=0):
    angle = np.random.default_rng(seed).uniform(-300, 300, (length, half))
    return jnp.asarray(np.cos(angle), F32), jnp.asarray(np.sin(angle), F32)


def heads(b, s, n, m, d, dtype=BF16):
    shapes = ((b, s, n, d), (b, s, m, d), (b, s, m, d))
    return [numbers(shape, dtype, seed=i) for i, shape in enumerate(shapes)]


def joined(q, k, v, cos, sin) -> np.ndarray:
    """Undoes RoPE and joins heads, in float64, with halves as complex numbers."""
    turn = np.asarray(cos, np.float64) - 1j * np.asarray(sin, np.float64)

    def turned(x):
        first, second = np.split(np.asarray(x).astype(np.float64), 2, axis=-1)
        z = (first + 1j * second) * turn[..., None, :]
        return np.concatenate([z.real, z.imag], axis=-1)

    b, s, m, _ = k.shape
    q, k, v = turned(q), turned(k), np.asarray(v).astype(np.float64)
    group = q.shape[2] // m
    every = []
    for head in range(m):
        every += [q[:, :, head * group + i] for i in range(group)]
        every += [k[:, :, head], v[:, :, head]]
    return np.stack(every, axis=2).reshape(b, s, -1)


@every_implementation
@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 128, 4, 2, 64), E4M3), slow((1, 256, 3, 1, 32), E5M2)]
)
def test_heads_are_joined(implementation, shape, dtype):
    arrays = [*heads(*shape), *angles(shape[1], shape[-1] // 2)]
    join = functools.partial(pk.join_heads, dtype=dtype)
    out = run(implementation, join, *arrays, jnp.float32(SCALE))
    largest = float(jnp.finfo(dtype).max)
    expected = np.clip(joined(*arrays) / SCALE, -largest, largest)
    codes = np.asarray(out.row).astype(np.float64)
    # The error is half a step plus float32's rounding.
    step = 2.0 ** -jnp.finfo(dtype).nmant
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    np.testing.assert_allclose(
        codes, expected, rtol=step / 2 * 1.001, atol=smallest * 0.501
    )
    assert_identical(out.transposed, np.asarray(out.row).reshape(-1, codes.shape[-1]).T)


@every_implementation
def test_sequences_have_positions_of_their_own(implementation):
    b, s, half = 2, 128, 32
    tables = [x.reshape(b, s, half) for x in angles(b * s, half)]
    arrays = [*heads(b, s, 2, 1, 2 * half), *tables]
    out = run(implementation, pk.join_heads, *arrays, jnp.float32(SCALE))
    expected = joined(*arrays) / SCALE
    np.testing.assert_allclose(
        np.asarray(out.row).astype(np.float64), expected, rtol=0.126, atol=2**-16
    )


@every_implementation
def test_largest_of_what_is_joined(implementation):
    q, k, v = heads(2, 128, 2, 1, 64)
    tables = *angles(128, 32), jnp.float32(SCALE)
    join = functools.partial(pk.join_heads, keep_maxima=True)
    calls = [
        (q.at[0, 5, 1, 3].set(3e4), k, v, *tables),
        (q, k, v.at[1, 127, 0, 40].set(-3e4), *tables),
    ]
    for call, out in zip(calls, run_each(implementation, join, *calls), strict=True):
        expected = np.abs(joined(*call[:-1])).max()
        np.testing.assert_allclose(np.max(out.largest), expected, rtol=1e-6)


def test_no_races():
    arrays = [*heads(1, 256, 2, 1, 32), *angles(256, 16), jnp.float32(SCALE)]
    run("interpret", pk.join_heads, *arrays, detect_races=True)


@every_kernel
def test_under_vmap(implementation):
    arrays = [heads(1, 128, 2, 1, 32), heads(1, 128, 2, 1, 32)]
    stacked = [jnp.stack(pair) for pair in zip(*arrays, strict=True)]
    tables = angles(128, 16)

    def join(*heads, implementation):
        one = functools.partial(pk.join_heads, implementation=implementation)
        return jax.vmap(lambda q, k, v: one(q, k, v, *tables, jnp.float32(SCALE)))(
            *heads
        )

    out = run(implementation, join, *stacked)
    calls = ((*one, *tables, jnp.float32(SCALE)) for one in arrays)
    for i, alone in enumerate(run_each(implementation, pk.join_heads, *calls)):
        assert_identical(jax.tree.map(lambda x, i=i: x[i], out), alone)


def test_what_does_not_fit_is_named():
    q, k, v = heads(1, 128, 4, 2, 32)
    cos, sin = angles(128, 16)
    one = jnp.float32(1)
    with pytest.raises(ValueError, match=r"n a multiple of m, got .*3, 32"):
        pk.join_heads(q[:, :, :3], k, v, cos, sin, one)
    with pytest.raises(
        ValueError, match=r"angles must be \(128, 16\) or .*, got \(64, 16"
    ):
        pk.join_heads(q, k, v, cos[:64], sin[:64], one)
    with pytest.raises(ValueError, match=r"codes must be .* got bfloat16"):
        pk.join_heads(q, k, v, cos, sin, one, dtype=BF16)
    for arrays, reason in (
        ((q[:, :100], k[:, :100], v[:, :100], cos[:100], sin[:100]), "got 100"),
        ((q, k.astype(F32), v, cos, sin), "bfloat16, got float32"),
        ((*(x[..., :24] for x in (q, k, v)), cos[:, :12], sin[:, :12]), "got 24"),
    ):
        with pytest.raises(ValueError, match=f"the kernel cannot run: .*{reason}"):
            pk.join_heads(*arrays, one, implementation="mosaic")
