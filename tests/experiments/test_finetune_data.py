"""Tests problems, conversations and windows of fine-tuning, and binomial intervals."""

import math
import re

import numpy as np
import pytest

from experiments.common.intervals import wilson
from experiments.finetune import tasks
from experiments.finetune.conversations import Conversation, Example, result_of
from experiments.finetune.encoding import WordsEncoder
from experiments.finetune.packing import PackedWindows
from experiments.training.text import bpe_encoder, text_codec

_CHAT = Conversation(
    messages=(
        ("system", "Be brief."),
        ("user", "2 + 2?"),
        ("assistant", "4"),
        ("user", "And 3 more?"),
        ("assistant", "4 + 3 = 7. #### 7"),
    )
)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.parametrize("largest", [9, 99])
def test_problems_have_right_answers(largest):
    for problem in tasks.problems("train", 400, largest=largest):
        question, numbers = problem.question, _numbers(problem.question)
        value = int(result_of(problem.answer))
        # A sum with a missing number, and a part of a product, may be larger.
        assert max(numbers) <= max(2 * largest, 12 * 12)
        if problem.family == "expressions":
            assert value == eval(re.search(r"\d[\d +*-]*", question)[0])
        elif "Fill in" in question:
            assert numbers[0] + value == numbers[1]
        elif "older one" in question:
            assert value == max(numbers)
        elif "three days" in question:
            assert value == sum(numbers)
        elif problem.family == "steps":
            steps = re.findall(r"(\d[^=]*) = (\d+)\.", problem.answer)
            assert steps
            assert all(eval(left) == int(right) for left, right in steps)
            assert value == int(steps[-1][1])
        elif "gives" in question:
            assert value == numbers[0] + numbers[2]
        elif "lost" in question or "How many more" in question:
            assert value == numbers[0] - numbers[1]
        else:
            assert value == numbers[0] * numbers[1]


def _told_apart(problem: tasks.Problem) -> tuple:
    """Returns the kind of a problem and the numbers that its answer depends on."""
    question, numbers = problem.question, _numbers(problem.question)
    words = ("gives", "lost", "more", "boxes", "twice", "Fill", "older", "days")
    kind = [word for word in words if word in question]
    kind += re.findall(r"[+*-]", question)
    if problem.family == "stories":
        numbers.pop(1 if "gives" in question else 2)
    if "Fill" in kind:
        numbers[1] -= numbers[0]
    if kind[-1] == "twice":
        pass  # Its numbers must not change places.
    elif kind == ["+", "*"]:
        numbers = [*sorted(numbers[1:]), numbers[0]]
    elif problem.family == "steps":
        numbers = [*sorted(numbers[:2]), *numbers[2:]]
    else:
        numbers.sort()
    return problem.family, *kind, *numbers


def test_parts_share_no_numbers_and_no_question():
    test = {"test": 300, "train": 2000}
    actual = {
        piece: [
            problem
            for seed in (0, 1)
            for problem in tasks.problems(piece, count, largest=50, seed=seed)
        ]
        for piece, count in test.items()
    }
    keys = {piece: set(map(_told_apart, each)) for piece, each in actual.items()}
    assert not keys["train"] & keys["test"]
    for piece, count in test.items():
        questions = [problem.question for problem in actual[piece][:count]]
        assert len(set(questions)) == count
    families = [problem.family for problem in actual["test"][:300]]
    assert {f: families.count(f) for f in tasks.FAMILIES} == dict.fromkeys(
        tasks.FAMILIES, 75
    )
    again = tasks.problems("test", 300, largest=50)
    assert again == actual["test"][:300] != actual["test"][300:]
    assert tasks.BENCHMARKS.keys() == tasks.FAMILIES.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"part": "dev"}, "part must be 'train' or 'test', got 'dev'"),
        ({"count": 0}, "count must be positive, got 0"),
        ({"largest": 3}, "largest must be at least 4, got 3"),
        ({"families": ["poems"]}, "families are expressions, .*; got 'poems'"),
        ({"families": []}, "families must be one or more"),
        (
            {"families": ["expressions"], "largest": 4, "count": 999},
            "there are not 999 different test problems of expressions",
        ),
    ],
)
def test_problems_that_cannot_be_are_named(options, message):
    arguments = {"part": "test", "count": 1} | options
    with pytest.raises(ValueError, match=message):
        tasks.problems(arguments.pop("part"), arguments.pop("count"), **arguments)


@pytest.fixture(params=["bytes", "bpe"])
def codec(request, tmp_path):
    if request.param == "bytes":
        return text_codec()
    path = tmp_path / "tokenizer.json"
    bpe_encoder([b"User: 2 + 2?\nAssistant: 4 " * 9], 300, path)
    return text_codec(300, path)


def test_conversations_are_text_with_separators(codec):
    encoder = WordsEncoder(codec)
    tokens, answers = encoder.encode(_CHAT)
    text = "".join(
        "|" if token == codec.separator else codec.decode([token]) for token in tokens
    )
    assert text == (
        "Be brief.\nUser: 2 + 2?\nAssistant: 4|"
        "User: And 3 more?\nAssistant: 4 + 3 = 7. #### 7|"
    )
    parts = np.split(tokens, np.flatnonzero(np.diff(answers)) + 1)
    assert [codec.decode(piece.tolist()).rstrip("\0") for piece in parts[1::2]] == [
        " 4",
        " 4 + 3 = 7. #### 7",
    ]
    assert [int(piece[-1]) for piece in parts[1::2]] == 2 * [codec.separator]
    prompt = encoder.question(_CHAT)
    assert prompt == tokens[: len(prompt)].tolist()
    assert codec.decode(prompt).endswith("3 more?\nAssistant:")
    assert _CHAT.answer == "7"


def test_a_separator_in_a_text_is_text(codec):
    text = "<|document|> é😀"
    tokens = codec.encode(text)
    assert codec.separator not in tokens
    assert codec.decode(tokens.tolist()) == text


def test_windows_hold_each_conversation_once_and_whole(rng):
    sizes = rng.integers(1, 31, 300)
    examples = [
        Example(rng.integers(1, 99, n, np.int32), rng.random(n) < 0.5) for n in sizes
    ]
    windows = PackedWindows(examples, 40)
    actual = []
    for index in range(len(windows)):
        tokens, segments, answers = windows[index]
        assert tokens.shape == (41,)
        count = segments.max()
        # Conversations follow one another from 1 on, then comes padding.
        assert np.array_equal(np.unique(segments[segments > 0]), np.arange(count) + 1)
        assert np.array_equal(segments > 0, np.arange(41) < (segments > 0).sum())
        assert (np.diff(segments[segments > 0]) >= 0).all()
        for segment in range(1, count + 1):
            in_segment = segments == segment
            actual.append((tokens[in_segment].tolist(), answers[in_segment].tolist()))
        assert not tokens[segments == 0].any()
        assert not answers[segments == 0].any()
    arguments = [
        (tokens.tolist(), answers.astype(int).tolist()) for tokens, answers in examples
    ]
    assert sorted(actual) == sorted(arguments)
    assert windows.filled == sizes.sum() / (41 * len(windows)) > 0.9
    other = PackedWindows(examples[::-1], 40)
    assert windows.fingerprint() == PackedWindows(examples, 40).fingerprint()
    assert windows.fingerprint() != other.fingerprint()
    with pytest.raises(ValueError, match="item 0 of 42 tokens does not fit into 41"):
        PackedWindows([Example(np.ones(42, np.int32), np.ones(42, bool))], 40)


@pytest.mark.parametrize(("hits", "count"), [(0, 7), (3, 10), (250, 1000), (40, 40)])
def test_intervals_end_where_shares_are_unlikely(hits, count):
    share = hits / count
    low, high = wilson(hits, count)
    assert 0 <= low <= share <= high <= 1
    for end in (low, high):
        if 0 < end < 1:  # Here the share is 1.96 standard deviations from the end.
            z = abs(share - end) / math.sqrt(end * (1 - end) / count)
            assert z == pytest.approx(1.959964, rel=1e-4)


def test_counts_that_cannot_be_are_named():
    with pytest.raises(ValueError, match="hits must be 0 to count"):
        wilson(3, 2)
