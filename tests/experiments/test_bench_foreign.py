"""Tests the benchmark of layers that others wrote, on tiny ones."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.gradients import saved, saved_bytes
from helpers.marks import slow_except

import coat_jax as coat
from experiments.bench import foreign
from experiments.common.foreign_layers import LAYERS, Layer, Modules
from experiments.common.layer_cases import Shape
from pallas_kernels.dispatch import stand_ins

# Keys and values have 128 columns, since `fp8` leaves smaller matmuls in BF16.
_SHAPE = Shape(hidden=256, seq=32, batch=2, intermediate=256, kv_heads=2, head_dim=64)


@pytest.mark.parametrize("name", slow_except(["llama"], LAYERS))
def test_both_lines_and_the_conversion_save_the_same(name):
    module = LAYERS[name](_SHAPE, Modules(None, nnx.Rngs(0)))
    xs = [
        jax.random.normal(jax.random.key(i), (2, 32, 256), jnp.bfloat16)
        for i in range(module.inputs)
    ]
    assert jax.eval_shape(module, *xs).shape == (2, 32, 256)
    size = {}
    for case in foreign.CASES:
        fn, params = foreign.case_of(name, case, _SHAPE)
        size[case] = saved_bytes(saved(fn, params, *xs, params=len(params)))
    assert size["both"] == size["fp8"] < size["fp8_dot_general"] / 3
    assert size["both"] < 1.05 * size["fp8_remat"]


@pytest.mark.parametrize(
    ("case", "attention"),
    [
        # Queries, keys, values and the output, and a number for each query and head.
        ("both", 2.5 + 1 / 64),
        ("both, attention again", 1.5 * 9 / 16),
    ],
)
def test_on_hopper_a_layer_saves_each_array_once(case, attention, monkeypatch):
    # Copies of two norms' inputs and a gate's two, with a scale for 16 elements.
    expected = attention + (2 + 2 * 3.5) * 9 / 16

    def computed(self, q, k, v, causal=True):
        out = stand_ins.attention(q, k, v)
        return out.reshape(*out.shape[:2], -1)

    monkeypatch.setattr(Layer, "attention", computed)
    shape = Shape(
        hidden=4096, seq=2048, batch=4, intermediate=14_336, kv_heads=8, head_dim=128
    )
    with stand_ins.for_hopper():
        fn, params = foreign.case_of("llama", case, shape)
        report = coat.residual_report(
            lambda params, x: fn(params, -x), params, shape.input()
        )
    np.testing.assert_allclose(report.nbytes / shape.unit, expected, rtol=1e-3)


def test_on_hopper_gemma_2s_attention_is_saved_once():
    """Attention saves queries, keys, values, the output, and the log-sum-exp."""
    shape = Shape(
        hidden=4096, seq=2048, batch=4, intermediate=14_336, kv_heads=8, head_dim=128
    )
    with stand_ins.for_hopper():
        fn, params = foreign.case_of("gemma 2", foreign.OWN, shape)
        report = coat.residual_report(
            lambda params, x: fn(params, -x), params, shape.input()
        )
    # Copies of the stream twice, of the MLP's output before its norm, and of a gate's
    # two inputs, with a scale for 16 elements.
    expected = 2.5 + 1 / 64 + (2 + 1 + 2 * 3.5) * 9 / 16
    np.testing.assert_allclose(report.nbytes / shape.unit, expected, rtol=1e-3)


def test_on_hopper_foreign_layers_save_capped_attention_once():
    """`fp8_remat` treats the residuals of `coat.attention` like cuDNN's."""
    shape = Shape(
        hidden=4096, seq=2048, batch=4, intermediate=14_336, kv_heads=8, head_dim=128
    )
    with stand_ins.for_hopper():
        fn, params = foreign.case_of("gemma 2, coat.attention", "both", shape)
        report = coat.residual_report(
            lambda params, x: fn(params, -x), params, shape.input()
        )
    # Copies of four norms' inputs and of a gate's two, with a scale for 16 elements.
    expected = 2.5 + 1 / 64 + (4 + 2 * 3.5) * 9 / 16
    np.testing.assert_allclose(report.nbytes / shape.unit, expected, rtol=1e-3)


def test_causal_layers_do_not_look_ahead():
    module = LAYERS["llama"](_SHAPE, Modules(coat.fp8_dot_general, nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(0), (1, 32, 256), jnp.bfloat16)
    later = x.at[:, 20:].set(0)
    layer = jax.jit(module)
    first, second = (np.asarray(layer(a), np.float32)[:, :20] for a in (x, later))
    np.testing.assert_allclose(first, second, atol=0.1)


@pytest.mark.parametrize("name", ["qwen", "gemma 2"])
def test_own_layers_have_the_parameters_of_those_they_are_compared_with(name):
    _, params = foreign.case_of(name, "bf16", _SHAPE)
    _, (own, _) = foreign.case_of(name, foreign.OWN, _SHAPE)
    sizes = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (params, own)]
    assert sizes[0] == sizes[1]


def test_own_layers_are_compared_with_the_fastest_bf16(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    times = {"bf16": 9.0, "own layer, bf16": 8.0, "own layer": 5.0}
    rows = [
        {"layer": "gemma 2", "case": case, "forward_backward_ms": ms, "saved_units": 8}
        for case, ms in times.items()
    ]
    bars = {bar.name: bar for bar in foreign.bars(rows)}
    assert bars["gemma 2, own layer: times the fastest bf16"].measured == 8 / 5
    assert bars["gemma 2, own layer: U saved"].holds


@pytest.mark.slow
@pytest.mark.parametrize("cases", [("bf16", "both", "fp8"), foreign.CASES])
def test_a_command_line_leaves_rows_and_bars(cases, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(foreign, "CASES", {name: foreign.CASES[name] for name in cases})
    out = tmp_path / "foreign.json"
    sizes = "--hidden 128 --seq 32 --batch 2 --intermediate 256 --kv-heads 1"
    options = f"--head-dim 64 --calls 1 --rounds 1 --round-s 0 --out {out}"
    foreign.main([*sizes.split(), *options.split(), "--layers", "llama"])
    results = json.loads(out.read_text())
    assert [row["case"] for row in results["rows"]] == list(cases)
    assert all(row["forward_backward_ms"] > 0 for row in results["rows"])
    names = [bar["name"] for bar in results["bars"]]
    assert names == [
        "llama, both: U saved",
        "llama, both: times smaller",
        "llama, fp8: times smaller",
    ]
    assert "times bf16" in capsys.readouterr().out
