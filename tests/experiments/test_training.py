"""Tests training steps: BF16 parameters, their rounding, histories and checkpoints."""

import errno
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.main_job import bits, tiny

from experiments.training import checksums
from experiments.training import trainer as training
from experiments.training.checkpoints import Checkpoints, Progress
from experiments.training.optimizer import Optimizer
from experiments.training.settings import model_config

_BF16 = {"param_dtype": "bfloat16"}


def _trainer(**changes) -> training.Trainer:
    """Returns a trainer with FP8 moments and a BF16 model, which compiles faster."""
    settings = tiny(**changes)
    config, fp8 = model_config(settings, "bf16", 257), Optimizer.of("coat")
    return training.Trainer(config, settings, steps=10, optimizer=fp8)


@pytest.fixture(scope="module")
def batches():
    settings = tiny()
    shape = 6, settings.batch_size, settings.seq_len + 1
    return np.random.default_rng(0).integers(0, 257, shape, np.int32)


@pytest.fixture(scope="module")
def stochastic() -> training.Trainer:
    return _trainer(rounding="stochastic", lr=1e-5, **_BF16)


def _flat(state):
    leaves = [np.asarray(x, np.float32) for x in jax.tree.leaves(state.params)]
    return np.concatenate([leaf.ravel() for leaf in leaves])


def test_bf16_parameters_start_as_the_float32_ones_rounded(stochastic):
    wide = _trainer().init().params
    expected = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), wide)
    assert bits(stochastic.init().params) == bits(expected)


def test_a_seed_of_init_is_the_settings_seed(stochastic):
    other = bits(_trainer(seed=3, **_BF16).init())
    assert bits(stochastic.init(3)) == other != bits(stochastic.init())


@pytest.mark.slow
def test_stochastic_rounding_moves_parameters_as_far_as_the_updates_say(
    stochastic, batches
):
    """Updates are below BF16's resolution, so rounding to nearest loses most."""
    nearest = _trainer(lr=1e-5, **_BF16)
    settings = tiny(lr=1e-5)
    exact = training.Trainer(model_config(settings, "bf16", 257), settings, steps=10)
    initial = _flat(stochastic.init())
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), stochastic.init().params)
    state, _ = exact.step(exact.init()._replace(params=wide), batches[0])
    update = _flat(state) - initial

    def share(trainer):
        moved = _flat(trainer.step(trainer.init(), batches[0])[0]) - initial
        return np.sum(moved * np.sign(update)) / np.sum(np.abs(update))

    assert share(stochastic) == pytest.approx(1, abs=0.1)
    assert share(nearest) < 0.5


def test_stochastic_rounding_depends_on_the_seed_and_the_step(stochastic, batches):
    def params(seed, count=1):
        state = stochastic.init()._replace(seed=jnp.int32(seed))
        for batch in batches[:count]:
            state, _ = stochastic.step(state, batch)
        return bits(state.params)

    assert params(0) == params(0) != params(1)
    assert params(0, 2) == params(0, 2) != params(0)


def test_a_checkpoint_goes_on_with_the_same_roundings(stochastic, batches, tmp_path):
    def advance(state, piece):
        for batch in piece:
            state, _ = stochastic.step(state, batch)
        return state

    undisturbed = advance(stochastic.init(), batches)
    with Checkpoints(tmp_path / "saved") as checkpoints:
        state = advance(stochastic.init(), batches[:3])
        checkpoints.save(state, Progress(step=3))
    with Checkpoints(tmp_path / "saved") as checkpoints:
        restored = checkpoints.state(stochastic.abstract_state())
    assert bits(advance(restored, batches[3:])) == bits(undisturbed)


def test_training_goes_on_while_a_checkpoint_is_written(
    stochastic, batches, tmp_path, monkeypatch
):
    """Steps donate the state that is being saved, and change no bit of the copy."""
    trained, write = threading.Event(), checksums.write_list

    def late(path):
        assert trained.wait(60)
        write(path)

    state = stochastic.init()
    expected = bits(state)
    with Checkpoints(tmp_path / "saved") as checkpoints:
        monkeypatch.setattr(checksums, "write_list", late)
        checkpoints.save(state, Progress(step=3))
        for batch in batches:
            state, _ = stochastic.step(state, batch)
        assert not (tmp_path / "checksums").exists()
        trained.set()
    assert (tmp_path / "checksums" / "saved" / "3.json").exists()
    with Checkpoints(tmp_path / "saved") as checkpoints:
        assert bits(checkpoints.state(stochastic.abstract_state())) == expected


@pytest.mark.parametrize(
    ("error", "said"),
    [(OSError(errno.ENOSPC, "no space"), ""), (RuntimeError("no space"), "a task\n")],
)
def test_the_next_save_raises_the_errors_of_the_thread(
    error, said, stochastic, tmp_path, monkeypatch, capsys
):
    """Lines that the thread prints are shown, unless the error is the disk's."""

    def fail(path):
        print("a task", file=sys.stderr)
        raise error

    state = stochastic.init()
    monkeypatch.setattr(checksums, "write_list", fail)
    with Checkpoints(tmp_path / "saved") as checkpoints:
        checkpoints.save(state, Progress(step=3))
        with pytest.raises(type(error), match="no space"):
            checkpoints.save(state, Progress(step=5))
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "changes", [{}, {"param_dtype": "bfloat16", "recipes": ("bf16", "te")}]
)
def test_stochastic_rounding_of_nothing_is_refused(changes):
    with pytest.raises(ValueError, match="needs param_dtype='bfloat16' and one of"):
        tiny(rounding="stochastic", **changes)


@pytest.mark.slow
def test_histories_are_kept_in_checkpoints(batches, tmp_path):
    settings = tiny(scaling="delayed")
    config = model_config(settings, "coat", 257)
    assert model_config(settings, "te", 257).scaling == "just_in_time"
    trainer = training.Trainer(config, settings, steps=10)

    def advance(state, piece):
        for batch in piece:
            state, _ = trainer.step(state, batch)
        return state

    with Checkpoints(tmp_path / "saved") as checkpoints:
        state = advance(trainer.init(), batches[:2])
        checkpoints.save(state, Progress(step=2))
    history = state.histories["layers"]["amax"]["down_grad"][...]
    assert np.isfinite(history).all()
    assert ((history > 0).sum(axis=1) == 2).all()
    with Checkpoints(tmp_path / "saved") as checkpoints:
        restored = checkpoints.state(trainer.abstract_state())
    undisturbed = advance(advance(trainer.init(), batches[:2]), batches[2:4])
    assert bits(advance(restored, batches[2:4])) == bits(undisturbed)


def test_delayed_scaling_of_nothing_is_refused():
    with pytest.raises(ValueError, match="needs one of the recipes coat, coat_max"):
        tiny(scaling="delayed", recipes=("bf16", "te"))
