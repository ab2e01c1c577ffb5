"""Tests that benchmarks refuse sizes and counts that make no sense, in one line."""

import argparse
import importlib
import sys

import pytest

from experiments.common.programs import results_path
from experiments.studies import made_up

_COUNT = "must be a positive integer, got"
_NUMBER = "must be a positive, finite number, got"
_HEADS = "the number of heads, must be a multiple of kv_heads, got"


@pytest.mark.parametrize(
    ("module", "argv", "message"),
    [
        ("activations.memory", "--batch 0", f"argument --batch: {_COUNT} '0'"),
        ("activations.memory", "--kv-heads 0", f"--kv-heads: {_COUNT} '0'"),
        ("activations.memory", "--heads 3", "heads must divide 4096, got 3"),
        ("activations.memory", "--kv-heads 5", f"{_HEADS} 4096 / 128 and 5"),
        ("bench.attention", "--seqs 128 -1", f"--seqs: {_COUNT} '-1'"),
        ("bench.attention", "--documents 5000", "of each of --seqs, got 5000 and 2048"),
        ("bench.attention", "--round-s nan", f"--round-s: {_NUMBER} 'nan'"),
        ("bench.compile", "--layers 0", f"--layers: {_COUNT} '0'"),
        ("bench.compile", "--hidden 1.5", f"--hidden: {_COUNT} '1.5'"),
        ("bench.e2e", "--batch 1 0", f"--batch: {_COUNT} '0'"),
        ("bench.e2e", "--buffer inf", f"--buffer: {_NUMBER} 'inf'"),
        ("bench.e2e", "--kv-heads 5", "num_kv_heads must divide num_heads, got 5, 32"),
        ("bench.foreign", "--head-dim 3", f"{_HEADS} 4096 / 3 and 8"),
        ("bench.kernels", "--shapes 128", "--shapes: must be 2 sizes, got '128'"),
        ("bench.kernels", "--shapes 128,x", f"--shapes: {_COUNT} 'x'"),
        ("bench.kernels", "--named abc", "no kernel has abc in its name"),
        ("bench.layer", "--intermediate 0", f"--intermediate: {_COUNT} '0'"),
        ("bench.layer", "--kv-heads 5", f"{_HEADS} 4096 / 128 and 5"),
        ("bench.moe", "--seconds -1", f"--seconds: {_NUMBER} '-1'"),
        ("bench.offload", "--hidden 64", f"{_HEADS} 64 / 128 and 8"),
        ("bench.optimizer", "--parameters 0", f"--parameters: {_COUNT} '0'"),
        ("bench.release", "--steps 0", f"--steps: {_COUNT} '0'"),
        ("bench.starts", "--layers 0", f"--layers: {_COUNT} '0'"),
        ("bench.trainer", "--gpus 0", f"--gpus: {_COUNT} '0'"),
        ("bench.release", "--predict", "--predict needs a results file, and there is"),
        ("kernels.tune", "--shapes 1,2", "--shapes: must be 3 sizes, got '1,2'"),
        ("studies.finetune_large", "--preset abc", "invalid choice: 'abc'"),
        ("studies.finetune_large", "--steps 0", f"--steps: {_COUNT} '0'"),
        ("optimizer.drift", "--b2 x", "--b2: must be of type float, with commas, got"),
        ("optimizer.drift", "--groups 0", f"--groups: {_COUNT} '0'"),
        ("rewrites.rewrites", "--first-seed -1", "--first-seed: must be an integer, z"),
        ("rewrites.rewrites", "--programs 0", f"--programs: {_COUNT} '0'"),
    ],
)
def test_benchmarks_refuse_sizes_in_one_line(
    module, argv, message, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out.json"
    arguments = ["program", *argv.split(), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    program = importlib.import_module(f"experiments.{module}")
    with pytest.raises(SystemExit) as ended:
        program.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not out.exists()


def test_a_results_file_is_no_folder(tmp_path):
    folder = tmp_path / "results.json"
    folder.mkdir()
    with pytest.raises(argparse.ArgumentTypeError, match="a results file is no folder"):
        results_path(str(folder))


def test_a_folder_with_files_is_no_place_for_a_made_up_model(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(SystemExit):
        made_up.main([str(tmp_path), "--preset", "124m"])
    error = capsys.readouterr().err
    assert error.startswith("error: the folder to write must be new or empty, got")
