"""Tests that training stops at, skips or rolls back a NaN or a spike of the loss."""

import functools
import itertools
import json
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.kills import Killed, kill, on_call
from helpers.main_job import bits, final_state, resume, rows_of, tiny
from helpers.marks import slow
from jax.interpreters import partial_eval

from coat_jax.models import llama
from experiments.pretrain import program as pretrain
from experiments.training import bad_steps, data, job, loop, optimizer, runs
from experiments.training import trainer as training
from experiments.training.checkpoints import Checkpoints
from experiments.training.rows import RowLog
from experiments.training.settings import model_config

_STEPS = 12
_ARGV = ["--preset", "tiny", "--steps", str(_STEPS), "--save-every", "4"]
_ARGV += ["--eval-every", "6", "--eval-batches", "1"]
_NAN, _SPIKE = b"#", b"$"


@functools.cache
def _trainer(recipe="bf16", bad_step="stop"):
    settings = _settings(bad_step=bad_step)
    return training.Trainer(model_config(settings, recipe, 257), settings, steps=_STEPS)


def _trainer_for(config, settings, *, steps, mesh):
    """Returns the trainer for a run; only skipping changes the compiled update."""
    assert steps == _STEPS
    return _trainer(config.recipe, "skip" if settings.bad_step == "skip" else "stop")


@pytest.fixture(scope="module", autouse=True)
def marked_losses():
    """Makes losses of batches with a mark NaN, or 100 times as large.

    Also lets runs share trainers, which are traced once.
    """
    validation, original = llama.cross_entropy, llama.training_loss
    saved = training.Trainer.saved_activation_bytes

    def factor(tokens):
        spike = jnp.where((tokens == ord(_SPIKE)).any(), 100.0, 1.0)
        return jnp.where((tokens == ord(_NAN)).any(), jnp.nan, spike)

    def cross_entropy(model, tokens, targets):
        return factor(tokens) * validation(model, tokens, targets)

    def training_loss(model, tokens, targets):
        loss, parts = original(model, tokens, targets)
        return factor(tokens) * loss, parts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "cross_entropy", cross_entropy)
        patch.setattr(llama, "training_loss", training_loss)
        patch.setattr(job, "Trainer", _trainer_for)
        patch.setattr(training.Trainer, saved.__name__, functools.cache(saved))
        patch.setattr(job, "seconds_per_step", lambda *_: 1.0)
        yield


@pytest.fixture(scope="module")
def text():
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, 5).astype(np.uint8)) for _ in range(3000)]
    return b" ".join(words)


@pytest.fixture(scope="module")
def corpus(text, tmp_path_factory):
    """Returns a function that writes a text with a mark in batches of some steps."""

    def write(mark, *steps):
        path = tmp_path_factory.mktemp("data") / "text.txt"
        path.write_bytes(text)
        marked = bytearray(text)
        batches = list(itertools.islice(_batches(path), max(steps, default=0)))
        for step in steps:
            window = bytes(batches[step - 1][0].astype(np.uint8))
            marked[text.index(window) + 10 : text.index(window) + 11] = mark
        path.write_bytes(marked)
        return path

    return write


@pytest.fixture(scope="module")
def rolled_back(corpus, tmp_path_factory):
    """Returns the folder of a run that rolls back its seventh batch, and its corpus."""
    out, path = tmp_path_factory.mktemp("runs") / "run", corpus(_NAN, 7)
    assert _train(path, out, "--bad-step", "rollback") == 0
    return out, path


def _settings(**changes):
    return tiny(steps=_STEPS, **changes)


def _batches(path):
    settings = _settings()
    windows = data.Windows(data.load_corpus([path]).train, settings.seq_len)
    batches = data.train_batches(windows, batch_size=settings.batch_size, seed=0)
    return iter(batches)


def _train(path, out, *flags, recipe="bf16"):
    argv = [*_ARGV, "--recipes", recipe, "--data", str(path), "--out", str(out)]
    return pretrain.main([*argv, *flags])


def _final_bits(out, recipe="bf16"):
    return bits(final_state(out, recipe, _trainer(recipe)))


def _trained(path, left_out, recipe="bf16", count=_STEPS, bad_step="stop"):
    """Trains without some batches; returns the losses and the state's bits."""
    trainer = _trainer(recipe, bad_step)
    state, losses = trainer.init(), []
    numbered = enumerate(_batches(path), 1)
    saved = (batch for number, batch in numbered if number not in left_out)
    for batch in itertools.islice(saved, count):
        state, actual = trainer.step(state, batch)
        losses.append(float(actual.loss))
    return losses, bits(state)


bf16_or_slowly_coat = pytest.mark.parametrize("recipe", ["bf16", slow("coat")])


@pytest.mark.slow
@bf16_or_slowly_coat
def test_a_nan_stops_and_a_resumed_run_skips_it(recipe, corpus, tmp_path, capsys):
    out, path = tmp_path / "run", corpus(_NAN, 7)
    assert _train(path, out, recipe=recipe) == 1
    (line,) = [s for s in capsys.readouterr().out.splitlines() if "error" in s]
    assert line == (
        f"error: {recipe}, step 7: loss nan, the gradient is not finite in embedding, "
        "layers/attention_norm, layers/down and 5 more; to leave it out: "
        f"uv run python -m experiments.pretrain --resume {out} --bad-step skip"
    )
    assert [row["step"] for row in rows_of(out)] == [1, 2, 3, 4, 5, 6]
    assert [p.name for p in (out / "checkpoints" / recipe).iterdir()] == ["4"]
    losses, _ = _trained(path, {7}, recipe)
    assert [row["loss"] for row in rows_of(out)] == losses[:6]

    assert resume(out) == 1
    assert resume(out, "--bad-step", "skip") == 0
    assert f"{recipe}, step 7: loss nan" in capsys.readouterr().out
    rows = rows_of(out)
    assert [row["step"] for row in rows] == list(range(1, _STEPS + 1))
    assert [row["step"] for row in rows if "skipped" in row] == [7]
    assert json.loads((out / "run.json").read_text())["settings"]["bad_step"] == "skip"
    (summary,) = json.loads((out / "summary.json").read_text())["rows"]
    assert summary["skipped_steps"] == 1
    assert np.isfinite([summary["train_loss"], summary["val_loss"]]).all()


@pytest.mark.parametrize("recipe", ["bf16", slow("coat")])
def test_a_skipped_step_changes_nothing(recipe, corpus, tmp_path):
    out, path = tmp_path / "run", corpus(_NAN, 6)
    assert _train(path, out, "--bad-step", "skip", recipe=recipe) == 0
    losses, expected_bits = _trained(path, {6}, recipe, _STEPS - 1, bad_step="skip")
    rows = rows_of(out)
    assert [row["loss"] for row in rows] == [*losses[:5], None, *losses[5:]]
    assert rows[5]["skipped"] is True
    assert rows[5]["grad_norm"] is None
    assert rows[5]["val_loss"] > 0
    assert _final_bits(out, recipe) == expected_bits
    schedule = optimizer.learning_rate(_settings(), _STEPS)
    counts = [*range(6), *range(5, _STEPS - 1)]  # Steps that the optimizer has counted.
    expected = [float(schedule(count)) for count in counts]
    assert [row["lr"] for row in rows] == pytest.approx(expected, rel=1e-5)
    assert (out / "loss.png").exists()


@pytest.mark.parametrize(
    ("recipe", "bad", "left_out"),
    [
        slow("bf16", [7], {5, 6, 7}),
        slow("coat", [7], {5, 6, 7}),
        slow("bf16", [2], {1, 2}),
        # One after the other before there is a new checkpoint.
        ("bf16", [5, 6, 7], {5, 6, 7}),
    ],
)
def test_a_rollback_leaves_the_batches_out(recipe, bad, left_out, corpus, tmp_path):
    out, path = tmp_path / "run", corpus(_NAN, *bad)
    assert _train(path, out, "--bad-step", "rollback", recipe=recipe) == 0
    losses, expected_bits = _trained(path, left_out, recipe)
    rows = rows_of(out)
    assert [row["step"] for row in rows] == list(range(1, _STEPS + 1))
    assert [row["loss"] for row in rows] == losses
    assert [row["step"] for row in rows if "val_loss" in row] == [6, 12]
    assert _final_bits(out, recipe) == expected_bits
    moments = runs.Run.resume(out, {}).rows("moments")
    steps = [6, 12] if recipe == "coat" else []
    assert sorted({row["step"] for row in moments}) == steps
    assert len({(r["step"], r["parameter"], r["moment"]) for r in moments}) == len(
        moments
    )


@pytest.mark.slow  # Rollbacks are counted below.
def test_the_fourth_rollback_to_one_checkpoint_is_a_stop(corpus, tmp_path, capsys):
    out, path = tmp_path / "run", corpus(_NAN, 5, 6, 7, 8)
    assert _train(path, out, "--bad-step", "rollback") == 1
    output = capsys.readouterr().out
    assert output.count("back to step 4") == 3
    assert "error: bf16, step 5: loss nan" in output
    assert [row["step"] for row in rows_of(out)] == [1, 2, 3, 4]
    assert resume(out, "--bad-step", "skip") == 0
    assert [r["step"] for r in rows_of(out) if "skipped" in r] == [5, 6, 7, 8]


@pytest.fixture(scope="module")
def bad_validation(text, tmp_path_factory):
    """Returns a file of text with a mark in the windows of validation alone."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(text)
    held_out = sum(map(len, data.load_corpus([path]).validation))
    path.write_bytes(text[:-held_out] + text[-held_out:].replace(b" ", _NAN))
    batches = itertools.islice(_batches(path), 2 * _STEPS)
    assert not any((batch == ord(_NAN)).any() for batch in batches)
    return path


def test_a_nan_in_validation_stops(bad_validation, tmp_path, capsys):
    out = tmp_path / "run"
    assert _train(bad_validation, out) == 1
    assert "error: bf16, step 6: val_loss nan; to leave it" in capsys.readouterr().out
    assert [row["step"] for row in rows_of(out)] == [1, 2, 3, 4, 5]
    assert resume(out, "--bad-step", "skip") == 0
    output = capsys.readouterr().out
    assert "bf16, step 6: val_loss nan; the training goes on" in output
    rows = rows_of(out)
    assert [row["step"] for row in rows if row.get("val_loss", 0) is None] == [6, 12]
    assert not any("skipped" in row for row in rows)
    assert [row["loss"] for row in rows] == _trained(bad_validation, set())[0]


@pytest.mark.slow  # Rollbacks are counted below.
def test_a_nan_in_validation_rolls_back(bad_validation, tmp_path, capsys):
    out = tmp_path / "run"
    assert _train(bad_validation, out, "--bad-step", "rollback") == 1
    output = capsys.readouterr().out
    assert output.count("bf16, step 6: val_loss nan; back to step 4") == 3
    assert "error: bf16, step 6: val_loss nan" in output
    # Each return goes on with the next two batches.
    losses, _ = _trained(bad_validation, {5, 6, 7, 8, 9, 10}, count=5)
    rows = rows_of(out)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["loss"] for row in rows] == losses


def _interrupt():
    os.kill(os.getpid(), signal.SIGINT)


# The bad batch is the seventh, so the eighth step is the fifth again.
@pytest.mark.parametrize(
    ("owner", "name", "number", "action", "code"),
    [
        slow(training.Trainer, "step", 6, _interrupt, 130),
        slow(training.Trainer, "step", 7, _interrupt, 130),
        slow(training.Trainer, "step", 9, _interrupt, 130),
        slow(training.Trainer, "step", 9, kill, None),
        slow(Checkpoints, "roll_back", 1, kill, None),
        slow(RowLog, "drop_after", 1, kill, None),
        (RowLog, "drop_after", 2, kill, None),
        slow(loop.Loop, "_recent_losses", 2, kill, None),
    ],
)
def test_a_rollback_is_the_same_after_any_end(
    owner, name, number, action, code, rolled_back, tmp_path, monkeypatch, capsys
):
    (undisturbed, path), out = rolled_back, tmp_path / "disturbed"
    flags = ["--bad-step", "rollback", "--keep", "1"]
    with monkeypatch.context() as patch:
        on_call(patch, owner, name, number, action)
        if code is None:
            with pytest.raises(Killed):
                _train(path, out, *flags)
        else:
            assert _train(path, out, *flags) == code
    assert resume(out) == 0
    assert "back to step 4" in capsys.readouterr().out
    assert (out / "metrics.jsonl").read_bytes() == (
        undisturbed / "metrics.jsonl"
    ).read_bytes()
    assert _final_bits(out) == _final_bits(undisturbed)


def test_rollbacks_before_and_after_a_stop_count_together(
    corpus, tmp_path, monkeypatch
):
    """A rollback never returns to the checkpoint that a stop has written."""
    out, path = tmp_path / "run", corpus(_NAN, 5, 7, 9, 11)
    with monkeypatch.context() as patch:
        on_call(patch, training.Trainer, "step", 8, _interrupt)
        assert _train(path, out, "--bad-step", "rollback", "--keep", "1") == 130
    with runs.Run.resume(out, {}).checkpoints("bf16") as checkpoints:
        actual = checkpoints.progress()
    assert (actual.step, actual.origin, actual.rollbacks) == (5, 4, 2)
    names = {path.name for path in (out / "checkpoints" / "bf16").iterdir()}
    assert names == {"4", "5"}
    assert resume(out) == 1


@bf16_or_slowly_coat
def test_a_spike_is_bad_if_it_is_asked_for(recipe, corpus, tmp_path, capsys):
    path, flags = corpus(_SPIKE, 7), ["--bad-step", "skip"]
    assert _train(path, tmp_path / "off", *flags, recipe=recipe) == 0
    actual = rows_of(tmp_path / "off")
    assert not any("skipped" in row for row in actual)
    assert actual[6]["loss"] > 50 * actual[5]["loss"]
    out = tmp_path / "on"
    assert _train(path, out, *flags, "--spike", "3", recipe=recipe) == 0
    rows = rows_of(out)
    assert [row["step"] for row in rows if "skipped" in row] == [7]
    assert rows[:6] == actual[:6]
    losses, expected_bits = _trained(path, {7}, recipe, _STEPS - 1, bad_step="skip")
    assert [r["loss"] for r in rows if "skipped" not in r] == losses
    assert _final_bits(out, recipe) == expected_bits
    limit = 3 * np.median(losses[:6])
    output = capsys.readouterr().out
    assert (
        f"{recipe}, step 7: loss {rows[6]['loss']:.4g} is above {limit:.4g}" in output
    )
    assert "the largest gradient is that of " in output


@pytest.mark.slow
def test_a_resumed_run_has_the_same_limits(corpus, tmp_path, monkeypatch):
    """A factor close to 1 makes most steps spikes, by the median of earlier rows."""
    path, flags = corpus(_NAN), ["--bad-step", "skip", "--spike", "1.01"]
    assert _train(path, tmp_path / "undisturbed", *flags) == 0
    with monkeypatch.context() as patch:
        on_call(patch, training.Trainer, "step", 7)
        with pytest.raises(Killed):
            _train(path, tmp_path / "run", *flags)
    assert resume(tmp_path / "run") == 0
    rows = rows_of(tmp_path / "run")
    assert rows == rows_of(tmp_path / "undisturbed")
    losses, skipped = [], []
    for row in rows:
        if losses and row["loss"] > np.float32(1.01 * np.median(losses)):
            skipped.append(row["step"])
        else:
            losses.append(row["loss"])
    assert [row["step"] for row in rows if "skipped" in row] == skipped


def test_without_a_bad_step_the_answer_changes_nothing(corpus, tmp_path):
    path = corpus(_NAN)
    out = tmp_path / "run"
    assert _train(path, out, "--bad-step", "rollback", "--spike", "9") == 0
    losses, expected_bits = _trained(path, set())
    assert [row["loss"] for row in rows_of(out)] == losses
    assert _final_bits(out) == expected_bits


def test_a_damaged_checkpoint_is_not_returned_to(corpus, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"

    def damage():
        # A thread writes the checkpoint, and last the list of its checksums.
        while not (out / "checkpoints" / "checksums" / "bf16" / "4.json").exists():
            time.sleep(0.01)
        (largest,) = sorted(
            (out / "checkpoints" / "bf16" / "4").rglob("d/*"),
            key=lambda path: path.stat().st_size,
        )[-1:]
        os.truncate(largest, largest.stat().st_size // 2)

    on_call(monkeypatch, training.Trainer, "step", 6, damage)
    assert _train(corpus(_NAN, 7), out, "--bad-step", "rollback") == 1
    assert "is damaged; to go on" in capsys.readouterr().out


@bf16_or_slowly_coat
@pytest.mark.parametrize("answer", ["stop", "skip", "rollback"])
def test_only_skipping_changes_the_compiled_update(answer, recipe):
    """The state after a step depends on the limit of its loss only with "skip"."""
    trainer = _trainer(recipe, answer)
    batch = jax.ShapeDtypeStruct((4, 33), jnp.int32)
    limit = jax.ShapeDtypeStruct((), jnp.float32)
    arguments = trainer.abstract_state(), batch, limit
    traced, shapes = jax.make_jaxpr(trainer._step, return_shape=True)(*arguments)
    state = len(jax.tree.leaves(shapes[0]))
    requested = [position < state for position in range(len(traced.jaxpr.outvars))]
    update, used = partial_eval.dce_jaxpr(traced.jaxpr, requested)
    conditional = [e for e in update.eqns if e.primitive.name == "cond"]
    assert used[-1] == len(conditional) == (answer == "skip")


@pytest.mark.slow
def test_norms_of_gradients_are_those_of_the_named_parameters():
    trainer = _trainer("bf16")
    state, batch = trainer.init(), np.random.default_rng(0).integers(0, 257, (4, 33))
    grads = jax.grad(trainer.loss)(state.params, state.histories, batch)
    expected = {
        "/".join(map(str, path)): np.linalg.norm(np.asarray(leaf[...]).ravel())
        for path, leaf in nnx.to_flat_state(grads)
    }
    _, actual = trainer.step(state, batch.astype(np.int32))
    assert dict(
        zip(trainer.parameter_names, map(float, actual.grad_norms), strict=True)
    ) == pytest.approx(expected, rel=1e-3)
    total = np.linalg.norm(list(expected.values()))
    assert float(actual.grad_norm) == pytest.approx(total, rel=1e-3)


def test_the_limit_is_of_the_last_fifty_losses(rng):
    rows = [{"loss": x} for x in rng.uniform(1, 9, 80)]
    rows.insert(70, {"loss": 1e9, "skipped": True})
    losses = bad_steps.recent_losses(rows)
    last = [row["loss"] for row in rows if "skipped" not in row][-50:]
    assert bad_steps.loss_limit(losses, 2.0) == pytest.approx(2 * np.median(last))
    assert bad_steps.loss_limit(losses, None) == np.inf
    assert bad_steps.loss_limit([], 2.0) == np.inf


@pytest.mark.parametrize("factor", [1.0, 0.5, np.nan, np.inf])
def test_a_spike_is_above_one(factor):
    with pytest.raises(ValueError, match="spike must be above 1 and finite, got"):
        _settings(spike=factor)
