"""Tests the programs that predict memory, and their comparison with measured peaks."""

import json

import pytest
from helpers.marks import slow

from experiments.bench import predictions
from experiments.bench.model_step import ModelSize
from experiments.common.memory_figure import KINDS, draw
from experiments.common.results import load
from experiments.estimate import __main__ as estimate
from experiments.estimate import measured
from experiments.training.settings import PRESETS, model_config
from experiments.training.text import BYTES_VOCAB_SIZE

_SMALL = "--preset 124m --layers 2 --vocab-size 512 --sequence 128 --recipes bf16 coat"


def _batch_of_2(row):
    return _one_gpu(row) and row["batch"] == 2


def _one_gpu(row):
    return row["of"] == "bench_e2e" and row["case"] in ("coat", "te")


def _four_gpus(row):
    return row.get("gpus", 1) == 4 and row["case"] == "coat"


@pytest.mark.parametrize(
    ("chosen", "count"), [(_batch_of_2, 2), slow(_one_gpu, 6), slow(_four_gpus, 11)]
)
def test_predictions_are_within_a_twentieth_of_measured_peaks(chosen, count):
    rows = [measured.end_to_end(r) for r in measured.measured_steps() if chosen(r)]
    assert len(rows) == count
    for row in rows:
        assert abs(row["error_percent"]) < 5
        # The shards of a batch have scales of their own.
        assert row["all_saved_gib"] == pytest.approx(
            row["measured_saved_gib"], rel=0.04
        )
    assert all(bar.holds for bar in measured.bars(rows))
    assert measured.table(rows).row_count == count


def test_sizes_of_pretraining_are_those_of_its_presets():
    for name in measured.PRETRAINED:
        settings = PRESETS[load("pretrain", name)["preset"]].settings
        sizes = {"batch": settings.batch_size, "sequence": settings.seq_len}
        assert sizes == measured.PRETRAINED_SIZES
        config = model_config(settings, "coat", BYTES_VOCAB_SIZE)
        assert config.vocab_size == measured.BYTES_VOCAB_SIZE


def test_committed_predictions_cover_all_measured_peaks():
    rows = load("estimate")["rows"]
    steps = [row for row in rows if row["of"] not in measured.PRETRAINED]
    trained = [name for name in measured.PRETRAINED for _ in range(4)]
    assert [r["of"] for r in rows[len(steps) :]] == trained
    expected = measured.measured_steps()
    names = ("of", "case", "batch")
    assert [[r[name] for name in names] for r in steps] == [
        [r[name] for name in names] for r in expected
    ]
    assert [r["step_peak_gib"] for r in steps] == [r["peak_gib"] for r in expected]
    for row in rows:
        peak = row["device_peak_gib"] or row["step_peak_gib"]
        assert row["error_percent"] == pytest.approx(100 * (row["peak_gib"] / peak - 1))
        kinds = sum(row[f"{kind}_gib"] for kind in KINDS)
        assert kinds == pytest.approx(row["peak_gib"])


@pytest.mark.slow
def test_the_program_writes_rows_and_a_figure(tmp_path, capsys):
    out = tmp_path / "a" / "estimate.json"
    estimate.main(
        f"{_SMALL} --batch 4 --mesh data=2,fsdp=2 --largest-batch --gpu-memory 0.1 "
        f"--out {out}".split()
    )
    rows = json.loads(out.read_text())["rows"]
    assert [row["recipe"] for row in rows] == ["bf16", "coat"]
    for row in rows:
        assert (row["gpus"], row["batch"], row["mesh"]) == (4, 4, "data=2,fsdp=2")
        assert row["available_gib"] == pytest.approx(0.095)
        assert row["largest_batch"] % 4 == 0
        assert row["fits"] == (row["largest_batch"] >= 4)
    assert rows[0]["largest_batch"] < rows[1]["largest_batch"]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "largest batch" in capsys.readouterr().out


def test_the_figure_has_a_bar_for_each_recipe_and_kind():
    row = dict.fromkeys((f"{kind}_gib" for kind in KINDS), 0.0)
    row |= {"parameters_gib": 3.0, "saved_gib": 1.0, "peak_gib": 4.0}
    row |= {"preset": "124m", "batch": 1, "sequence": 8, "mesh": ""}
    figure = draw([row | {"recipe": "bf16"}, row | {"recipe": "coat"}])
    [axes] = figure.axes
    widths = [[bar.get_width() for bar in bars] for bars in axes.containers]
    assert widths == [[3, 3], [1, 1]]
    assert {text.get_text() for text in axes.texts} == {"75%", "25%", " 4.0"}
    [legend] = figure.legends
    names = [text.get_text() for text in legend.texts]
    assert names == ["parameters", "saved activations"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--mesh fsdp", "'fsdp'"),
        ("--mesh fsdp=0", "'fsdp=0'"),
        ("--mesh fsdp=2,fsdp=2", "'fsdp=2,fsdp=2'"),
        ("--mesh pipeline=2", "pipelines of layers are not supported"),
        ("--mesh fsdp=2 --batch 3", "got 3"),
        ("--mesh tensor=5", "got 5"),
        ("--batch 0", "got 0"),
        ("--sequence -1", "got -1"),
        ("--layers 0", "got 0"),
        ("--vocab-size 1099511627776", "vocab_size must be below 2**31, got 1099511"),
        ("--gpu-memory 0", "got 0"),
        ("--gpu-memory nan", "got nan"),
        ("--memory-share 1.5", "got 1.5"),
        ("--recipes fp4", "'fp4'"),
        ("--scaling delayed --recipes bf16 te", "needs coat or coat_max, got bf16 te"),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(argv, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        estimate.main([*argv.split(), "--out", str(tmp_path / "x.json")])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("x.png", "a results file ends in .json, got '"),
        ("file/x.json", "nothing can be written at '"),
    ],
)
def test_results_need_a_json_file_that_can_be_written(out, message, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        estimate.main(["--out", str(tmp_path / out)])
    error = capsys.readouterr().err
    assert error.startswith(f"error: argument --out: {message}{tmp_path / out}'")
    assert error.count("\n") == 1


def test_gpus_split_the_state_of_a_released_step():
    model = ModelSize(
        hidden=512, intermediate=1024, layers=2, heads=8, kv_heads=8, vocab=512, seq=16
    )
    peaks = [
        predictions.estimate("coat, released", model, 1, gpus).peak_bytes
        for gpus in (1, 2)
    ]
    assert peaks[1] < 0.75 * peaks[0]
