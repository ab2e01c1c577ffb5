"""Tests attention and its gradients: soft caps, windows, segments, shared keys."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention import interpreted, oracle

import coat_jax as coat
import pallas_kernels as pk
from coat_jax.layers.attention import Scores, causal_attention
from experiments.bench.compile_case import for_hopper
from pallas_kernels.dispatch import devices
from pallas_kernels.ops.attention import api, plan

BF16 = jnp.bfloat16
MOSAIC = {"implementation": "mosaic"}
SCALE = 0.2  # Scores are as large as the soft caps.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The arrays and options of a call of attention.

    Attributes:
      d: The size of a head.
      s: The length of a sequence.
      b: The number of sequences.
      n: The number of query heads.
      m: The number of key heads.
      softcap: The soft cap of scores.
      causal: Whether attention is causal.
      window: The size of the window.
      packed: Whether there are segment ids.
      large: A factor of the queries.
    """

    d: int = 128
    s: int = 128
    b: int = 1
    n: int = 2
    m: int = 1
    softcap: float | None = None
    causal: bool = True
    window: int | None = None
    packed: bool = False
    large: float = 1.0

    def arrays(self):
        rng = np.random.default_rng(self.d + self.s)
        shapes = [(self.b, self.s, heads, self.d) for heads in (self.n, self.m)]
        draws = [rng.standard_normal(shapes[i]) for i in (0, 1, 1, 0)]
        draws[0] *= self.large
        return [jnp.asarray(x, BF16) for x in draws]

    @property
    def ids(self):
        """Segment ids that are not sorted, so that no tile is skipped by accident."""
        if not self.packed:
            return None
        rng = np.random.default_rng(1)
        lengths = rng.integers(1, 90, (self.b, self.s))
        ids = [np.repeat(rng.permutation(self.s), row)[: self.s] for row in lengths]
        return np.stack(ids).astype(np.int32)

    def expected(self):
        masks = {"causal": self.causal, "window": self.window, "ids": self.ids}
        arrays = self.arrays()
        return oracle(*arrays, scale=SCALE, softcap=self.softcap, **masks)

    def run(self, implementation, dtype=BF16):
        masks = {
            "causal": self.causal,
            "window": self.window,
            "segment_ids": self.ids,
            "implementation": implementation,
        }
        options = masks | {"scale": SCALE, "softcap": self.softcap}

        arrays = [x.astype(dtype) for x in self.arrays()]

        def passes(q, k, v, do):
            out, lse = pk.attention(q, k, v, **options)
            return out, lse, *pk.attention_grad(do, q, k, v, out, lse, **options)

        return jax.block_until_ready(jax.jit(passes)(*arrays))


def assert_near(actual, expected, bound):
    for x, y in zip(actual, expected, strict=True):
        x = np.asarray(x, np.float64)
        assert x.shape == y.shape
        # Keys that count alone have gradients of 0.
        least = 1e-6 * np.sqrt(y.size)
        assert np.linalg.norm(x - y) <= bound * np.linalg.norm(y) + least


CASES = {
    "causal": Case(),
    "gemma 2": Case(d=256, softcap=50.0, window=50),
    "small": Case(d=64, softcap=50.0, window=50, n=1),
    "longer": Case(d=256, softcap=50.0, window=100, s=384, n=4, m=2),
    "packed": Case(softcap=30.0, packed=True, s=256),
    "small heads": Case(d=64, causal=False, window=70, s=256, n=3, m=3),
    "large cap": Case(softcap=200.0, large=40.0),
    "saturated": Case(softcap=50.0, large=400.0),
    "no keys in common": Case(d=64, packed=True, window=1, b=2),
}


def some(*names):
    """Returns the names of all cases, marked as slow except `names`."""
    return [
        name if name in names else pytest.param(name, marks=pytest.mark.slow)
        for name in CASES
    ]


@pytest.mark.parametrize("name", some("packed"))
def test_the_definition_is_attention(name):
    case = CASES[name]
    # Scores are float32 sums, with errors in proportion to the queries.
    bound = 5e-7 * max(40.0, case.large)
    assert_near(case.run("reference", jnp.float32), case.expected(), bound)


@pytest.mark.parametrize("name", some("small"))
def test_kernels_compute_attention(name, monkeypatch):
    with interpreted(monkeypatch, detect_races=name in ("longer", "packed")):
        actual = CASES[name].run("mosaic")
    assert_near(actual, CASES[name].expected(), 8e-3)


@pytest.mark.slow
@pytest.mark.parametrize("local", [None, False, True])
def test_layers_run_the_kernel_for_soft_caps(local, monkeypatch):
    """The backward pass reads the copies of q, k and v that the layer is given."""
    case = Case(d=64, b=2, packed=True)
    scores = Scores(softcap=50.0, window=40, scale=SCALE)
    local_layer = None if local is None else jnp.bool_(local)

    def passes(q, k, v, do):
        def run(q, k, v):
            options = {"scores": scores, "local": local_layer}
            return causal_attention(q, k, v, (q, k, v), case.ids, **options)

        out, vjp = jax.vjp(run, q, k, v)
        return out, *vjp(do)

    monkeypatch.setattr(devices, "has_hopper", lambda: True)
    with interpreted(monkeypatch):
        actual = jax.block_until_ready(jax.jit(passes)(*case.arrays()))
    masks = {"window": None if local is False else 40, "ids": case.ids}
    expected = oracle(*case.arrays(), scale=SCALE, softcap=50.0, **masks)
    assert_near(actual, expected[:1] + expected[2:], 8e-3)


def test_the_kernel_runs_by_default_where_it_can(monkeypatch):
    monkeypatch.setattr(devices, "has_hopper", lambda: True)
    q, odd = (jnp.ones((1, 256, 2, d), BF16) for d in (128, 96))
    (choice,) = pk.explain(pk.attention, q, q, q, implementation=None).choices
    assert choice.implementation == "mosaic"
    assert api.runs_kernel(q, q, q)
    assert not api.runs_kernel(odd, odd, odd, in_place_of_kernel=True)
    (choice,) = pk.explain(partial(api.runs_kernel), odd, odd, odd).choices
    assert choice.reason == "heads must have one of the sizes (64, 128, 256), got 96"


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_attention_on_a_gpu(name):
    case = dataclasses.replace(CASES[name], s=512, b=2)
    assert_near(case.run("mosaic"), case.expected(), 8e-3)


def test_queries_that_attend_to_nothing_have_no_gradients():
    """A device can have queries that attend to none of its keys."""
    q, k, v, do = Case(s=4).arrays()
    none = jnp.full((1, 2, 4), -jnp.inf)
    grads = jax.jit(partial(pk.attention_grad, implementation="reference"))
    for x in grads(do, q, k, v, 0 * q, none):
        assert not np.any(np.asarray(x, np.float32))


def test_spans_of_tiles_are_exact():
    """A span has all tiles with a score that counts, and ends at the outermost ones.

    The ends may be farther out if there are segments and a window.
    """
    tiles = plan.Tiles(queries=4, keys=8)
    rng = np.random.default_rng(0)
    for trial in range(8):
        causal, packed = trial % 2 == 0, trial % 4 < 2
        window = int(rng.integers(1, 40)) if trial % 3 else None
        ids = np.sort(rng.integers(0, 4, (1, 32)))[:, ::-1].copy() if packed else None
        scoring = plan.Scoring(
            scale=1.0,
            softcap=None,
            causal=causal,
            windowed=window is not None,
            segmented=packed,
        )
        i, j = np.arange(32)[:, None], np.arange(32)
        counts = (j <= i) | (not causal)
        counts &= (abs(i - j) < window) if window is not None else True
        counts &= (ids[0][:, None] == ids[0]) if packed else True
        counts = counts.reshape(8, 4, 4, 8).any((1, 3))
        arrays = jnp.array([window or 0]), None if ids is None else jnp.asarray(ids)
        for spans, of in (
            (plan.spans_of_keys(scoring, 32, tiles, *arrays), counts),
            (plan.spans_of_queries(scoring, 32, tiles, *arrays), counts.T),
        ):
            for (first, end), row in zip(np.asarray(spans)[0], of, strict=True):
                at = np.flatnonzero(row)
                assert first <= at[0]
                assert end > at[-1]
                if not packed or not window:
                    assert (first, end) == (at[0], at[-1] + 1)


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ({}, {"softcap": 0.0}, "softcap must be positive"),
        ({}, {"scale": float("nan")}, "scale must be positive"),
        ({}, {"window": 0}, "window must be a positive int, got 0"),
        ({}, {"window": np.int64(0)}, "window must be a positive int"),
        ({}, {"window": 2.5}, "window must be a positive int, got 2.5"),
        ({}, {"window": jnp.float32(2)}, r"an integer scalar, got float32\[\]"),
        ({}, {"window": jnp.ones(2, int)}, r"an integer scalar, got int32\[2\]"),
        ({}, {"segment_ids": np.zeros((1, 3), np.int32)}, "segment ids must be"),
        ({}, MOSAIC, "positions must be a multiple of 128, got 4"),
        ({"s": 192}, MOSAIC, "positions must be a multiple of 128, got 192"),
        ({"s": 128, "d": 96}, MOSAIC, "heads must have one of the sizes"),
    ],
)
def test_what_does_not_fit_is_refused(case, options, message):
    q, k, v, _ = Case(**{"s": 4} | case).arrays()
    with pytest.raises(ValueError, match=message):
        pk.attention(q, k, v, **options)


def test_windows_of_any_integers_are_windows():
    q, k, v, _ = Case(s=256).arrays()
    expected, _ = pk.attention(q, k, v, window=100)
    for window in (jnp.int8(100), jnp.uint8(100), np.int16(100)):
        np.testing.assert_array_equal(pk.attention(q, k, v, window=window)[0], expected)
    whole, _ = pk.attention(q, k, v, window=2**40)
    np.testing.assert_array_equal(pk.attention(q, k, v)[0], whole)


def test_kernels_take_bfloat16():
    q, k, v = (x.astype(jnp.float32) for x in Case().arrays()[:3])
    with pytest.raises(ValueError, match="queries must be bfloat16, got float32"):
        pk.attention(q, k, v, **MOSAIC)


def _layer(weights, x):
    ids = jnp.repeat(jnp.arange(4), 256)[None].repeat(2, 0)
    q, k, v = ((x @ w).reshape(2, 1024, 4, 128) for w in weights[:3])
    o = coat.attention(q, k, v, softcap=30.0, segment_ids=ids)
    return x + o.reshape(x.shape) @ weights[3]


@pytest.mark.parametrize("rerun", [False, True])
def test_fp8_remat_saves_what_kernels_read_with_statistics(rerun):
    """The residuals are exact, or attention runs again on copies of q, k and v."""
    weights = [jax.ShapeDtypeStruct((512, 512), BF16)] * 4
    x = jax.ShapeDtypeStruct((2, 1024, 512), BF16)
    with for_hopper():
        light = coat.fp8_remat(_layer, rerun_attention=rerun)
        rows = coat.residual_report(light, weights, x).rows
    heads = [row.dtype for row in rows if row.shape == (2, 1024, 4, 128)]
    assert heads == ([jnp.float8_e4m3fn] * 3 if rerun else [BF16] * 4)
    statistics = [row.kept for row in rows if row.shape == (2, 4, 1024)]
    assert statistics == ([] if rerun else ["wide, float32 statistics of a kernel"])


@pytest.mark.gpu
@pytest.mark.parametrize(("rerun", "bound"), [(False, 0.06), (True, 0.1)])
def test_gradients_under_fp8_remat_on_a_gpu(rerun, bound):
    """Attention saves exact residuals, or runs again on copies of q, k and v."""
    keys = jax.random.split(jax.random.key(0), 5)
    weights = [jax.random.normal(key, (512, 512), BF16) / 24 for key in keys[:4]]
    x = jax.random.normal(keys[4], (2, 1024, 512), BF16)

    def gradients(fn):
        def loss(weights, x):
            return jnp.sum(jnp.sin(fn(weights, x).astype(jnp.float32)))

        return jax.jit(jax.grad(loss))(weights, x)

    actual = gradients(coat.fp8_remat(_layer, rerun_attention=rerun))
    for a, b in zip(actual, gradients(_layer), strict=True):
        a, b = (np.asarray(g, np.float64) for g in (a, b))
        assert np.linalg.norm(a - b) < bound * np.linalg.norm(b)
