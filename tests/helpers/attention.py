"""An oracle of attention, and a way to interpret its kernels on a CPU."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.ops.attention import forward


def oracle(q, k, v, do, *, scale, softcap=None, causal=True, window=None, ids=None):
    """Returns output, log-sum-exp and gradients of q, k and v, in float64."""
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    (b, s, n, _), m = q.shape, k.shape[2]
    k, v = (np.repeat(x, n // m, axis=2) for x in (k, v))
    scores = scale * np.einsum("bind,bjnd->bnij", q, k)
    slope = np.ones_like(scores)
    if softcap is not None:
        slope = 1 - np.tanh(scores / softcap) ** 2
        scores = softcap * np.tanh(scores / softcap)
    i, j = np.arange(s)[:, None], np.arange(s)
    counts = np.ones((b, 1, s, s), bool)
    counts &= (j <= i) | (not causal)
    if window is not None:
        counts &= abs(i - j) < window
    if ids is not None:
        counts &= (ids[:, :, None] == ids[:, None])[:, None]
    weights = np.where(counts, np.exp(scores), 0)
    total = weights.sum(-1)
    p = weights / total[..., None]
    dp = np.einsum("bind,bjnd->bnij", do, v)
    ds = scale * slope * p * (dp - (p * dp).sum(-1, keepdims=True))

    def of_keys(x):
        return x.reshape(b, s, m, n // m, -1).sum(3)

    return (
        np.einsum("bnij,bjnd->bind", p, v),
        np.log(total),
        np.einsum("bnij,bjnd->bind", ds, k),
        of_keys(np.einsum("bnij,bind->bjnd", ds, q)),
        of_keys(np.einsum("bnij,bind->bjnd", p, do)),
    )


@contextlib.contextmanager
def interpreted(monkeypatch, *, detect_races=False):
    """Runs the kernels on the CPU in this context.

    JAX does not interpret matmuls with an operand in registers or with an initial value
    of the accumulator. In this context these operands are stored in shared memory
    first, and products are added to the initial value.
    """
    launch, multiply, staged = mosaic.kernel, plgpu.wgmma, []

    def kernel(body, *, scratch_types, **options):
        def run(*refs, stage, **scratch):
            staged.append(stage)
            body(*refs, **scratch)
            staged.pop()

        stage = plgpu.SMEM((2, 64, 128), jnp.bfloat16)
        scratch_types = {**scratch_types, "stage": stage}
        return launch(run, scratch_types=scratch_types, **options)

    def wgmma(acc, a, b):
        if isinstance(a, jax.Array):
            warpgroup = lax.axis_index("warpgroup")
            rows, columns = (pl.ds(0, size) for size in a.shape)
            stage = staged[-1].at[warpgroup, rows, columns]
            stage[...] = a
            a = stage
        multiply(acc, a, b)

    def accumulated(first, multiply):
        def products(acc):
            multiply(acc)
            return acc[...]

        return first + pl.run_scoped(products, plgpu.ACC(first.shape, jnp.float32))

    with monkeypatch.context() as patch:
        patch.setattr(mosaic, "kernel", kernel)
        patch.setattr(plgpu, "wgmma", wgmma)
        patch.setattr(forward, "accumulated", accumulated)
        params = plgpu.InterpretGPUParams(detect_races=detect_races)
        jax.clear_caches()
        with plgpu.force_gpu_interpret_mode(params):
            yield
        jax.clear_caches()
