"""Tests reports of amax, saturation and underflow during a run."""

import dataclasses
import gc
import json

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.events import events
from helpers.main_job import write_letters

from coat_jax.models import llama
from experiments.finetune.training import AnswerTrainer
from experiments.pretrain import program as pretrain
from experiments.training import health, health_plots, runs
from experiments.training import trainer as training
from experiments.training.optimizer import Optimizer
from experiments.training.settings import PRESETS, model_config

_SETTINGS = PRESETS["tiny"].settings


@pytest.fixture(scope="module")
def reported():
    """Returns parameters before a step, its batch, and the rows of its report."""
    config = model_config(_SETTINGS, "bf16", 257)
    fp8 = Optimizer.of("coat")
    trainer = training.Trainer(config, _SETTINGS, steps=10, optimizer=fp8)
    shape = _SETTINGS.batch_size, _SETTINGS.seq_len + 1
    batch = np.random.default_rng(0).integers(0, 257, shape, np.int32)
    state = trainer.init()
    before = jax.device_get(nnx.to_pure_dict(state.params))
    after, metrics = trainer.reporting_step(state, batch)
    plain, expected = trainer.step(trainer.init(), batch)
    assert expected.reports == {}
    np.testing.assert_allclose(metrics.loss, expected.loss, rtol=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (after.params, plain.params)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    rows = {
        (row["of"], row["path"], row.get("layer")): row
        for row in health.rows(metrics.reports)
    }
    return before, batch, rows


@pytest.mark.slow
def test_parameters_are_reported_by_layer(reported):
    initial, _, rows = reported
    for name in ("qkv", "down", "mlp_norm"):
        for layer, weight in enumerate(initial["layers"][name]):
            row = rows["parameters", f"layers/{name}", layer]
            assert row["amax"] == np.abs(weight).max()
            assert row["size"] == weight.size
    assert rows["parameters", "embedding", None]["size"] == initial["embedding"].size


@pytest.mark.slow
def test_all_kinds_of_arrays_are_reported(reported):
    _, _, rows = reported
    assert {key[0] for key in rows} == {
        "parameters",
        "gradients",
        "activations",
        "moments",
    }
    paths = {key[1:] for key in rows if key[0] == "gradients"}
    assert paths == {key[1:] for key in rows if key[0] == "parameters"}
    assert all(rows["gradients", "layers/qkv", k]["amax"] > 0 for k in range(2))
    arrays = [row for key, row in rows.items() if key[0] != "moments"]
    assert all(row["saturated_share"] == 0 for row in arrays)


@pytest.mark.slow
def test_activations_are_those_of_the_layers(reported):
    initial, batch, rows = reported
    stream = initial["embedding"][batch[:, :-1]].astype(np.float64)
    norm = np.sqrt(np.mean(stream**2, axis=-1, keepdims=True) + 1e-5)
    inputs = stream / norm * initial["layers"]["attention_norm"][0]
    for name, expected in (("stream", stream), ("input of qkv", inputs)):
        row = rows["activations", name, 0]
        assert row["amax"] == pytest.approx(np.abs(expected).max(), rel=0.01)
        assert row["size"] == expected.size
    names = {key[1] for key in rows if key[0] == "activations"}
    assert len(names) == 7


_EXPERTS = llama.Experts(num_experts=4, top_k=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"experts": _EXPERTS},
        {"norm_placement": "after", "qk_norm": "width"},
        {"norm_placement": "both", "embedding_scale": 8.0, "window": 4},
        {"qkv_bias": True, "qk_norm": "head"},
    ],
)
def test_activations_are_those_of_any_layer(changes):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    config = llama.LlamaConfig(**sizes, recipe="bf16", dtype=np.float32, **changes)
    model = llama.Llama(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 64)
    segment_ids = np.repeat([[0, 1]], 8, axis=1).repeat(2, axis=0)
    graph, stacked = nnx.split(model.layers)
    x = model.embed(tokens)
    for layer in range(2):
        params = jax.tree.map(lambda each, layer=layer: each[layer], stacked)
        x, operands, saved = health._tapped(nnx.merge(graph, params), x, segment_ids)
    expected = model.hidden(tokens, segment_ids)
    np.testing.assert_allclose(model.final_norm(x), expected, atol=1e-5)
    names = [f"input of {name}" for name in ("qkv", "out", "gate_up", "down")]
    assert list(operands) == names
    rows = 32 * (2 if "experts" in changes else 1)
    sizes = [saved[n].size for n in ("stream", "stream before the MLP", "gate and up")]
    assert sizes == [32 * 32, 32 * 32, rows * 2 * 48]


def test_a_fine_tuning_reports_the_activations_of_its_tokens():
    config = model_config(_SETTINGS, "bf16", 257)
    trainer = AnswerTrainer(config, _SETTINGS, steps=10, base=None)
    state = trainer.abstract_state()
    reports = jax.eval_shape(
        trainer.reports, state, trainer.abstract_batch, state.params
    )
    sizes = {array.path: array.size for array in reports["activations"][1].arrays}
    assert sizes["stream"] == _SETTINGS.tokens_per_step * config.hidden_size


@pytest.mark.slow
def test_a_run_writes_reports_and_a_figure(tmp_path):
    text = write_letters(tmp_path / "a.txt", 40_000)
    folder = tmp_path / "run"
    argv = ["--preset", "tiny", "--recipes", "bf16", "--data", str(text)]
    argv += ["--steps", "5", "--health-every", "2", "--out", str(folder)]
    argv += ["--tensorboard"]
    assert pretrain.main(argv) == 0
    lines = (folder / "health.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {(row["recipe"], row["step"]) for row in rows} == {("bf16", 2), ("bf16", 4)}
    assert {row["of"] for row in rows} == {"parameters", "gradients", "activations"}
    board = [*events(folder / "tensorboard" / "bf16")]
    assert any(tag.endswith("amax") for step, tag, _ in board if step == 4)
    assert (folder / "health.png").read_bytes().startswith(b"\x89PNG")
    gc.collect()  # The finished run holds the lock of its folder.
    run = runs.Run.resume(folder, {"health_every": 3})
    assert run.settings.health_every == 3
    [amax, shares, *_] = health_plots.plot_health(run).axes
    assert [list(line.get_xdata()) for line in amax.lines] == [[2, 4]] * 3
    expected = max(r["amax"] for r in rows if (r["of"], r["step"]) == ("gradients", 4))
    assert amax.lines[1].get_ydata()[1] == expected
    assert len(shares.lines) == 3


def test_health_every_must_be_positive():
    with pytest.raises(ValueError, match="health_every must be positive, got 0"):
        dataclasses.replace(_SETTINGS, health_every=0)
