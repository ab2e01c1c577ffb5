"""Tests gradient errors of recipes against NumPy, and the command line that trains."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import small_models

from coat_jax.models import llama
from experiments.studies import gradient_error
from experiments.studies.gradient_error import NOISE

_BATCHES = 3
# Every recipe takes a while to compile.
_RECIPES = ("bf16", "coat")


@pytest.fixture(scope="module")
def model():
    return small_models.trained(small_models.config(), batches=_BATCHES)


@pytest.fixture(scope="module")
def rows(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_error, "RECIPES", _RECIPES)
        actual = gradient_error.error_rows(model, _BATCHES)
    return {(row["recipe"], row["layer"], row["kind"]): row for row in actual}


def _gradients(model, recipe, dtype):
    """Returns the gradients of every batch, stacked, in float64, by path."""
    graph, _ = nnx.split(
        nnx.eval_shape(
            lambda: llama.Llama(model.config_as(recipe, dtype), rngs=nnx.Rngs(0))
        )
    )

    @jax.jit
    @jax.grad
    def gradient(params, batch):
        complete = nnx.merge(graph, params)
        return llama.cross_entropy(complete, batch[:, :-1], batch[:, 1:])

    actual = [nnx.to_pure_dict(gradient(model.params, b)) for b in model.batches]
    return jax.tree.map(lambda *g: np.stack(g).astype(np.float64), *actual)


@pytest.fixture(scope="module")
def exact(model):
    return _gradients(model, "bf16", jnp.float32)


def _percent(actual, exact):
    return 100 * np.linalg.norm(actual - exact) / np.linalg.norm(exact)


@pytest.mark.slow
def test_errors_are_those_of_all_batches_together(model, rows, exact):
    actual = _gradients(model, "coat", jnp.bfloat16)
    qkv, expected = (tree["layers"]["qkv"][:, 1] for tree in (actual, exact))
    row = rows["coat", 1, "qkv"]
    assert row["error_percent"] == pytest.approx(_percent(qkv, expected), rel=0.02)
    cosine = np.vdot(qkv, expected) / np.linalg.norm(qkv) / np.linalg.norm(expected)
    assert row["cosine"] == pytest.approx(cosine, rel=1e-4)
    every, expected = (
        np.concatenate([g.ravel() for g in jax.tree.leaves(tree)])
        for tree in (actual, exact)
    )
    complete = rows["coat", None, "all"]["error_percent"]
    assert complete == pytest.approx(_percent(every, expected), rel=0.02)


@pytest.mark.slow
def test_noise_is_the_deviation_of_batches_from_their_mean(rows, exact):
    g = exact["layers"]["down"][:, 0]
    variance = np.sum(np.var(g, axis=0, ddof=1))
    expected = 100 * np.sqrt(variance / np.mean(np.sum(g * g, axis=(1, 2))))
    actual = rows[NOISE, 0, "down"]
    assert actual["error_percent"] == pytest.approx(expected, rel=1e-3)
    assert actual["cosine"] is None


@pytest.mark.slow
def test_every_layer_and_parameter_has_a_row(rows):
    kinds = ("attention_norm", "qkv", "out", "mlp_norm", "gate_up", "down", "all")
    expected = {(layer, kind) for layer in range(2) for kind in kinds}
    expected |= {(None, kind) for kind in ("embedding", "norm", "all")}
    for recipe in (*_RECIPES, NOISE):
        assert {(i, k) for r, i, k in rows if r == recipe} == expected


@pytest.mark.slow
def test_gradients_in_bfloat16_are_nearer_than_those_in_fp8(rows):
    bf16, coat = (rows[r, None, "all"]["error_percent"] for r in _RECIPES)
    assert bf16 < 0.5 * coat
    assert coat < 20


@pytest.mark.parametrize("batches", [1, _BATCHES + 1])
def test_some_batches_are_needed(batches, model):
    with pytest.raises(ValueError, match=f"2 to the 3 there are, got {batches}"):
        gradient_error.error_rows(model, batches)


@pytest.mark.slow
def test_command_line(model, rows, tmp_path, monkeypatch, capsys):
    words = tmp_path / "words.txt"
    words.write_bytes(np.random.default_rng(0).integers(97, 107, 20_000, np.uint8))
    trained = []

    def errors(model, batches):
        trained.append((model, batches))
        return list(rows.values())

    monkeypatch.setattr(gradient_error, "error_rows", errors)
    out = tmp_path / "errors.json"
    argv = ["--preset", "tiny", "--steps", "2", "--data", str(words)]
    assert gradient_error.main([*argv, "--batches", "2", "--out", str(out)]) == 0
    ((model, batches),) = trained
    assert (model.config.recipe, batches, len(model.batches)) == ("bf16", 2, 2)
    actual = json.loads(out.read_text())
    assert actual["rows"] == list(rows.values())
    assert actual["val_loss"] == pytest.approx(model.loss)
    assert 4 < actual["val_loss"] < 6
    assert out.with_suffix(".png").stat().st_size
    printed = capsys.readouterr().out
    worst = max(rows["coat", layer, "qkv"]["error_percent"] for layer in range(2))
    assert f"({worst:.1f})" in printed
