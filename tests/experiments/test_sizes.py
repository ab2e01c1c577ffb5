"""Tests of runs with model sizes that differ from the preset's."""

import json

import jax
import pytest
from helpers.main_job import untrained, write_letters

from experiments.finetune import settings as finetuning
from experiments.pretrain import program as pretrain
from experiments.training import arguments, job
from experiments.training.record import read_settings
from experiments.training.settings import PRESETS, Settings, model_config
from experiments.training.trainer import Trainer


def _config(*flags):
    settings = arguments.parse([*flags, "--out", "x"]).settings()
    return model_config(settings, "bf16", 257)


def test_sizes_that_are_not_named_keep_the_presets_proportions():
    plain, wide = PRESETS["cpu"].model, _config("--hidden", "256")
    assert wide.num_layers == plain.num_layers
    assert wide.hidden_size // wide.num_heads == plain.hidden_size // plain.num_heads
    assert wide.num_heads // wide.num_kv_heads == plain.num_heads // plain.num_kv_heads
    assert wide.intermediate_size == 256 * plain.intermediate_size // plain.hidden_size
    odd = _config("--preset", "124m", "--hidden", "320", "--heads", "5")
    assert odd.intermediate_size == 896  # 320 * 2048 / 768 = 853.3, in tiles of 128.


def test_named_sizes_are_the_models():
    flags = ["--preset", "tiny", "--layers", "3", "--hidden", "96"]
    flags += ["--intermediate", "160", "--heads", "6", "--kv-heads", "3"]
    config = _config(*flags)
    sizes = (config.num_layers, config.hidden_size, config.intermediate_size)
    assert (*sizes, config.num_heads, config.num_kv_heads) == (3, 96, 160, 6, 3)


def test_without_sizes_the_shape_is_the_presets():
    for name, preset in PRESETS.items():
        config = model_config(preset.settings, "bf16", preset.model.vocab_size)
        assert config.num_kv_heads == preset.model.num_kv_heads
        assert config.intermediate_size == preset.model.intermediate_size
        assert config.hidden_size == preset.model.hidden_size, name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hidden 100 --heads 3", "hidden 100 and heads 3"),
        ("--hidden 12 --heads 4", "an even number of times heads"),
        ("--heads 4 --kv-heads 3", "heads must be a multiple of kv_heads, got 4 and 3"),
        ("--hidden 1073741824", "below 2**48, got 2, 1073741824 and 2147483648"),
        ("--layers 0", "layers must be positive, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_on_one_line(
    flags, message, tmp_path, capsys
):
    argv = ["--preset", "tiny", *flags.split(), "--out", str(tmp_path / "run")]
    assert pretrain.main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_batches_with_more_sequences_than_the_data_are_named(
    tmp_path, monkeypatch, capsys
):
    def end(*_, **__):
        raise OSError("no step is needed")

    monkeypatch.setattr(job, "train", end)
    text = write_letters(tmp_path / "a.txt", 1000)
    argv = ["--preset", "tiny", "--batch-size", "64", "--seq-len", "32"]
    assert pretrain.main([*argv, "--data", str(text), "--out", f"{tmp_path}/run"]) == 1
    note = "repeats sequences in each batch: the data has 29 of --seq-len 32\n"
    assert f"--batch-size 64 {note}" in capsys.readouterr().out


_ONE_LAYER = ["--preset", "tiny", "--layers", "1", "--recipes", "bf16", "--steps", "1"]


@pytest.fixture
def run(tmp_path):
    """Returns the folder of a run with one layer, which has not trained yet."""
    return untrained(tmp_path / "run", layers=1, recipes=("bf16",))


@pytest.mark.slow
def test_a_run_trains_and_records_its_sizes(tmp_path):
    data, out = write_letters(tmp_path / "text.txt"), tmp_path / "run"
    assert pretrain.main([*_ONE_LAYER, "--data", str(data), "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["preset"], summary["sizes"]) == ("tiny", {"layers": 1})
    model = PRESETS["tiny"].model
    layer = model.hidden_size * (
        2 * model.hidden_size  # Queries and the output.
        + 2 * model.hidden_size * model.num_kv_heads // model.num_heads
        + 3 * model.intermediate_size
    )
    norms = 3 * model.hidden_size
    embedding = 384 * model.hidden_size
    assert summary["rows"][0]["parameters"] == layer + norms + embedding


def test_the_trained_model_has_the_sizes_of_the_run(run):
    settings = read_settings(run)
    trainer = Trainer(model_config(settings, "bf16", 257), settings, steps=1)
    shapes = trainer.abstract_state().params["layers"]
    assert {leaf.shape[0] for leaf in jax.tree.leaves(shapes)} == {1}


def test_a_resumed_run_keeps_its_sizes(run, capsys):
    assert pretrain.main(["--resume", str(run), "--layers", "2"]) == 2
    assert "--layers 2 was given" in capsys.readouterr().err


def test_a_fine_tuning_has_the_sizes_of_its_base(run):
    settings = finetuning.settings({"base": str(run)})
    assert settings.sizes == {"layers": 1}
    assert model_config(settings, "bf16", 257).num_layers == 1


def test_runs_of_before_there_were_sizes_can_be_read(run):
    record = json.loads((run / "run.json").read_text())
    settings = {k: v for k, v in record["settings"].items() if k != "layers"}
    assert Settings.from_json(settings).sizes == {}
    assert read_settings(run).sizes == {"layers": 1}
