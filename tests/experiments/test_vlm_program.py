"""Tests the data, the answers, the intervals and the program of `experiments.vlm`."""

import dataclasses
import functools
import json
import re

import numpy as np
import pytest
from scipy import stats

from experiments.common.answers import points
from experiments.vlm import (
    data,
    intervals,
    pictures,
    program,
    questions,
    report,
    scenes,
)
from experiments.vlm.settings import PRESETS
from experiments.vlm.training import new_trainer, normalized

TINY = PRESETS["tiny"]
ARGUMENTS = ["--preset", "tiny", "--out"]


@functools.cache
def tiny_data():
    return data.make(TINY)


@functools.cache
def drawn(is_test: bool):
    pool = pictures.load(12, 16)[is_test]
    rng = np.random.default_rng(0)
    return pool, [scenes.draw_scene(rng, pool, 3, 4) for _ in range(300)]


# Pictures and scenes.


def test_each_drawing_is_another_and_fills_its_square():
    drawings = pictures.load(12, 16)[0].drawings
    assert len(drawings) == sum(map(len, pictures.NAMES.values()))
    assert len({image.tobytes() for image in drawings.values()}) == len(drawings)
    for image in drawings.values():
        rows, columns = np.nonzero(image[..., 3] > 0.05)
        assert max(np.ptp(rows), np.ptp(columns)) == 11


def test_handwriting_and_photographs_are_divided():
    train, test = (pictures.load(8, 1)[i] for i in (0, 1))
    assert len(train.digits) + len(test.digits) == 1797
    assert {*train.labels} == {*test.labels} == {*range(10)}
    of_case = {digit.tobytes() for digit in train.digits}
    assert sum(digit.tobytes() in of_case for digit in test.digits) == 0
    pairs = zip(train.photographs, test.photographs, strict=True)
    assert [a.shape[1] + b.shape[1] for a, b in pairs] == [640, 640]


def test_scenes_for_tests_are_new():
    placed = [
        {tuple((t.name, t.cell) for t in scene.things) for scene in drawn(is_test)[1]}
        for is_test in (False, True)
    ]
    assert not placed[0] & placed[1]


def test_scenes_keep_their_rules():
    counts = set()
    for scene in drawn(False)[1]:
        names = [thing.name for thing in scene.things]
        cells = [thing.cell for thing in scene.things]
        assert len(set(names)) == len(names)
        assert cells == sorted(set(cells))
        assert len(scene.digits) <= scenes.MOST_DIGITS
        counts.add(len(names))
    assert counts == {1, 2, 3, 4}


def test_an_image_shows_its_scene():
    pool, actual = drawn(False)
    for scene in actual[:20]:
        image = scenes.render(np.random.default_rng(1), scene, pool)
        assert image.shape == (48, 48, 3)
        for thing in scene.things:
            row, column = divmod(thing.cell, 3)
            corner = image[16 * row + 1, 16 * column + 1]
            expected = np.round(255 * np.array(scenes.COLORS[thing.color]))
            np.testing.assert_array_equal(corner, expected)
            cell = image[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
            assert np.any(np.abs(cell[1:-1, 1:-1] - expected) > 60)


# Questions.


def test_answers_follow_from_captions():
    """A caption names everything, so each other answer can be read off it."""
    pool, actual = drawn(True)
    recorded = [*pool.drawings, *map(str, range(10))]
    rng = np.random.default_rng(2)
    words = set(questions.words(3, recorded))
    visited = []
    for scene in actual:
        parts = questions.caption(scene).split(" , ")
        things = [
            re.fullmatch(r"(.+) : (.+) on (\w+)", piece).groups() for piece in parts
        ]
        places = {position: name for position, name, _ in things}
        colors = {name: color for _, name, color in things}
        digits = [int(name) for name in colors if name.isdigit()]
        for kind in questions.KINDS:
            question = questions.ask(rng, scene, kind, recorded)
            if question is None:
                assert kind == "sum"
                assert not digits
                continue
            assert {*question.question.split(), *question.answer.split()} <= words
            last = question.question.split(" ", 2)[2]
            match kind:
                case "presence":
                    expected = "yes" if last in colors else "no"
                case "count":
                    category = last.removesuffix(" things")
                    kinds = [pool.categories.get(name, "digit") for name in colors]
                    expected = str(kinds.count(category))
                case "place":
                    expected = places.get(last.removeprefix("at "), "nothing")
                case "color":
                    expected = colors[last.removeprefix("is behind ")]
                case "sum":
                    expected = str(sum(digits))
                case _:
                    expected = " , ".join(parts)
            assert question.answer == expected
            visited.append((kind, expected))
    for answers in ({"yes", "no"}, {"nothing"}, {"0", "1", "2"}):
        assert answers <= {reply for _, reply in visited}


def test_sequences_hold_image_question_and_answer():
    actual = tiny_data().test
    image = TINY.tokens_per_image
    assert actual.tokens.shape[1] == TINY.length
    for questions_asked, tokens, is_answer in zip(
        actual.questions, actual.tokens, actual.is_answer, strict=True
    ):
        start, end = np.flatnonzero(is_answer)[[0, -1]]
        decode = tiny_data().vocabulary.decode
        assert set(tokens[:image]) == {data.IMAGE}
        assert decode(tokens[image:start]) == questions_asked.question
        assert decode(tokens[start : end + 1]) == questions_asked.answer
        assert tokens[end] == data.END
        assert set(tokens[end + 1 :]) <= {data.PAD}
        assert is_answer.sum() == end - start + 1


def test_longest_sequences_fit():
    for name, settings in PRESETS.items():
        words = settings.tokens_per_image + 3 + 9 * settings.most_things
        assert words <= settings.length - 1, name


def test_data_and_batches_depend_on_seeds_alone():
    again = data.make(TINY)
    np.testing.assert_array_equal(again.train.images, tiny_data().train.images)
    alone = data.make_test(TINY)
    np.testing.assert_array_equal(alone.images, tiny_data().test.images)
    np.testing.assert_array_equal(alone.tokens, tiny_data().test.tokens)
    first, same, other = (
        next(data.batches(tiny_data(), TINY, seed)) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first.tokens, same.tokens)
    assert np.any(first.tokens != other.tokens)


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="'zebra' is not in the vocabulary"):
        tiny_data().vocabulary.encode("is there zebra")


# Answers.


@functools.cache
def trained():
    actual, settings = tiny_data(), dataclasses.replace(TINY, steps=100, lr=1e-2)
    trainer = new_trainer(settings, "bf16", len(actual.vocabulary.words))
    state, stream = trainer.init(0), data.batches(actual, settings, 0)
    for _ in range(settings.steps):
        state, _ = trainer.step(state, next(stream))
    return trainer, state


@pytest.mark.slow
def test_an_answer_is_right_if_greedy_decoding_writes_it():
    trainer, state = trained()
    batch = tiny_data().test.batch(np.arange(12))
    prompts = data.prompt_length(batch.is_answer)
    short = np.flatnonzero(batch.is_answer.sum(axis=1) < 6)
    batch, prompts = data.Batch(*(x[short] for x in batch)), prompts[short]
    _, right = trainer.evaluate(state, batch)
    written = trainer.answers(state, batch, prompts, 6)
    decode = tiny_data().vocabulary.decode
    for i, start in enumerate(prompts):
        expected = decode(batch.tokens[i, start:])
        assert right[i] == (decode(written[i]) == expected)
    assert 0 < right.sum() < len(right)


def test_images_lie_between_minus_one_and_one():
    actual = normalized(np.array([0, 255], np.uint8).reshape(1, 1, 2, 1))
    np.testing.assert_array_equal(np.ravel(actual), [-1, 1])


# Intervals.


def test_intervals_of_paired_differences():
    rng = np.random.default_rng(0)
    of_case, other = rng.integers(0, 2, (2, 400)).astype(float)
    error = 100 * stats.sem(of_case - other)
    mean, half = points(of_case[None], other[None])
    assert mean == pytest.approx(100 * (np.mean(of_case) - np.mean(other)))
    expected = stats.norm.interval(0.95, mean, error)
    assert (mean - half, mean + half) == pytest.approx(expected)


def test_summary_compares_question_by_question():
    rights = {("bf16", 0): "111100", ("bf16", 1): "101100", ("coat", 0): "110110"}
    rights["coat", 1] = "100111"
    rows = [{"recipe": r, "seed": s, "right": x} for (r, s), x in rights.items()]
    actual = {(row["recipe"], row["kind"]): row for row in intervals.summarize(rows)}
    row = actual["coat", "all"]
    assert row["accuracy_percent"] == pytest.approx(100 * 8 / 12)
    assert row["difference_points"] == pytest.approx(100 * 1 / 12)
    assert row["difference_least_seed_points"] == pytest.approx(0)
    assert row["difference_most_seed_points"] == pytest.approx(100 / 6)
    assert actual["coat", "count"]["difference_points"] == -100
    assert actual["coat", "color"]["accuracy_percent"] == 100


# The program.


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("vlm") / "vlm_tiny.json"
    assert program.main([*ARGUMENTS, str(out)]) == 0
    return out


@pytest.mark.slow
def test_results_hold_all_recipes(finished):
    actual = json.loads(finished.read_text())
    assert [(row["recipe"], row["seed"]) for row in actual["rows"]] == [
        ("bf16", 0),
        ("coat", 0),
    ]
    plain, coat = actual["rows"]
    assert plain["saved_activation_bytes"] > coat["saved_activation_bytes"]
    assert len(plain["right"]) == TINY.test_questions
    assert len(actual["summary"]) == 2 * (len(questions.KINDS) + 1)
    assert {row["recipe"] for row in actual["captions"]} == {"bf16", "coat"}
    assert {row["commit"] for row in actual["rows"]} == {actual["versions"]["commit"]}
    assert not actual["bars"]  # Twelve questions say nothing.
    for name in ("losses", "kinds", "captions"):
        assert finished.with_name(f"vlm_tiny_{name}.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_same_command_trains_what_is_missing(finished, monkeypatch):
    initial = json.loads(finished.read_text())
    trained = []
    monkeypatch.setattr(
        program.Study, "train", lambda self, *which: trained.append(which[:2])
    )
    assert program.main([*ARGUMENTS, str(finished), "--seeds", "2"]) == 0
    assert trained == [("bf16", 1), ("coat", 1)]
    assert json.loads(finished.read_text())["rows"] == initial["rows"]


@pytest.mark.slow
def test_trainings_of_other_settings_are_not_mixed(finished, capsys):
    assert program.main([*ARGUMENTS, str(finished), "--steps", "5"]) == 2
    assert "trainings of other settings; name another --out" in capsys.readouterr().err


@pytest.mark.slow
def test_figures_and_tables_of_results(finished):
    actual = json.loads(finished.read_text())
    assert len(report.draw_captions(tiny_data().test, actual).axes) == 2
    assert len(report.draw_questions(tiny_data().test, 4).axes) == 6
    for table in (report.accuracies, report.differences, report.costs):
        assert table(actual).row_count == (1 if table is report.differences else 2)
    assert report.paper().row_count == 3


def test_bars_need_questions_and_seeds():
    row = {"kind": "all", "recipe": "coat", "questions": 2000, "seeds": 3}
    row |= {"difference_low_points": -2.5, "difference_high_points": 0.5}
    (bar,) = report.bars([row, row | {"kind": "sum"}, row | {"recipe": "bf16"}])
    assert bar.measured == 2.5
    assert not bar.holds
    assert not report.bars([row | {"seeds": 2}])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipes", "coat"], "recipes must be bf16 and then others"),
        (
            ["--recipes", "bf16,fp4"],
            "recipes are bf16, te, coat, coat_max, coat_block, coat_bf16; got 'fp4'",
        ),
        (["--seeds", "0"], "seeds must be positive, got 0"),
        (["--lr", "nan"], "lr must be positive, got nan"),
        (["--batch-size", "5000"], "batch_size must be at most train_scenes"),
        (["--out", "nowhere/x.json"], "no folder nowhere to write x.json to"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, capsys):
    assert program.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": 4}, "grid must be 2 or 3, got 4"),
        ({"most_things": 5}, "most_things must be at most the 4 cells, got 5"),
        ({"test_questions": 1}, "test_questions must be at least .*, two of each kind"),
        ({"data_seed": -1}, "data_seed must be zero or more, got -1"),
        ({"preset": "huge"}, "presets are tiny, cpu, gpu; got 'huge'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((7, 1), "size must be at least 8"), ((8, 0), "names_per_category")],
)
def test_pictures_that_do_not_exist_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        pictures.load(*arguments)
