"""Tests of the tables next to the paper's table 3, and of small trainings."""

import dataclasses

import pytest
from helpers.tables import cells_of
from scipy import stats

from coat_jax.layers.recipes import RECIPES
from experiments.common.intervals import half_of_few
from experiments.common.seeds import over_seeds
from experiments.common.style import RECIPE_COLORS, RECIPE_LINES, RECIPE_MARKERS
from experiments.pretrain import comparison, held_out, small
from experiments.studies import trained
from experiments.training.settings import PRESETS

_SHORT = dataclasses.replace(
    PRESETS["tiny"].settings, steps=4, eval_every=3, recipes=("bf16",)
)


def cells(table):
    """Returns the cells of a table's rows, by the row's first and second cells."""
    return {(first, second): remaining for first, second, *remaining in cells_of(table)}


def seed_rows():
    """Returns rows of three seeds, with made-up losses.

    `coat` is 1, 2 and 3% above the `bf16` of its seed. `te` has one seed and is 4%
    above.
    """
    rows = []
    for seed, percent in enumerate((1, 2, 3)):
        plain = 2.0 + seed
        for recipe, factor in (("bf16", 1), ("coat", 1 + percent / 100)):
            loss = {"train_loss": plain * factor, "val_loss": 2 * plain * factor}
            rows.append({"recipe": recipe, "seed": seed} | loss)
    loss = {"train_loss": 2.08, "val_loss": 4.16}
    rows.append({"recipe": "te", "seed": 0} | loss)
    return rows


@pytest.mark.parametrize("count", [2, 3, 11])
def test_intervals_of_few_values_are_students(count):
    expected = stats.t.ppf(0.975, count - 1)
    assert half_of_few(1.0, count) == pytest.approx(expected, abs=5e-4)
    assert half_of_few(1.0, 40) > stats.t.ppf(0.975, 39)


def test_recipes_can_be_told_apart_without_color():
    for styles in (RECIPE_LINES, RECIPE_MARKERS):
        assert styles.keys() == RECIPE_COLORS.keys() == RECIPES.keys()
        assert len(set(styles.values())) == len(styles)


def test_losses_and_speeds_are_means_over_seeds_and_sizes_those_of_the_first():
    rows = [
        {"recipe": "bf16", "seed": 0, "val_loss": 2.0, "step_bytes": 5},
        {"recipe": "coat", "seed": 0, "val_loss": 3.0, "tokens_per_s": 10.0},
        {"recipe": "bf16", "seed": 1, "val_loss": 2.5, "step_bytes": 6},
    ]
    actual = over_seeds(rows)
    assert actual == {
        "bf16": rows[0] | {"seeds": 2, "val_loss": 2.25},
        "coat": rows[1] | {"seeds": 1},
    }


def test_each_row_is_beside_the_papers_and_compared_with_its_own_bf16():
    losses = {"bf16": (1.0, 2.0), "coat": (1.01, 2.03)}
    rows = [
        {"recipe": r, "train_loss": x, "val_loss": y, "parameters": 7e6}
        for r, (x, y) in losses.items()
    ]
    table = cells(comparison.table_3({"rows": rows}))
    assert [model for _, model in table] == 2 * [
        "7M Llama, here",
        "OLMo-1B, paper",
        "OLMo-7B, poster",
    ]
    # The numbers are e^1.01 and e^2.03, and e^0.01 - 1 and e^0.03 - 1 in percent.
    expected = ["1.0100", "+1.00", "2.7456", "+1.01", "7.6141", "+3.05"]
    assert table["coat", "7M Llama, here"] == expected
    # The paper prints 3.008 next to 2.995, and 25.391 next to 25.29.
    expected = ["3.0080", "+0.43", "20.247", "+1.31", "25.391", "+0.40"]
    assert table["coat", "OLMo-1B, paper"] == expected


def test_days_are_those_of_a_recipes_fastest_batch():
    rows = [
        {"case": case, "tokens_per_s": speed}
        for case, speed in [("bf16", 1e4), ("bf16", 3e4), ("te", 1e5), ("coat", 3e5)]
    ]
    timed = {"device": {"name": "a chip"}, "rows": rows}
    table = cells(comparison.days(timed))
    # 300e9 tokens at 3e5 a second take 1e6 s.
    assert table["coat, one a chip", "300,000"] == ["12"]
    assert table["bf16, one a chip", "30,000"] == ["116"]


def test_gaps_are_to_bf16_of_the_same_seed():
    actual = comparison.gaps(seed_rows(), "train_loss")
    assert actual == {"coat": pytest.approx([1, 2, 3]), "te": pytest.approx([4])}
    table = cells(comparison.seeds(seed_rows()))
    # The standard error of 1, 2 and 3 is 1/sqrt(3), of which 4.303 are 2.48.
    expected = ["+2.00 ± 2.48", "+1.00 +2.00 +3.00"]
    assert table["coat", "3"] == 2 * expected
    assert table["te", "1"] == 2 * ["+4.00", "+4.00"]


def test_perplexities_of_texts_are_compared_seed_by_seed():
    losses = {"bf16": (1.0, 2.0), "coat": (1.1, 2.1)}
    rows = [
        {"recipe": recipe, "seed": seed, "text": "prose", "loss": loss}
        | {"loss_in_bf16": loss - 0.05 * (recipe == "coat")}
        for recipe, both in losses.items()
        for seed, loss in enumerate(both)
    ]
    table = cells(comparison.texts(rows))
    # The numbers are e^1.5, e^1.6, e^0.1 - 1 and e^0.05 - 1.
    expected = ["4.482", "4.953", "+10.52 ± 0.00", "+5.13 ± 0.00"]
    assert table["coat", "prose, here"] == expected
    assert table["coat", "C4, OLMo-1B, paper"] == ["27.966", "28.099", "+0.48", ""]
    assert table["coat", "Pile, OLMo-7B, poster"] == ["8.596", "8.684", "+1.02", ""]
    assert len(table) == 7


@pytest.fixture(scope="module")
def short():
    """Returns the results of two seeds of a training of four steps."""
    return small.train(_SHORT, seeds=2, with_paper_flow=False)


@pytest.mark.slow
def test_a_small_training_is_that_of_its_seed(short):
    for seed in (0, 1):
        alone = trained.train(dataclasses.replace(_SHORT, seed=seed), "bf16")
        [loss] = (
            row["loss"]
            for row in short.texts
            if (row["seed"], row["text"]) == (seed, small.VALIDATION)
        )
        assert loss == alone.loss
        rows = [row for row in short.metrics if row["seed"] == seed]
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        assert ["val_loss" in row for row in rows] == [False, False, True, True]
        assert rows[-1]["val_loss"] == loss
    kinds = {small.VALIDATION, *held_out.KINDS}
    assert {row["text"] for row in short.texts} == kinds
    assert len({row["loss"] for row in short.texts}) == 2 * len(kinds)


def test_curves_are_means_over_seeds(short):
    curves = small.mean_curves(short.metrics)
    assert [row["step"] for row in curves] == [1, 2, 3, 4]
    for key in ("loss", "val_loss"):
        both = [row[key] for row in short.metrics if row["step"] == 4]
        assert curves[3][key] == pytest.approx(sum(both) / 2)
        assert both[0] != both[1]


@pytest.mark.parametrize("kind", held_out.KINDS)
def test_held_out_batches_are_text_of_their_kind(kind):
    batches = held_out.batches(held_out.documents(), _SHORT)[kind]
    assert len(batches) == _SHORT.eval_batches
    complete = b"\0".join(held_out.KINDS[kind]())
    for batch in batches:
        assert batch.shape == (_SHORT.batch_size, _SHORT.seq_len + 1)
        for row in batch:
            assert bytes(0 if t == 256 else int(t) for t in row) in complete


def test_the_kinds_of_text_are_what_their_names_say():
    assert b"def jit(" in b"".join(held_out.source_of_jax())
    prose = b"".join(held_out.descriptions()).lower()
    assert b"numpy is the fundamental package" in prose
