"""Quantization error of Adam's moments: captured, measured and replayed correctly."""

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

import coat_jax as coat
from coat_jax.models import llama
from experiments import error_studies as studies
from experiments import error_tables, moments, pretrain, quantization_error, schemes
from experiments.data import load_corpus
from experiments.settings import PRESETS, model_config
from tests import oracle

_FORMATS = {"E4M3": oracle.E4M3, "E5M2": oracle.E5M2, "DE8": oracle.DE8}
_BLOCK = (128,)
_STEPS, _START, _WINDOW = 60, 2, 5
_KEY = jax.random.key(0)
# What the command line compares here: all of it is the notebook's matter.
_FEW = (*studies.SCHEMES[:4], studies.DEFAULT, studies.STOCHASTIC[-1])


def _random_moments(rng, groups=72, spread=1.0):
    """Moments of gradients whose size varies within a group and between groups."""
    size = rng.lognormal(-8, 2, (groups, 1)) * rng.lognormal(0, spread, (groups, 128))
    gradients = (size * rng.standard_normal((30, groups, 128))).astype(np.float32)
    mu, nu = _adam(np.zeros_like(size), np.zeros_like(size), gradients)[-1]
    nu[0], mu[0] = 0, 0
    nu[1, 5:], mu[1, 5:] = 0, 0
    found = {"mu": mu.astype(np.float32), "nu": nu.astype(np.float32)}
    return moments.Moments(step=30, loss=1.0, **found), gradients


def _adam(mu, nu, gradients, b1=0.9, b2=0.95):
    """Adam's moments after each gradient, in float64."""
    found, mu, nu = [], mu.astype(np.float64), nu.astype(np.float64)
    for g in gradients.astype(np.float64):
        mu, nu = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g * g
        found.append((mu, nu))
    return found


def _capture(found, gradients):
    return moments.Capture(
        moments=(found,), start=found, gradients=gradients, b1=0.9, parameters=1
    )


def _oracle_read(x, name):
    """What is read of `x` after storing it by a code's name, in float64."""
    format = _FORMATS[name.removesuffix("+Expand")]
    if not name.endswith("+Expand"):
        scales, values = oracle.quantize(x, format, _BLOCK)
        return oracle.dequantize(values, scales, _BLOCK, None, format)
    x = oracle.flush(x)
    scales, powers, values = {}, {}, np.zeros_like(x)
    for index, where in oracle.groups(x.shape, _BLOCK):
        scales[index] = oracle.scale_of(x[where], format, _BLOCK)
        powers[index] = oracle.power_bounds(x[where], scales[index], format)[0]
        bounds = oracle.expanded_bounds(x[where], scales[index], powers[index], format)
        values[where] = bounds[0]
    return oracle.dequantize(values, scales, _BLOCK, powers, format)


@pytest.mark.parametrize("spread", [0.5, 2.5])
def test_pairs_agree_with_numpy(rng, spread):
    found, gradients = _random_moments(rng, spread=spread)
    rows = studies.pair_rows(_capture(found, gradients))
    assert [(r["mu"], r["nu"]) for r in rows] == list(
        itertools.product(studies.CODES, studies.CODES)
    )
    mu, nu = found.mu.astype(np.float64), found.nu.astype(np.float64)
    counted = nu > 0
    exact = mu[counted] / np.sqrt(nu[counted])

    def squares(a, b):
        read_nu = _oracle_read(found.nu, b)[counted]
        root = np.where(read_nu == 0, 1e-8, np.sqrt(read_nu))
        return (_oracle_read(found.mu, a)[counted] / root - exact) ** 2, read_nu == 0

    unit = 12.31 / squares("E4M3+Expand", "E4M3+Expand")[0].mean()
    for row in rows:
        error, lost = squares(row["mu"], row["nu"])
        # Float32 and float64 break a few ties differently.
        assert row["error"] == pytest.approx(unit * error[~lost].mean(), rel=5e-3)
        assert row["error_with_lost"] == pytest.approx(unit * error.mean(), rel=5e-3)
        assert row["lost_percent"] == pytest.approx(100 * lost.mean(), rel=1e-5)
    lost = {row["nu"] for row in rows if row["lost_percent"]}
    assert lost == ({"E4M3", "E5M2", "DE8"} if spread > 2 else set())


@pytest.mark.parametrize("normalize", [False, True])
def test_schemes_are_those_of_the_library(rng, normalize):
    found, _ = _random_moments(rng)
    like = coat.scale_by_fp8_adam(normalize_mu=normalize).init(jnp.asarray(found.mu))
    state = optax.ScaleByAdamState(
        jnp.int32(1), jnp.asarray(found.mu), jnp.asarray(found.nu)
    )
    expected = coat.to_optax_state(coat.from_optax_state(state, like))
    scheme = studies.DEFAULT if normalize else studies.COAT
    read = schemes.read_back(scheme, found.mu, found.nu, _KEY)
    np.testing.assert_array_equal(read[0], expected.mu)
    np.testing.assert_array_equal(read[1], expected.nu)
    stored = scheme.store(found.mu, found.nu, _KEY)
    nbytes = sum(part.nbytes for part in stored) / found.mu.size
    assert scheme.bytes_per_parameter == nbytes


@pytest.mark.parametrize("expand", [False, True, 3.0])
@pytest.mark.parametrize("format", [coat.E4M3, coat.E5M2])
def test_stochastic_rounding_has_the_right_mean(rng, format, expand):
    x = jnp.asarray(rng.lognormal(0, 2, (6, 128)) * rng.choice([-1, 1], (6, 128)))
    x = x.astype(jnp.float32)
    q = coat.quantize(x, format=format, expand=expand)
    draws = jax.vmap(lambda key: schemes.round_stochastically(x, q, key).dequantize())
    found = np.asarray(draws(jax.random.split(_KEY, 2000)), np.float64)
    low, high = found.min(axis=0), found.max(axis=0)
    assert ((found == low) | (found == high)).all()
    x = np.asarray(x, np.float64)
    top = np.asarray(q.scale, np.float64) * format.max
    x = np.sign(x) * np.minimum(np.abs(x), top)
    slack = 1e-5 * np.abs(x)
    gap = high - low
    assert (low <= x + slack)[gap > 0].all()
    assert (high >= x - slack)[gap > 0].all()
    deviation = np.sqrt(np.abs((x - low) * (high - x)) / len(found))
    often = np.minimum(x - low, high - x) > 0.01 * gap
    assert often.mean() > 0.9
    score = (found.mean(axis=0) - x)[often] / deviation[often]
    assert np.abs(score).max() < 5
    assert score.std() == pytest.approx(1, abs=0.15)


def test_given_powers_are_stored_as_the_library_stores_its_own(rng):
    x = jnp.asarray(rng.lognormal(0, 2, (8, 128)), jnp.float32)
    expected = coat.quantize(x, expand=True)
    found = schemes.quantize_by(x, expected.exponent, coat.E4M3)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_best_power_is_the_best_of_all(rng):
    x = rng.standard_normal((5, 128)).astype(np.float32) ** 3
    weight = rng.lognormal(0, 1, x.shape)
    found = schemes.best_power(jnp.asarray(x), jnp.asarray(weight), coat.E4M3)

    def errors(steps):
        total = np.zeros(len(x))
        for i, group in enumerate(x):
            scale = oracle.scale_of(group, oracle.E4M3, _BLOCK)
            values, _ = oracle.expanded_bounds(group, scale, steps, oracle.E4M3)
            read = oracle.dequantize(
                values, {(0,): scale}, _BLOCK, {(0,): steps}, oracle.E4M3
            )
            total[i] = np.sum(((read - group) * weight[i]) ** 2)
        return total

    every = np.array([errors(steps) for steps in range(1, 161)])
    steps = np.asarray(found)[:, 0].astype(int)
    chosen = every[steps - 1, np.arange(len(x))]
    np.testing.assert_allclose(chosen, every.min(axis=0), rtol=1e-3)
    assert (every[15] > 2 * chosen).all()


def test_peak_over_rms(rng):
    x = rng.standard_normal((4, 128)).astype(np.float32)
    peak, rms = np.abs(x).max(axis=1), np.sqrt((x**2).mean(axis=1))
    expected = np.floor(16 * 4 / np.log2(peak / rms))
    x[3], expected[3] = 1.0, 96
    found = schemes.PeakOverRms(4.0)(jnp.asarray(x), None, coat.E4M3)
    np.testing.assert_array_equal(found[:, 0], expected)


@pytest.fixture(scope="module", autouse=True)
def compilation_cache(tmp_path_factory):
    """The training step is compiled once."""
    before = jax.config.jax_compilation_cache_dir
    folder = tmp_path_factory.mktemp("compiled")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of random words."""
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
def captured(settings):
    every = {"groups": 10**6, "sample": 10**6}
    return moments.capture(settings, at=(_START,), window=_WINDOW, **every)


@pytest.fixture(scope="module")
def states(settings):
    """The states before and after the captured gradients."""
    trained = moments.train(settings)
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


def test_captured_gradients_lead_from_moments_to_moments(captured, states, settings):
    (mu, nu), last = (
        [_all_groups(optax.tree.get(state.opt_state, name)) for name in ("mu", "nu")]
        for state in states
    )
    (found,) = captured.moments
    assert (found.step, len(captured.gradients)) == (_START, _WINDOW)
    for moment in (found, captured.start):
        np.testing.assert_array_equal(moment.mu, mu)
        np.testing.assert_array_equal(moment.nu, nu)
    replayed = _adam(mu, nu, captured.gradients, settings.b1, settings.b2)[-1]
    for trained, exact in zip(last, replayed, strict=True):
        np.testing.assert_allclose(trained, exact, rtol=1e-5, atol=1e-6 * exact.max())
    leaves = jax.tree.leaves(states[0].params)
    sizes = [leaf.size for leaf in leaves if leaf.size >= 8192]
    assert len(sizes) < len(leaves)
    assert captured.parameters == sum(sizes)


def test_captured_gradients_are_those_of_the_loss(captured, states, settings):
    inputs = pretrain.select_inputs(load_corpus([Path(settings.data[0])]), settings)
    batches = pretrain.train_batches(inputs, settings)
    batch = next(itertools.islice(batches, _START, None))
    config = model_config(settings, "bf16", inputs.vocab_size)
    graph, _ = nnx.split(nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0))))

    @jax.jit
    @jax.grad
    def gradient(params):
        model = nnx.merge(graph, params)
        return llama.cross_entropy(model, batch[:, :-1], batch[:, 1:])

    found = gradient(states[0].params)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(found)))
    assert norm > settings.clip_norm
    expected = _all_groups(found) * (settings.clip_norm / norm)
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


@pytest.mark.parametrize("normalize", [False, True])
def test_replays_are_those_of_the_library(rng, normalize):
    found, gradients = _random_moments(rng)
    gradients = gradients[:12]
    tx = coat.scale_by_fp8_adam(b1=0.9, b2=0.99, eps=0, normalize_mu=normalize)
    # After so many steps nothing corrects the bias any more.
    start = optax.ScaleByAdamState(
        jnp.int32(10**6), jnp.asarray(found.mu), jnp.asarray(found.nu)
    )
    state = coat.from_optax_state(start, tx.init(jnp.asarray(found.mu)))
    exact = _adam(found.mu, found.nu, gradients, b2=0.99)
    scheme = studies.DEFAULT if normalize else studies.COAT
    how = {"key": _KEY, "b1": 0.9, "b2": 0.99}
    replay = schemes.replay(scheme, found.mu, found.nu, gradients, **how)
    sums = np.zeros((2, *found.mu.shape))
    for step, (gradient, (mu, nu)) in enumerate(zip(gradients, exact, strict=True)):
        update, state = tx.update(jnp.asarray(gradient), state)
        both = [mu / np.sqrt(nu), np.asarray(update, np.float64)]
        sums += both
        for values, (a, b) in ((replay.update_error, both), (replay.sum_error, sums)):
            expected = np.mean((b - a) ** 2) / np.mean(a**2)
            assert values[step] == pytest.approx(expected, rel=0.02)
            assert 1e-6 < expected < 1e-2


def test_a_replay_in_float32_is_exact(captured):
    start, how = captured.start, {"key": _KEY, "b1": 0.9, "b2": 0.999}
    exact = schemes.Scheme(name="float32")
    found = schemes.replay(exact, start.mu, start.nu, captured.gradients, **how)
    assert max(*found.update_error, *found.sum_error) < 1e-13
    assert set(found.nu_ratio.tolist()) == {1.0}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """The results file of a command line and what it printed."""
    out = tmp_path_factory.mktemp("results") / "found.json"
    arguments = ["--preset", "tiny", "--data", str(text), "--out", str(out)]
    arguments += ["--steps", str(_STEPS), "--at", f"{_STEPS},20", "--window", "10"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(studies, "SCHEMES", _FEW)
        patch.setattr(studies, "REPLAYED", (studies.COAT, studies.DEFAULT))
        assert quantization_error.main([*arguments, "--sample", "256"]) == 0
    return out


def test_a_command_line_leaves_results_and_figures(finished):
    results = json.loads(finished.read_text())
    assert {"command", "date", "device", "versions", "rows", "bars"} < results.keys()
    assert (results["preset"], results["sample"]) == ("tiny", 256)
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
    assert last[studies.DEFAULT.name]["error"] < 12.31 / 2
    assert last[studies.DEFAULT.name]["bytes_per_parameter"] == 2 + 5 / 128
    for name in ("ranges", "codes", "schemes", "replays"):
        figure = finished.with_name(f"found_{name}.png")
        assert figure.read_bytes().startswith(b"\x89PNG")


def test_bars_say_what_rows_say(finished):
    results = json.loads(finished.read_text())
    bars = quantization_error.check(results["rows"])
    assert [bar._asdict() for bar in bars] == results["bars"]
    holds = {bar.name: bar.holds for bar in bars}
    assert holds["plain E4M3 / E4M3+Expand, least step"]
    assert holds["m/sqrt(v), k = 3 / COAT (E4M3+Expand), worst step"]
    assert holds["m/sqrt(v), k = 3, bytes a parameter"]
    worse = [
        row | {"error": row["error"] * (5 if row.get("scheme") else 1)}
        if "error" in row
        else row
        for row in results["rows"]
    ]
    bars = {bar.name: bar for bar in quantization_error.check(worse)}
    assert not bars["m/sqrt(v), k = 3 / COAT (E4M3+Expand), worst step"].holds


def test_the_papers_numbers_keep_the_papers_orders():
    """The bars hold for tables 1 and 8 as printed."""
    errors = {
        (mu, nu): error
        for table in (error_tables.TABLE_1, error_tables.TABLE_8)
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
