"""Tests of optimizers' training curves: runs, saved rows, comparison, figure."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.optimizer import drift_cases
from experiments.studies import curve_summary
from experiments.studies import curves as optimizer_curves
from experiments.training.settings import PRESETS

_FEW = ["--preset", "tiny", "--steps", "6", "--eval-every", "4", "--eval-batches", "1"]
# These variants compile fast.
_CHOSEN = [v for v in optimizer_curves.VARIANTS if v.name.startswith("optax")]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Returns a file of random letters."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_bytes(np.random.default_rng(0).integers(97, 107, 20_000, np.uint8))
    return path


@pytest.fixture
def command(text, tmp_path, monkeypatch):
    """Returns a command line of two trainings per seed, and the file that it writes."""
    monkeypatch.setattr(optimizer_curves, "VARIANTS", _CHOSEN)
    out = tmp_path / "curves.json"
    return [*_FEW, "--data", str(text), "--out", str(out)], out


def _rows(out):
    return json.loads(out.read_text())["rows"]


@pytest.mark.slow
def test_a_killed_run_goes_on_and_seeds_can_be_added(command, monkeypatch, capsys):
    argv, out = command
    complete, trained = optimizer_curves.Curves._curve, []

    def interrupted(self, trainer, variant, seed, bar):
        if len(trained) == 1:
            raise KeyboardInterrupt
        trained.append((variant.name, seed))
        return complete(self, trainer, variant, seed, bar)

    monkeypatch.setattr(optimizer_curves.Curves, "_curve", interrupted)
    assert optimizer_curves.main([*argv, "--seeds", "1"]) == 130
    selected = _rows(out)
    assert [(row["optimizer"], row["step"]) for row in selected] == [
        ("optax.adamw", 4),
        ("optax.adamw", 6),
    ]

    monkeypatch.setattr(optimizer_curves.Curves, "_curve", complete)
    assert optimizer_curves.main([*argv, "--seeds", "2"]) == 0
    rows = _rows(out)
    assert rows[:2] == selected
    names = [variant.name for variant in _CHOSEN]
    actual = [(row["seed"], row["optimizer"], row["step"]) for row in rows]
    assert actual == [(s, n, step) for s in (0, 1) for n in names for step in (4, 6)]
    start = np.log(257)
    assert all(0.5 * start < row["train_loss"] < 1.2 * start for row in rows)
    by_seed = [[r["val_loss"] for r in rows if r["seed"] == s] for s in (0, 1)]
    assert by_seed[0] != by_seed[1]
    np.testing.assert_allclose(by_seed[0][:2], by_seed[0][2:], rtol=0.02)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "2 seeds" in capsys.readouterr().out

    # A file from before a setting existed counts as having its default.
    saved = json.loads(out.read_text())
    del saved["settings"]["end_lr"]
    out.write_text(json.dumps(saved))
    assert optimizer_curves.main([*argv, "--seeds", "1"]) == 0
    assert _rows(out) == rows
    assert optimizer_curves.main([*argv, "--end-lr", "0"]) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seeds", "0"], "seeds must be positive, got 0"),
        (["--lr", "0.5"], "curves of other settings; give an --out"),
        (["--out", "/nowhere/a.json"], "no folder /nowhere to write a.json to"),
    ],
)
def test_mistakes_are_named_and_change_nothing(command, more, message, capsys):
    argv, out = command
    if "--lr" in more:
        actual = {"settings": {}, "data": "", "rows": []}
        actual |= {"command": "", "date": "", "device": {"name": "another"}}
        out.write_text(json.dumps(actual))
    before = sorted(out.parent.iterdir()), out.exists() and out.read_bytes()
    assert optimizer_curves.main([*argv, *more]) == 2
    assert message in capsys.readouterr().err
    after = sorted(out.parent.iterdir()), out.exists() and out.read_bytes()
    assert after == before


def _written(losses):
    """Returns rows with the losses `losses[optimizer][seed][step]`."""
    return [
        {"optimizer": name, "seed": seed, "step": 10 * step + 10, "val_loss": loss}
        for name, seeds in losses.items()
        for seed, curve in enumerate(seeds)
        for step, loss in enumerate(curve)
    ]


def test_differences_are_paired_by_seed(rng):
    first, second = rng.normal(2, 0.1, (2, 5, 3))
    rows = _written({"optax.adamw": first, "fp8_adamw": second})
    # Seed 5 has one optimizer only.
    rows += _written({"optax.adamw": [[9.0] * 3] * 6})[-3:]
    summary = curve_summary.summarize(rows)
    gaps = second[:, -1] - first[:, -1]
    assert summary[0]["difference"] == summary[0]["standard_error"] == 0
    assert summary[1] == {
        "optimizer": "fp8_adamw",
        "beside": "optax.adamw",
        "seeds": 5,
        "val_loss": pytest.approx(second[:, -1].mean()),
        "difference": pytest.approx(gaps.mean()),
        "standard_error": pytest.approx(np.sqrt(np.var(gaps, ddof=1) / 5)),
        "percent": pytest.approx(100 * gaps.mean() / first[:, -1].mean()),
        # 2.776 is the 97.5% quantile of Student's t with four degrees of freedom.
        "most_percent": pytest.approx(
            100
            * (gaps.mean() + 2.776 * np.std(gaps, ddof=1) / np.sqrt(5))
            / first[:, -1].mean()
        ),
    }
    (bar,) = curve_summary.bars(summary)
    assert bar.measured == summary[1]["most_percent"]
    assert bar.holds == (bar.measured <= 0.5)
    alone = curve_summary.summarize(_written({"optax.adamw": first[:1]}))
    assert alone[0]["standard_error"] is None


def test_an_optimizer_can_be_compared_with_another_than_the_first(rng):
    names = ("lion", "lion, 8 bits", "adan", "adan, 8 bits")
    curves = dict(zip(names, rng.normal(2, 0.1, (4, 2, 3)), strict=True))
    rows = _written(curves)
    for row in rows:
        row["beside"] = row["optimizer"].removesuffix(", 8 bits")
    summary = curve_summary.summarize(rows)
    for row in summary:
        gap = curves[row["optimizer"]] - curves[row["beside"]]
        assert row["difference"] == pytest.approx(gap[:, -1].mean())
    names = [bar.name for bar in curve_summary.bars(summary)]
    end = ", upper end of 95%"
    assert names == [f"{n}, 8 bits, % of loss above {n}{end}" for n in ("lion", "adan")]


@pytest.mark.parametrize("variant", optimizer_curves.VARIANTS, ids=lambda v: v.name)
def test_a_variant_is_what_its_name_says(variant):
    params = {"w": np.zeros((512, 512), variant.param_dtype)}
    settings = PRESETS["tiny"].settings
    tx = variant.optimizer.transformation(settings, 10)
    mu = jax.eval_shape(lambda: optax.tree.get(tx.init(params), "mu"))["w"]
    assert ("BF16" in variant.name) == (variant.param_dtype == "bfloat16")
    assert ("stochastic" in variant.name) == (variant.rounding == "stochastic")
    if not variant.optimizer.fused:
        assert mu.dtype == np.float32
    else:
        own_powers = variant.name == "COAT as published"
        assert (mu.exponent is not None) == own_powers


@pytest.mark.slow
def test_the_earlier_form_is_that_of_drift(rng):
    method = drift_cases.METHODS[drift_cases.EARLIER.name]
    settings = dataclasses.replace(PRESETS["tiny"].settings, b1=drift_cases.B1)
    (variant,) = (v for v in optimizer_curves.VARIANTS if v.name.startswith("an"))
    tx = variant.optimizer.transformation(settings, 10)
    params = {"w": jnp.zeros((3, 100))}
    state, groups = tx.init(params), method.init(jnp.zeros((3, 128)))
    step, step_of_groups = jax.jit(tx.update), jax.jit(method.update)
    for grads in rng.normal(0, 0.01, (5, 3, 100)).astype(np.float32):
        _, state = step({"w": jnp.asarray(grads)}, state, params)
        padded = jnp.pad(grads.ravel(), (0, 84)).reshape(3, 128)
        groups = step_of_groups(padded, groups, settings.b2)
    for name, expected in zip(("mu", "nu"), method.read(groups), strict=True):
        actual = optax.tree.get(state, name)["w"].ravel()
        np.testing.assert_allclose(actual, expected.ravel()[:300], rtol=1e-5)
