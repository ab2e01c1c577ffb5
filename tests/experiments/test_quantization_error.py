"""Tests that Adam's moments are captured, measured and replayed correctly."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import oracle

from coat_jax.models import llama
from experiments.common.paper import TABLE_1, TABLE_8
from experiments.optimizer import error_studies as studies
from experiments.optimizer import moments, schemes
from experiments.pretrain import program as pretrain
from experiments.studies import capture, quantization_error
from experiments.training.data import load_corpus
from experiments.training.job import train_batches
from experiments.training.settings import PRESETS, model_config

_STEPS, _START, _WINDOW = 60, 2, 5
_KEY = jax.random.key(0)
# The command line compares only these here; comparing all is the notebook's task.
_FEW = (*studies.SCHEMES[:4], studies.DEFAULT, studies.STOCHASTIC[-1])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Returns a file of random words."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("etaoinshr"), 5)) for _ in range(100)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(rng.choice(words, 8000)))
    return path


@pytest.fixture(scope="module")
def settings(text):
    tiny = PRESETS["tiny"].settings
    return dataclasses.replace(tiny, steps=_STEPS, data=(str(text),))


@pytest.fixture(scope="module")
def captured(settings, shared_trainers):
    every = {"groups": 10**6, "sample": 10**6}
    return capture.capture(settings, at=(_START,), window=_WINDOW, **every)


@pytest.fixture(scope="module")
def states(settings, shared_trainers):
    """Returns the states before and after the captured gradients."""
    trained = capture.train(settings)
    state, _ = next(itertools.islice(trained, _START, None))
    before = jax.tree.map(jnp.copy, state)
    after, _ = next(itertools.islice(trained, _WINDOW - 1, None))
    return before, after


def _all_groups(tree):
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree) if x.size >= 8192]
    rows = [row for leaf in leaves for row in leaf.reshape(-1, leaf.shape[-1])]
    return np.concatenate(
        [np.pad(row, (0, -len(row) % 128)).reshape(-1, 128) for row in rows]
    )


@pytest.mark.slow
def test_captured_gradients_lead_from_moments_to_moments(captured, states, settings):
    (mu, nu), last = (
        [_all_groups(optax.tree.get(state.opt_state, name)) for name in ("mu", "nu")]
        for state in states
    )
    (actual,) = captured.moments
    assert (actual.step, len(captured.gradients)) == (_START, _WINDOW)
    for moment in (actual, captured.start):
        np.testing.assert_array_equal(moment.mu, mu)
        np.testing.assert_array_equal(moment.nu, nu)
    replayed = oracle.adam(mu, nu, captured.gradients, settings.b1, settings.b2)[-1]
    for trained, exact in zip(last, replayed, strict=True):
        np.testing.assert_allclose(trained, exact, rtol=1e-5, atol=1e-6 * exact.max())
    leaves = jax.tree.leaves(states[0].params)
    sizes = [leaf.size for leaf in leaves if leaf.size >= 8192]
    assert len(sizes) < len(leaves)
    assert captured.parameters == sum(sizes)


@pytest.mark.slow
def test_captured_gradients_are_those_of_the_loss(captured, states, settings):
    inputs = pretrain.select_inputs(load_corpus([Path(settings.data[0])]), settings)
    batches = train_batches(inputs, settings)
    batch = next(itertools.islice(batches, _START, None))
    config = model_config(settings, "bf16", inputs.vocab_size)
    graph, _ = nnx.split(nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0))))

    @jax.jit
    @jax.grad
    def gradient(params):
        model = nnx.merge(graph, params)
        return llama.cross_entropy(model, batch[:, :-1], batch[:, 1:])

    actual = gradient(states[0].params)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(actual)))
    assert norm > settings.clip_norm
    expected = _all_groups(actual) * (settings.clip_norm / norm)
    error = np.linalg.norm(captured.gradients[0] - expected)
    assert error < 0.02 * np.linalg.norm(expected)


def test_samples_hold_the_same_groups_of_both_moments(captured, states):
    params = states[0].params
    few, every = moments.Sampler(params, 100), moments.Sampler(params, 10**6)
    numbers = iter(range(100))
    tree = jax.tree.map(lambda x: jnp.full(x.shape, float(next(numbers))), params)
    rows = {row.tobytes() for row in every(tree)}
    assert few(tree).shape == (100, 128)
    assert {row.tobytes() for row in few(tree)} == rows
    sample = captured.moments[0].sample(50)
    both = np.hstack([captured.moments[0].mu, captured.moments[0].nu])
    chosen = {row.tobytes() for row in np.hstack([sample.mu, sample.nu])}
    assert len(chosen) == 50
    assert chosen < {row.tobytes() for row in both}


def test_a_replay_in_float32_is_exact(captured):
    start, how = captured.start, {"key": _KEY, "b1": 0.9, "b2": 0.999}
    exact = schemes.Scheme(name="float32")
    actual = schemes.replay(exact, start.mu, start.nu, captured.gradients, **how)
    assert max(*actual.update_error, *actual.sum_error) < 1e-13
    assert set(actual.nu_ratio.tolist()) == {1.0}


# Presets, and the largest error of this library's default over COAT's. A tiny model's
# is about 0.6: 0.59 with the oldest JAX, and 0.61 with the newest.
@pytest.fixture(
    scope="module", params=[("tiny", 0.7), ("cpu", 0.5)], ids=["tiny", "cpu"]
)
def finished(request, tmp_path_factory, text):
    """Returns a preset, a bound of its errors, and a results file of the program."""
    preset, bound = request.param
    out = tmp_path_factory.mktemp("results") / "found.json"
    arguments = ["--preset", preset, "--data", str(text), "--out", str(out)]
    arguments += ["--steps", str(_STEPS), "--at", f"{_STEPS},20", "--window", "10"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(studies, "SCHEMES", _FEW)
        patch.setattr(studies, "REPLAYED", (studies.COAT, studies.DEFAULT))
        assert quantization_error.main([*arguments, "--sample", "256"]) == 0
    return preset, bound, out


@pytest.mark.slow
def test_a_command_line_leaves_results_and_figures(finished):
    preset, bound, out = finished
    results = json.loads(out.read_text())
    assert {"command", "date", "device", "versions", "rows", "bars"} < results.keys()
    assert (results["preset"], results["sample"]) == (preset, 256)
    rows = {}
    for row in results["rows"]:
        rows.setdefault(row["study"], []).append(row)
    steps = [row["step"] for row in rows["spread"]]
    assert steps == [20, _STEPS]
    assert len(rows["pairs"]) == 36 * len(steps)
    assert len(rows["schemes"]) == len(_FEW) * len(steps)
    assert {(r["scheme"], r["step"]) for r in rows["replays"]} == {
        (scheme.name, step)
        for scheme in (studies.COAT, studies.DEFAULT)
        for step in (1, 2, 5, 10)
    }
    for row in rows["pairs"] + rows["schemes"]:
        both = (row.get("mu"), row.get("nu"))
        if both == ("E4M3+Expand",) * 2 or row.get("scheme") == studies.COAT.name:
            assert row["error"] == pytest.approx(12.31)
    last = {r["scheme"]: r for r in rows["schemes"] if r["step"] == _STEPS}
    assert last[studies.DEFAULT.name]["error"] < bound * 12.31
    assert last[studies.DEFAULT.name]["bytes_per_parameter"] == 2 + 9 / 128
    for name in ("ranges", "codes", "schemes", "replays"):
        figure = out.with_name(f"found_{name}.png")
        assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_bars_say_what_rows_say(finished):
    results = json.loads(finished[-1].read_text())
    bars = quantization_error.check(results["rows"])
    assert [bar._asdict() for bar in bars] == results["bars"]
    holds = {bar.name: bar.holds for bar in bars}
    assert holds["plain E4M3 / E4M3+Expand, least step"]
    assert holds["m/sqrt(v), k = 3, bytes a parameter"]
    worst = max(
        row["error"]
        for row in results["rows"]
        if (row["study"], row.get("scheme")) == ("schemes", studies.DEFAULT.name)
    )
    for factor in (0.1, 5):
        changed = [
            row | {"error": row["error"] * (factor if row.get("scheme") else 1)}
            if "error" in row
            else row
            for row in results["rows"]
        ]
        bars = {bar.name: bar for bar in quantization_error.check(changed)}
        bar = bars["m/sqrt(v), k = 3 / COAT (E4M3+Expand), worst step"]
        assert bar.measured == pytest.approx(factor * worst / 12.31)
        assert bar.holds == (factor < 1)


def test_the_papers_numbers_keep_the_papers_orders():
    """The orders hold for the paper's tables 1 and 8 as printed."""
    errors = {
        (mu, nu): error
        for table in (TABLE_1, TABLE_8)
        for mu, printed in table.items()
        for nu, error in zip(studies.CODES, printed, strict=False)
    }
    pairs = {(7, mu, nu): error for (mu, nu), error in errors.items()}
    bars = quantization_error.order_bars(pairs, [7])
    assert len(bars) == 4
    assert all(bar.holds and bar.measured < 1.6 for bar in bars)
    assert bars[0].measured == pytest.approx(25.65 / 23.84)
    pairs = {key: 30 - error for key, error in pairs.items()}
    assert not any(bar.holds for bar in quantization_error.order_bars(pairs, [7]))


@pytest.mark.parametrize(
    ("steps", "at", "window"),
    [(600, (20, 100, 300, 600), 100), (20, (2, 3, 10, 20), 10), (2, (2,), 1)],
)
def test_defaults_follow_the_number_of_steps(steps, at, window):
    settings = dataclasses.replace(PRESETS["tiny"].settings, steps=steps)
    assert quantization_error.default_steps(settings) == at
    assert quantization_error.default_window(settings) == window


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--at", "5,21"], "a step must be from 1 to the run's 20, got 21"),
        (["--at", "0"], "a step must be from 1 to the run's 20, got 0"),
        (["--at", "15", "--window", "6"], "a window of 6 steps must follow"),
        (["--window", "0"], "window must be positive, got 0"),
        (["--groups", "0"], "groups must be positive, got 0"),
        (["--sample", "-1"], "sample must be positive, got -1"),
        (["--steps", "0"], "steps must be positive, got 0"),
        (["--data", "nowhere.txt"], "no file or folder at nowhere.txt"),
        (["--out", "nowhere/found.json"], "no folder nowhere to write found.json to"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message, capsys):
    assert quantization_error.main(["--preset", "tiny", *arguments]) == 2
    assert message in capsys.readouterr().err
