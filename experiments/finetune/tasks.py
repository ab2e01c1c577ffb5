"""Generated arithmetic and word problems, with disjoint parts for training and tests.

Four families of problems imitate the benchmarks of the paper's table 4:

| family      | benchmark   | a question asks for                                      |
|-------------|-------------|----------------------------------------------------------|
| expressions | Mathematics | the value of an expression                               |
| stories     | SVAMP       | one step of arithmetic, with an irrelevant number        |
| reading     | NumGLUE     | a missing number, the larger of two, a sum from a list   |
| steps       | GSM8k       | two or three steps, which the answer shows before "####" |

A problem's key holds its kind and its numbers, but no names or words. Numbers that can
be swapped are sorted. A hash of the key decides whether the problem is for training or
for tests. Therefore no training problem has the kind and the numbers of a test problem,
for any seed and size.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

Part = Literal["train", "test"]
Key = tuple[str | int, ...]
_TEST_SHARE = 0.1
_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ines", "Jack")
_THINGS = ("apples", "books", "coins", "cards", "eggs", "keys", "pens", "stamps")
_FRUITLESS = 10_000  # Draws without a new problem of the part before drawing ends.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A question with its answer.

    Attributes:
      family: The name of the problem's family.
      question: The question.
      answer: The answer. If it shows steps, the result follows them after "####".
    """

    family: str
    question: str
    answer: str


class _Draw:
    """A source of random numbers up to `largest`, names and things for problems."""

    def __init__(self, rng: np.random.Generator, largest: int) -> None:
        self._rng = rng
        self.largest = largest

    def number(self, least: int = 1, most: int | None = None) -> int:
        """Returns a random integer from `least` to `most`, by default `self.largest`.

        If `most` is below `least`, the result is `least`.
        """
        most = self.largest if most is None else most
        return int(self._rng.integers(least, max(most, least) + 1))

    def factor(self) -> int:
        """Returns a random factor for a product, from 2 to at most 12."""
        return self.number(2, max(3, min(12, self.largest // 2)))

    def some(self, count: int, options: Sequence[str]) -> list[str]:
        """Returns `count` different random items of `options`."""
        return [str(x) for x in self._rng.choice(options, count, replace=False)]


def _expression(draw: _Draw) -> tuple[Key, str, str]:
    kind = draw.some(1, ("sum", "difference", "product", "mixed"))[0]
    a, b = draw.number(), draw.number()
    low, high = sorted((a, b))
    if kind == "sum":
        text, value, key = f"{a} + {b}", a + b, (low, high)
    elif kind == "difference":
        text, value, key = f"{high} - {low}", high - low, (low, high)
    else:
        b, c = draw.factor(), draw.factor()
        text, value, key = f"{b} * {c}", b * c, (min(b, c), max(b, c))
        if kind == "mixed":
            text, value, key = f"{a} + {text}", a + value, (a, *key)
    words = draw.some(1, ("What is {}?", "Work out {}.", "Calculate {}."))[0]
    return (kind, *key), words.format(text), str(value)


def _story(draw: _Draw) -> tuple[Key, str, str]:
    (name, other), (noun, more) = draw.some(2, _NAMES), draw.some(2, _THINGS)
    kind = draw.some(1, ("gain", "loss", "compare", "groups"))[0]
    low, high = sorted((draw.number(), draw.number()))
    spare = draw.number()  # This number has no part in the answer.
    if kind == "gain":
        text = f"{name} has {high} {noun} and {spare} {more}. {other} gives {name} "
        text += f"{low} {noun}. How many {noun} does {name} have now?"
        return (kind, low, high), text, str(low + high)
    if kind == "loss":
        text = f"{name} had {high} {noun} and lost {low} of them. {other} has {spare} "
        text += f"{more}. How many {noun} does {name} still have?"
        return (kind, low, high), text, str(high - low)
    if kind == "compare":
        text = f"{name} has {high} {noun}, {other} has {low} {noun} and {spare} "
        text += f"{more}. How many more {noun} than {other} does {name} have?"
        return (kind, low, high), text, str(high - low)
    a, b = draw.factor(), draw.factor()
    text = f"{name} has {a} boxes with {b} {noun} in each, and {spare} {more}. How "
    text += f"many {noun} does {name} have?"
    return (kind, min(a, b), max(a, b)), text, str(a * b)


def _reading(draw: _Draw) -> tuple[Key, str, str]:
    name, other = draw.some(2, _NAMES)
    noun = draw.some(1, _THINGS)[0]
    kind = draw.some(1, ("larger", "missing", "list"))[0]
    low, high = sorted((draw.number(), draw.number()))
    first, second = draw.some(2, (str(low), str(high)))
    if kind == "larger":
        low = min(low, draw.largest - 1)
        high = max(high, low + 1)
        first, second = draw.some(2, (str(low), str(high)))
        text = f"{name} is {first} years old and {other} is {second} years old. "
        text += "How old is the older one?"
        return (kind, low, high), text, str(high)
    if kind == "missing":
        text = f"Fill in the missing number: {first} + ? = {low + high}."
        return (kind, low, high), text, second
    middle = draw.number()
    numbers = ", ".join(draw.some(3, (str(low), str(middle), str(high))))
    text = f"{name} counts {noun} on three days: {numbers}. How many in all?"
    return (kind, *sorted((low, middle, high))), text, str(low + middle + high)


def _steps(draw: _Draw) -> tuple[Key, str, str]:
    name, other = draw.some(2, _NAMES)
    noun = draw.some(1, _THINGS)[0]
    kind = draw.some(1, ("boxes", "shared", "twice"))[0]
    a, b, c = draw.factor(), draw.factor(), draw.number()
    if kind == "boxes":
        text = f"{name} buys {a} boxes of {b} {noun} and gets {c} more. How many "
        text += f"{noun} does {name} have?"
        steps = f"{a} * {b} = {a * b}. {a * b} + {c} = {a * b + c}."
        return (kind, min(a, b), max(a, b), c), text, f"{steps} #### {a * b + c}"
    if kind == "shared":
        lost = draw.number(1, a * b - 1)
        text = f"{name} has {a} bags of {b} {noun}. {lost} of the {noun} are lost. "
        text += f"How many {noun} are left?"
        steps = f"{a} * {b} = {a * b}. {a * b} - {lost} = {a * b - lost}."
        key = kind, min(a, b), max(a, b), lost
        return key, text, f"{steps} #### {a * b - lost}"
    text = f"{name} has {c} {noun}. {other} has twice as many, and finds {a} more. "
    text += f"How many {noun} do they have together?"
    steps = f"{c} * 2 = {2 * c}. {2 * c} + {a} = {2 * c + a}. "
    steps += f"{c} + {2 * c + a} = {3 * c + a}."
    return (kind, c, a), text, f"{steps} #### {3 * c + a}"


FAMILIES: dict[str, Callable[[_Draw], tuple[Key, str, str]]] = {
    "expressions": _expression,
    "stories": _story,
    "reading": _reading,
    "steps": _steps,
}
# The benchmark in the paper's table 4 for which each family stands.
BENCHMARKS = {
    "expressions": "Mathematics",
    "stories": "SVAMP",
    "reading": "NumGLUE",
    "steps": "GSM8k",
}


def problems(
    split: Part,
    count: int,
    *,
    families: Sequence[str] = tuple(FAMILIES),
    largest: int = 99,
    seed: int = 0,
) -> list[Problem]:
    """Returns different problems of one part, alternating between the families.

    Args:
      split: The part: "train" or "test". No problem is in both.
      count: The number of problems.
      families: The names of the families.
      largest: The largest number in a question, at least 4. Results may be larger.
      seed: The seed of the random choice.

    Raises:
      ValueError: If an argument is invalid, or there are fewer than `count` problems.

    Examples:
      >>> problem = problems("train", 1, families=["expressions"], seed=1)[0]
      >>> problem.question, problem.answer
      ('Calculate 75 - 51.', '24')
    """
    _check(split, count, families, largest)
    sources = [
        (family, _Draw(np.random.default_rng([seed, split == "test", n]), largest))
        for n, family in enumerate(families)
    ]
    by_question: dict[str, Problem] = {}
    for number in range(count):
        family, draw = sources[number % len(sources)]
        problem = _new(split, family, draw, by_question)
        if problem is None:
            raise ValueError(
                f"there are not {count} different {split} problems of {family} with "
                f"numbers up to {largest}, got {len(by_question)} of "
                f"{', '.join(families)}"
            )
        by_question[problem.question] = problem
    return list(by_question.values())


def part_of(family: str, key: Key) -> Part:
    """Returns the part of all problems of a family that have the key `key`."""
    digest = hashlib.blake2b(repr((family, *key)).encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest) < _TEST_SHARE * 2**64 else "train"


def _new(
    split: Part, family: str, draw: _Draw, earlier: dict[str, Problem]
) -> Problem | None:
    """Returns a new problem of the part `split`, or None after many draws.

    The problem's question is not in `earlier`.
    """
    for _ in range(_FRUITLESS):
        key, question, answer = FAMILIES[family](draw)
        if part_of(family, key) == split and question not in earlier:
            return Problem(family=family, question=question, answer=answer)
    return None


def _check(split: str, count: int, families: Sequence[str], largest: int) -> None:
    if split not in ("train", "test"):
        raise ValueError(f"part must be 'train' or 'test', got {split!r}")
    if count < 1:
        raise ValueError(f"count must be positive, got {count}")
    if largest < 4:
        raise ValueError(f"largest must be at least 4, got {largest}")
    if not families or len(set(families)) < len(families):
        raise ValueError(f"families must be one or more, each once, got {families}")
    for family in families:
        if family not in FAMILIES:
            raise ValueError(f"families are {', '.join(FAMILIES)}; got {family!r}")
