"""Tests the main job at a tiny size: its files, settings and schedule, and resuming."""

import dataclasses
import json
import os
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.main_job import bits, final_state, rows_of, tiny

import coat_jax as coat
from experiments.common import results
from experiments.pretrain import program as pretrain
from experiments.training import (
    arguments,
    budgets,
    job,
    moment_plots,
    optimizer,
    plots,
    report,
    runs,
    speed,
)
from experiments.training import trainer as training
from experiments.training.checkpoints import Checkpoints, Progress
from experiments.training.job import compile_trainer, train_batches
from experiments.training.settings import PRESETS, Settings, model_config
from experiments.training.state import TrainState
from tests.robustness import trials

_STEPS = 30
_TINY = ["--preset", "tiny", "--steps", str(_STEPS), "--save-every", "7"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return trials.write_corpus(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text, shared_trainers):
    """Returns the folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    assert pretrain.main([*_TINY, "--data", str(text), "--out", str(folder)]) == 0
    return folder


def _trainer(recipe, steps=10, **changes) -> training.Trainer:
    settings = tiny(**changes)
    return training.Trainer(model_config(settings, recipe, 257), settings, steps=steps)


def test_a_run_leaves_metrics_summary_and_plot(finished):
    rows = rows_of(finished)
    order = [(row["recipe"], row["step"]) for row in rows]
    assert order == [(r, s + 1) for r in ("bf16", "coat") for s in range(_STEPS)]
    validated = [row["step"] for row in rows if "val_loss" in row]
    assert validated == [10, 20, 30, 10, 20, 30]
    summary = json.loads((finished / "summary.json").read_text())
    assert {"command", "date", "device", "versions", "rows", "bars"} < summary.keys()
    assert summary["recipes"].keys() == {"bf16", "coat"}
    for recipe, actual in summary["recipes"].items():
        losses = [row["loss"] for row in rows if row["recipe"] == recipe]
        assert losses[0] == pytest.approx(np.log(384), rel=0.05)
        assert actual["train_loss"] == losses[-1] < losses[0] - 1
        assert actual["tokens_per_s"] > 0
    coat_, plain = summary["recipes"]["coat"], summary["recipes"]["bf16"]
    assert coat_["val_loss"] == pytest.approx(plain["val_loss"], rel=0.01)
    assert plain["optimizer_bytes_per_param"] == pytest.approx(8, abs=1e-3)
    assert coat_["optimizer_bytes_per_param"] < 2.2
    assert coat_["saved_activation_bytes"] < 0.5 * plain["saved_activation_bytes"]
    assert (finished / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_summary_says_where_a_run_ran(finished, tmp_path, monkeypatch):
    run = runs.Run.resume(shutil.copytree(finished, tmp_path / "run"), {})
    monkeypatch.setitem(speed.PEAKS, jax.devices()[0].device_kind, 1e12)
    for row in report.summarize(run, "byte")["rows"]:
        assert (row["mesh"], row["devices"]) == ("fsdp=1", 1)
        assert row["tokens_per_s_per_device"] == row["tokens_per_s"]
        expected = row["tokens_per_s"] * row["flops_per_token"] / 1e12
        assert row["model_flop_utilization"] == pytest.approx(expected)


def test_a_run_leaves_what_becomes_of_fp8_moments(finished):
    rows = runs.Run.resume(finished, {}).rows("moments")
    assert {(row["recipe"], row["step"]) for row in rows} == {
        ("coat", step) for step in (10, 20, 30)
    }
    state = final_state(finished, "coat")
    expected = coat.moment_report(state.opt_state).rows()
    last = [row for row in rows if row["step"] == _STEPS]
    assert last == [{"recipe": "coat", "step": _STEPS} | row for row in expected]
    assert all(0 < row["error"] < 0.1 for row in rows)
    assert (finished / "moments.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_run_resumes_to_the_same_summary(finished):
    before = json.loads((finished / "summary.json").read_text())
    logs = [finished / "metrics.jsonl", finished / "moments.jsonl"]
    rows = [log.read_bytes() for log in logs]
    assert pretrain.main(["--out", str(finished), "--resume"]) == 0
    after = json.loads((finished / "summary.json").read_text())
    assert after["recipes"] == before["recipes"]
    assert [log.read_bytes() for log in logs] == rows


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--seed", "5"], "--seed 5 was given and"),
        (["--recipes", "bf16"], "--recipes ('bf16',) was given and"),
        (["--out", "elsewhere"], "writes there, not to --out elsewhere"),
    ],
)
def test_resume_refuses_other_settings(finished, given, message, capsys):
    assert message in _refusal(["--resume", str(finished), *given], capsys)


def test_resume_refuses_other_data(finished, text, capsys):
    words = text.read_bytes()
    try:
        text.write_bytes(words[::-1])
        assert "not what" in _refusal(["--resume", str(finished)], capsys)
    finally:
        text.write_bytes(words)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--preset", "huge"], "invalid choice: 'huge'"),
        (
            ["--recipes", "bf16,fp4"],
            "recipes are bf16, te, coat, coat_max, coat_block, coat_bf16; got 'fp4'",
        ),
        (["--recipes", "coat,coat"], "each once"),
        (["--steps", "0"], "steps must be positive, got 0"),
        (["--rounding", "stochastic"], "needs param_dtype='bfloat16' and one of the"),
        (["--b2", "1"], "b2 must be at least 0 and below 1, got 1.0"),
        (["--data", "/nowhere"], "no file or folder at /nowhere"),
        (["--seq-len", "100000"], "length of 100000 needs 100001 tokens"),
        (
            ["--resume", "/nowhere"],
            "needs a run's folder, got /nowhere without /nowhere/run.json",
        ),
    ],
)
def test_mistakes_are_named_and_leave_nothing(argv, message, text, tmp_path, capsys):
    out = tmp_path / "out"
    if "--resume" not in argv:
        argv = [*argv, "--out", str(out)]
        argv += [] if "--data" in argv else ["--data", str(text)]
    assert message in _refusal(argv, capsys)
    assert not out.exists()


def test_a_folder_with_anything_in_it_is_refused(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("precious")
    assert "--out must be new" in _refusal(["--out", str(tmp_path)], capsys)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_flags_replace_the_presets_settings(tmp_path):
    argv = ["--preset", "124m", "--recipes", "coat,te", "--lr", "0.5", "--data", "a"]
    settings = arguments.parse([*argv, "b", "--out", str(tmp_path)]).settings()
    expected = dataclasses.replace(
        PRESETS["124m"].settings,
        recipes=("coat", "te"),
        lr=0.5,
        data=(os.path.abspath("a"), os.path.abspath("b")),
    )
    assert settings == expected
    stored = json.loads(json.dumps(dataclasses.asdict(settings)))
    assert Settings.from_json(stored) == settings


def test_recipes_start_from_the_same_bits():
    states = [_trainer(recipe).init() for recipe in ("bf16", "coat", "coat_max")]
    first, *remaining = [bits(state.params) for state in states]
    assert all(other == first for other in remaining)
    assert bits(_trainer("bf16", seed=1).init().params) != first


@pytest.mark.parametrize("recipe", ["bf16", "coat"])
def test_moments_of_bf16_parameters_are_float32_or_fp8(recipe):
    state = _trainer(recipe, param_dtype="bfloat16").abstract_state()
    assert {p.dtype.name for p in jax.tree.leaves(state.params)} == {"bfloat16"}
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.size >= 8192]
    expected = "float32" if recipe == "bf16" else "float8_e4m3fn"
    assert {x.dtype.name for x in moments} == {expected}


def test_without_fp8_moments_there_is_nothing_to_draw(tmp_path):
    trainer = _trainer("bf16")
    assert trainer.moment_rows(trainer.abstract_state()) == []
    run = runs.Run.create(tmp_path, tiny(recipes=("bf16",)), "data")
    assert moment_plots.plot_moments(run) is None
    assert not (tmp_path / "moments.png").exists()


def test_in_float32_keeps_what_bf16_moments_lose(rng):
    params = jnp.ones(64, jnp.bfloat16)
    tx = optimizer.in_float32(optax.adamw(1e-2))
    wide = optax.adamw(1e-2)
    state, wide_state = tx.init(params), wide.init(params.astype(jnp.float32))
    for _ in range(5):
        grads = jnp.asarray(rng.normal(size=64), jnp.bfloat16)
        updates, state = tx.update(grads, state, params)
        expected, wide_state = wide.update(
            grads.astype(jnp.float32), wide_state, params.astype(jnp.float32)
        )
        np.testing.assert_array_equal(updates, expected)
        params = optax.apply_updates(params, updates)
    assert params.dtype == jnp.bfloat16


def test_only_matrices_decay():
    params = _trainer("bf16").abstract_state().params
    decays = optimizer.is_matrix(params)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), decay in zip(leaves, jax.tree.leaves(decays), strict=True):
        stacked = "layers" in jax.tree_util.keystr(path)
        assert decay == (leaf.ndim - stacked >= 2)


def test_learning_rate_rises_and_falls():
    schedule = optimizer.learning_rate(tiny(lr=1.0, warmup_steps=1000), 200)
    rates = np.array([schedule(step) for step in range(200)])
    assert np.argmax(rates) == 20
    np.testing.assert_allclose(rates[:21], (1 + np.arange(21)) / 21, rtol=1e-6)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert (np.diff(rates[20:]) < 0).all()


def test_a_budget_lowers_the_number_of_steps(monkeypatch, text):
    clock = iter(np.arange(0, 1000, 0.5))  # Every step and validation takes 0.5 s.
    monkeypatch.setattr(budgets.time, "perf_counter", lambda: next(clock))

    class Stopwatch:
        init = staticmethod(lambda: None)
        step = staticmethod(lambda state, batch: (state, ()))
        evaluate = staticmethod(lambda state, batches: 0.0)

    settings = tiny(minutes=1.0, steps=1000, eval_every=5)
    inputs = pretrain.select_inputs(pretrain.data.load_corpus([text]), settings)
    batches = train_batches(inputs, settings)
    seconds = budgets.seconds_per_step(
        Stopwatch(), settings, batches, inputs.validation
    )
    assert budgets.steps_within_budget(settings, 10.0, seconds) == int(50 / 0.6)
    few = dataclasses.replace(settings, steps=20)
    assert budgets.steps_within_budget(few, 10.0, seconds) == 20


def test_a_budget_times_the_steps_once(monkeypatch, text, tmp_path, capsys):
    """Fifty steps of one second fit in the minute, after ten seconds of compiling."""
    timings = []
    monkeypatch.setattr(training.Trainer, "compiled", (None, 10.0))
    monkeypatch.setattr(job, "seconds_per_step", lambda *_: timings.append(1) or 1.0)
    settings = tiny(minutes=1.0, steps=1000)
    run = runs.Run.create(tmp_path, settings, "data")
    inputs = pretrain.select_inputs(pretrain.data.load_corpus([text]), settings)
    trainer = compile_trainer(run, "bf16", inputs, 0)
    assert len(timings) == 1
    assert run.steps == run.schedule_steps == 50
    assert trainer.learning_rate(51) == pytest.approx(0.1 * settings.lr)
    printed = capsys.readouterr().out
    assert "compiled in 10.0 s; timing 4 steps, which do not count\n" in printed
    assert "50 steps take about 50 s" in printed


def test_checkpoints_keep_every_bit(tmp_path, rng):
    x = jnp.asarray(rng.normal(size=(8, 200)), jnp.float32)
    state = TrainState(x, coat.quantize(x, expand=True), jnp.int32(7))
    with Checkpoints(tmp_path / "saved") as checkpoints:
        assert checkpoints.progress() == Progress()
        for step in (3, 5):
            progress = Progress(step=step, seconds=0.1, measured={"a": 1})
            checkpoints.save(state, progress)
        checkpoints.save(state, progress)
    with Checkpoints(tmp_path / "saved") as checkpoints:
        assert checkpoints.progress() == progress
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device), state
        )
        restored = checkpoints.state(abstract)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)


def test_results_files_have_one_schema(tmp_path):
    path = tmp_path / "results.json"
    bar = results.Bar("speed", ">= 1.5", 1.7, True)
    rows = [{"shape": "8x8", "ms": 0.5, "ok": True, "peak_mib": None}]
    results.write_results(path, rows=rows, bars=[bar], command="uv run x", extra=[1])
    actual = json.loads(path.read_text())
    assert actual["command"] == "uv run x"
    assert actual["rows"] == rows
    assert actual["bars"] == [
        {"name": "speed", "target": ">= 1.5", "measured": 1.7, "holds": True}
    ]
    assert actual["device"].keys() == {"name", "count", "driver"}
    expected = {"python", "jax", "jaxlib", "flax", "optax", "commit"}
    assert actual["versions"].keys() == expected
    assert actual["extra"] == [1]
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]
    with pytest.raises(ValueError, match=r"a row holds .* got 'ms': \[1\]"):
        results.write_results(path, rows=[{"ms": [1]}])
    with pytest.raises(ValueError, match=r"\['date'\] are entries of the schema"):
        results.write_results(path, rows=[], date="today")
    assert json.loads(path.read_text()) == actual
    assert results.known_rows(path) == rows


def test_curves_have_at_most_200_points(rng):
    losses = rng.random(901)  # Five steps a point, and one step more.
    actual = plots.curve(losses)
    assert actual["steps"] == [*range(5, 901, 5)]
    expected = [losses[end - 5 : end].mean() for end in actual["steps"]]
    np.testing.assert_allclose(actual["losses"], expected, atol=1e-5)


def test_trailing_mean(rng):
    x = rng.normal(size=20)
    expected = [x[max(0, i - 4) : i + 1].mean() for i in range(20)]
    np.testing.assert_allclose(plots.trailing_mean(x, 5), expected)


def _refusal(argv, capsys) -> str:
    """Checks that a command line is refused, and returns the message on one line."""
    with pytest.raises(SystemExit) as exit_:
        sys.exit(pretrain.main(argv))
    assert exit_.value.code == 2
    output = capsys.readouterr()
    return " ".join((output.out + output.err).split())
