"""Tests of the benchmark of a trainer that others wrote."""

import pytest

from experiments.bench import trainer
from experiments.common.results import read_results

_SIZES = "--hidden 128 --head-dim 64 --kv-heads 1 --intermediate 128 --layers 2"
_STEPS = "--vocab 256 --batch 2 --seq 64 --steps 2"


def _row(case, *, tokens_per_s, peak_gib, hidden=2048):
    rates = {"tokens_per_s": tokens_per_s, "peak_gib": peak_gib}
    return {"case": case, "hidden": hidden, **rates}


def test_bars_take_the_fastest_case_in_bf16():
    rows = [
        _row("bf16", tokens_per_s=100.0, peak_gib=40.0),
        _row("bf16, all saved", tokens_per_s=120.0, peak_gib=70.0),
        _row("ours", tokens_per_s=150.0, peak_gib=20.0),
    ]
    speed, peak = trainer.bars(rows)
    assert (speed.measured, speed.holds) == (1.25, True)
    assert (peak.measured, peak.holds) == (20.0 / 70.0, True)
    rows[1] = {"case": "bf16, all saved", "error": "see the log"}
    assert trainer.bars(rows)[0].measured == 1.5
    assert not trainer.bars(rows[:2])


def test_wide_models_have_another_bar():
    rows = [
        _row("bf16", tokens_per_s=100.0, peak_gib=0.0, hidden=4096),
        _row("ours", tokens_per_s=130.0, peak_gib=0.0, hidden=4096),
    ]
    (speed,) = trainer.bars(rows)
    assert speed.target == ">= 1.35"
    assert not speed.holds


def test_bars_of_two_gpus_are_relative_to_one():
    def of_gpus(gpus, bf16, ours):
        rows = [("bf16", bf16), ("ours", ours)]
        return [
            _row(case, tokens_per_s=rate, peak_gib=0.0, hidden=4096) | {"gpus": gpus}
            for case, rate in rows
        ]

    bars = trainer.bars(of_gpus(1, 100.0, 140.0) + of_gpus(2, 90.0, 126.0))
    one, two, share = bars
    assert (one.target, one.measured, one.holds) == (">= 1.35", 1.4, True)
    assert (two.target, two.measured, two.holds) == (">= 1.47", 1.4, False)
    assert (share.target, share.measured, share.holds) == (">= 0.92", 0.9, False)


@pytest.mark.parametrize("wrong", [["--hidden", "100"], ["--kv-heads", "3"]])
def test_heads_have_to_divide(wrong, capsys):
    with pytest.raises(SystemExit):
        trainer.main([*_SIZES.split(), *wrong])
    assert "multiple of kv_heads, got" in capsys.readouterr().err


@pytest.mark.slow
def test_a_command_line_leaves_rows_of_every_case(tmp_path):
    out = tmp_path / "trainer.json"
    trainer.main([*_SIZES.split(), *_STEPS.split(), "--out", str(out)])
    rows = read_results(out)["rows"]
    assert [row["case"] for row in rows] == list(trainer.CASES)
    losses = [row["loss"] for row in rows]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=0.02)
