"""Tests the comparison of trained models: questions, unread text, and results."""

import json
import math
import shutil

import jax
import numpy as np
import pytest

from coat_jax.models import llama
from experiments.common.results import read_results
from experiments.pretrain import choices, compare, comparison, held_out
from experiments.pretrain import program as pretrain
from experiments.training.runs import Run
from experiments.training.settings import PRESETS, model_config
from experiments.training.trainer import Trainer

_TINY = ["--preset", "tiny", "--steps", "9", "--eval-every", "9"]
# A recipe's entry in the folder of its run.
_MEASURED = {
    "losses": {"a": 1.0},
    "losses_in_bf16": {"a": 1.0},
    "right": {"a": "1"},
    "commit": None,
}


pytestmark = pytest.mark.usefixtures("shared_trainers")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Returns a file of text that is long enough for questions."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n".join(f"{n} times {n} is {n * n}." for n in range(4000)))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text, shared_trainers):
    """Returns the parent folder of runs with BF16 and with COAT on the same text."""
    parent = tmp_path_factory.mktemp("runs")
    for recipe in ("bf16", "coat"):
        argv = ["--recipes", recipe, "--data", str(text)]
        assert pretrain.main([*_TINY, *argv, "--out", str(parent / recipe)]) == 0
    return parent


@pytest.fixture
def runs(tmp_path, finished):
    """Returns copies of the finished runs, for a test that changes them."""
    return [
        shutil.copytree(finished / recipe, tmp_path / recipe)
        for recipe in ("bf16", "coat")
    ]


def test_the_right_piece_goes_on_and_the_others_are_elsewhere():
    documents = [np.arange(1000), np.arange(5000, 5600)]
    questions = choices.ask(documents, 40)
    assert questions.tokens.shape == (40, choices.CHOICES, 257)
    assert set(questions.right) == set(range(choices.CHOICES))
    for pieces, right in zip(*questions, strict=True):
        context = pieces[0, : choices.CONTEXT]
        document = documents[int(context[0] >= 5000)]
        assert np.all(np.diff(context) == 1)
        for n, piece in enumerate(pieces):
            assert np.array_equal(piece[: choices.CONTEXT], context)
            following = piece[choices.CONTEXT :]
            assert np.all(np.diff(following) == 1)
            assert following[0] in document
            is_next = following[0] == context[-1] + 1
            assert is_next == (n == right)
            # No piece is a part of the context or of the right one.
            assert is_next or not set(following) & set(
                range(context[0], context[-1] + 33)
            )


def test_questions_are_the_same_each_time():
    first, second = (choices.ask([np.arange(900)], 5) for _ in range(2))
    np.testing.assert_array_equal(first.tokens, second.tokens)
    np.testing.assert_array_equal(first.right, second.right)


def test_documents_without_questions_are_refused():
    with pytest.raises(ValueError, match="a document of at least 481 tokens"):
        choices.ask([np.arange(480)], 1)
    with pytest.raises(
        ValueError, match="40 draws of 4 pieces have 0 with different pieces"
    ):
        choices.ask([np.zeros(600, int)], 2)


def test_the_likeliest_piece_is_the_answer():
    questions = choices.ask([np.arange(2000)], 150)

    def knows(tokens):
        step = tokens[:, choices.CONTEXT] - tokens[:, choices.CONTEXT - 1]
        return -np.abs(step - 1.0)

    assert choices.answered(questions, knows).all()
    wrong = choices.answered(questions, lambda tokens: -knows(tokens))
    assert not wrong.any()


def test_log_likelihoods_are_those_of_the_logits():
    settings = PRESETS["tiny"].settings
    config = model_config(settings, "bf16", 257)
    trainer = Trainer(config, settings, steps=4)
    state = trainer.init()
    tokens = np.random.default_rng(0).integers(0, 257, (3, 21)).astype(np.int32)
    actual = trainer.log_likelihoods(state, tokens, 5)
    model = llama.nnx.merge(trainer._graphdef, state.params, state.histories)
    logits = np.asarray(model(tokens[:, :-1]), np.float64)
    shares = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    each = np.take_along_axis(shares, tokens[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(actual, each[:, -5:].sum(axis=1), rtol=1e-5)


def test_what_was_read_is_no_unread_text():
    every = held_out.documents()
    assert every.keys() == held_out.KINDS.keys()
    inputs = [*every["prose of packages"][::2], b"another"]
    left = held_out.documents(inputs)
    assert set(left["prose of packages"]) == set(every["prose of packages"]) - set(
        inputs
    )
    assert left["C headers of NumPy"] == every["C headers of NumPy"]
    assert b"".join(every["C headers of NumPy"]).count(b"#include") > 10


@pytest.mark.slow
def test_kinds_that_were_read_are_left_out(runs, monkeypatch, capsys):
    every = held_out.documents()
    recorded = every | {"prose of packages": []}
    monkeypatch.setattr(held_out, "documents", lambda inputs: recorded)
    monkeypatch.setattr(compare, "_QUESTIONS", 2)
    run = Run.resume(runs[0], {})
    corpus = pretrain.load_corpus(run.settings, run.folder)
    exam = compare._exam(run, corpus, pretrain.select_inputs(corpus, run.settings))
    kinds = {compare.UNREAD, *every} - {"prose of packages"}
    assert exam.batches.keys() == exam.questions.keys() == kinds
    assert "no prose of packages, it has read them all" in capsys.readouterr().out


def test_answers_are_compared_question_by_question():
    right = {
        ("bf16", 0): "1100",
        ("bf16", 1): "1000",
        ("coat", 0): "1110",
        ("coat", 1): "1010",
        # Only one recipe has this seed.
        ("bf16", 2): "0000",
    }
    rows = [
        {"recipe": recipe, "seed": seed, "text": "prose", "right": x}
        for (recipe, seed), x in right.items()
    ]
    actual = {(row["recipe"], row["text"]): row for row in compare.tasks(rows)}
    assert actual.keys() == {(r, t) for r in ("bf16", "coat") for t in ("prose", "all")}
    plain, coat = actual["bf16", "prose"], actual["coat", "prose"]
    assert (plain["seeds"], plain["questions"]) == (2, 4)
    assert plain["accuracy_percent"] == 37.5
    assert coat["accuracy_percent"] == 62.5
    assert "difference_points" not in plain
    # The differences of the questions are 0, 0, 1 and 0, with a deviation of 1/2.
    assert coat["difference_points"] == 25
    assert coat["half_points"] == pytest.approx(100 * 1.959964 / 4)
    table = comparison.answers(list(actual.values()))
    assert [list(column.cells)[2] for column in table.columns[:2]] == [
        "  points above bf16",
        "+25.0 ± 49.0",
    ]


@pytest.mark.slow
def test_runs_are_compared_and_measured_once(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "_QUESTIONS", 20)
    out = tmp_path / "compared.json"
    argv = [*map(str, runs), "--out", str(out)]
    assert compare.main(argv) == 0
    actual = read_results(out)
    assert [row["recipe"] for row in actual["rows"]] == ["bf16", "coat"]
    kinds = [compare.UNREAD, *held_out.KINDS]
    assert [row["text"] for row in actual["texts"]] == 2 * kinds
    for row in actual["rows"]:
        [loss] = (
            other["loss"]
            for other in actual["texts"]
            if (other["recipe"], other["text"]) == (row["recipe"], compare.UNREAD)
        )
        assert loss == row["val_loss"]
    for row in actual["texts"]:
        assert math.isfinite(row["loss"])
        assert (row["loss_in_bf16"] == row["loss"]) == (row["recipe"] == "bf16")
    plain, coat = (row["val_loss"] for row in actual["rows"])
    gaps = [row["val_gap_percent"] for row in actual["rows"]]
    assert gaps == [0, pytest.approx(100 * (coat / plain - 1))]
    assert [len(row["losses"]) for row in actual["curves"]] == [9, 9]
    assert out.with_suffix(".png").exists()
    assert "Right answers to multiple-choice questions" in capsys.readouterr().out

    metrics = [(folder / "metrics.jsonl").read_bytes() for folder in runs]
    shutil.rmtree(runs[0] / "checkpoints")  # Nothing is to be measured any more.
    assert compare.main(argv) == 0
    assert read_results(out)["tasks"] == actual["tasks"]
    assert metrics == [(folder / "metrics.jsonl").read_bytes() for folder in runs]

    (runs[0] / "compared.json").unlink()
    assert compare.main(argv) == 2
    output = capsys.readouterr().err
    assert f"latest checkpoint of bf16 in {runs[0]} is of step 0, not of 9" in output


@pytest.mark.slow
def test_runs_that_do_not_compare_are_refused(runs, tmp_path, capsys):
    for folder in runs:  # Measuring would take time.
        entry = {"steps": 9, "recipes": {folder.name: _MEASURED}}
        (folder / "compared.json").write_text(json.dumps(entry))

    def said(*folders):
        assert (
            compare.main([*map(str, folders), "--out", str(tmp_path / "o.json")]) == 2
        )
        return capsys.readouterr().err

    assert f"{runs[0]} is given twice" in said(runs[0], runs[0])
    again = shutil.copytree(runs[0], tmp_path / "again")
    assert "trains {'recipe': 'bf16', 'seed': 0}, as another run" in said(*runs, again)
    assert "no finished run: it has no summary.json" in said(tmp_path)
    with pytest.MonkeyPatch.context() as patch:  # All are checked before the first.
        patch.setattr(compare, "_measured", lambda run: pytest.fail("measures"))
        assert "no finished run" in said(runs[0], tmp_path)
    summary = json.loads((runs[1] / "summary.json").read_text())
    (runs[1] / "summary.json").write_text(json.dumps(summary | {"steps": 5}))
    assert "'steps': 5" in said(*runs)


@pytest.mark.slow
def test_changed_data_are_refused(runs, text, tmp_path, capsys):
    words = text.read_text()
    try:
        text.write_text(words + "more")
        assert compare.main([str(runs[0]), "--out", str(tmp_path / "o.json")]) == 2
    finally:
        text.write_text(words)
    assert f"the data is not what {runs[0]} was started with" in capsys.readouterr().err


def test_losses_alone_are_compared_without_checkpoints(runs, tmp_path, capsys):
    for folder in runs:
        shutil.rmtree(folder / "checkpoints")
    out = tmp_path / "losses.json"
    argv = ["--losses", *map(str, runs), "--out", str(out)]
    assert compare.main(argv) == 0
    assert "Loss above bf16's of the same seed" in capsys.readouterr().out
    contents = read_results(out)
    assert contents["texts"] == contents["tasks"] == []
    plain, quantized = (row["val_loss"] for row in contents["rows"])
    gap = contents["rows"][1]["val_gap_percent"]
    assert gap == pytest.approx(100 * (quantized / plain - 1))


@pytest.mark.slow
def test_recipes_without_a_common_seed_have_no_answers(runs, text, tmp_path):
    other = tmp_path / "other"
    argv = ["--recipes", "te", "--seed", "1", "--out", str(other)]
    assert pretrain.main([*_TINY, *argv, "--data", str(text)]) == 0
    for folder, recipe in ((runs[0], "bf16"), (other, "te")):
        entry = {"steps": 9, "recipes": {recipe: _MEASURED}}
        (folder / "compared.json").write_text(json.dumps(entry))
    out = tmp_path / "compared.json"
    assert compare.main([str(runs[0]), str(other), "--out", str(out)]) == 0
    assert read_results(out)["tasks"] == []


@pytest.mark.parametrize(("gap", "holds"), [(0.29, True), (0.31, False)])
def test_bars_are_about_the_mean_gap(gap, holds):
    losses = {"bf16": 1.0, "coat": 1 + gap / 100}
    rows = [
        {"recipe": r, "seed": s, "train_loss": x, "val_loss": x + s}
        for r, x in losses.items()
        for s in (0,)
    ]
    texts = [
        {"recipe": r, "seed": 0, "text": kind, "loss_in_bf16": 1 + (x - 1) / factor}
        for r, x in losses.items()
        for kind, factor in ((compare.UNREAD, 2), ("prose", 1))
    ]
    in_recipe, in_bf16 = compare.bars("300m", rows, texts)
    assert in_recipe.holds == holds
    assert in_recipe.measured == pytest.approx(gap)
    assert in_bf16.measured == pytest.approx(gap / 2)
    assert not compare.bars("tiny", rows, texts)
    assert not compare.bars("300m", rows[1:], texts)


def test_the_300m_preset_has_300m_parameters():
    config = model_config(PRESETS["300m"].settings, "coat", 257)
    params = jax.eval_shape(
        lambda: llama.nnx.state(llama.Llama(config, rngs=llama.nnx.Rngs(0)))
    )
    count = sum(x.size for x in jax.tree.leaves(params))
    assert 300e6 < count < 320e6
