"""Tests that the drift experiment measures what it says, and that it resumes."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.optimizer import drift, drift_cases, drift_report
from experiments.optimizer.drift_cases import METHODS, STORIES


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the command line of two short runs, and their results file."""
    out = tmp_path_factory.mktemp("drift") / "drift.json"
    argv = ["--b2", "0.95,0.999", "--steps", "300", "--groups", "2", "--out", str(out)]
    assert drift.main(argv) == 0
    return argv, out


@pytest.mark.slow
def test_every_story_is_told_to_every_method(finished):
    _, out = finished
    results = json.loads(out.read_text())
    rows = results["rows"]
    assert len(rows) == 2 * len(METHODS) * len(STORIES)
    for row in rows:
        if row["method"] == "coat":
            assert row["ratio"] == pytest.approx(1, abs=0.05)
            assert row["update_ratio"] == pytest.approx(1, abs=0.1)
    stalled = {
        row["method"]: row["ratio"]
        for row in rows
        if (row["story"], row["b2"]) == ("all spike early", 0.999)
    }
    # The gradients after the spikes are 100 times smaller. Rounding to the nearest BF16
    # number then leaves the moment unchanged.
    assert stalled["BF16"] < 0.95 < stalled["coat"]
    curves = results["curves"]
    assert {(row["b2"], row["steps"]) for row in curves} == {(0.999, 300)}
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_what_is_finished_is_not_done_again(finished, monkeypatch):
    argv, out = finished
    initial = json.loads(out.read_text())["rows"]
    monkeypatch.setattr(drift.Simulation, "looks", None)
    assert drift.main(argv) == 0
    assert json.loads(out.read_text())["rows"] == initial


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--b2", "1.5"], "b2 must be above 0 and below 1, got 1.5"),
        (["--steps", "7"], "a run must have 50 steps or more, got 7"),
        (["--out", "/nowhere/drift.json"], "no folder /nowhere"),
    ],
)
def test_mistakes_are_named(more, message, capsys):
    assert drift.main(more) == 2
    assert message in capsys.readouterr().err


def test_errors_are_those_of_numpy(rng):
    shape = (3, 40)
    mu, read_mu = rng.normal(size=(2, *shape))
    nu, read_nu = rng.uniform(0.1, 2, (2, *shape))
    counted = rng.random(shape) < 0.5
    arrays = (jnp.asarray(x, jnp.float32) for x in (mu, nu, read_mu, read_nu))
    actual = drift._errors(*arrays, jnp.asarray(counted))
    for j, these in enumerate(counted):
        ratio = np.sqrt(nu / read_nu)[j, these]
        exact, inputs = (mu / np.sqrt(nu))[j, these], (read_mu / np.sqrt(read_nu))[j]
        inputs = inputs[these]
        expected = {
            "ratio": ratio.mean(),
            "rms": np.sqrt(np.mean((ratio - 1) ** 2)),
            "largest": ratio.max(),
            "least": ratio.min(),
            "off_by_2_percent": 100 * np.mean((ratio > 2) | (ratio < 0.5)),
            "update_ratio": np.mean(inputs * exact) / np.mean(exact**2),
            "update_rms": np.sqrt(np.mean((inputs - exact) ** 2) / np.mean(exact**2)),
            "counted_percent": 100 * these.mean(),
        }
        assert {k: v[j] for k, v in actual.items()} == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("b2", "steps"), [(0.95, 1000), (0.999, 1000)])
def test_elements_count_while_their_gradients_are_remembered(b2, steps):
    simulation = drift.Simulation(groups=1)
    start, end = (int(x) for x in drift._time(0, jnp.int32(steps)).freeze)
    assert (start, end) == (200, 700)
    memory, rows = round(1 / (1 - b2)), {s.name: j for j, s in enumerate(STORIES)}
    row = rows["a fourth frozen"]
    frozen = np.arange(128) % 4 == 0
    for step in (start - 1, start + memory // 2, end - 1, end + memory // 2, steps - 1):
        last = np.full((len(STORIES), 128), step)
        last[row, frozen] = np.where(start <= step < end, start - 1, step)
        time = drift._time(jnp.int32(step), jnp.int32(steps))
        actual = np.asarray(simulation._counted(jnp.asarray(last), b2, time))
        long = end - start > memory
        settled = step < start or step >= end + memory
        assert actual[row, ~frozen].all()
        assert actual[row, frozen].all() == (not long or settled)
        assert actual[row, frozen].any() == actual[row, frozen].all()
        assert np.delete(actual, [row, rows["all frozen"]], axis=0).all()


def test_the_unsigned_code_of_8_bit_adam_has_256_numbers():
    table = np.array(drift_cases.UNSIGNED_DE8.table)
    assert len(set(table)) == 256
    assert (table[0], table[-1]) == (0.0, 1.0)
    fractions = table[(table > 0.1) & (table < 1)]
    assert len(fractions) == 128
    np.testing.assert_allclose(np.diff(fractions), 0.9 / 128)


def test_the_run_that_is_drawn():
    runs = [(b2, steps) for steps in (1000, 10_000, 100_000) for b2 in (0.95, 0.999)]
    assert drift_report.drawn(runs) == (0.999, 10_000)
    assert drift_report.drawn([(0.99, 100_000)]) == (0.99, 100_000)
