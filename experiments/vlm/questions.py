"""Questions and captions that follow from the annotation of a scene."""

from typing import Literal, NamedTuple, get_args

import numpy as np

from experiments.vlm.pictures import DIGIT, NAMES
from experiments.vlm.scenes import COLORS, MOST_DIGITS, Scene, places

Kind = Literal["caption", "presence", "count", "place", "color", "sum"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CATEGORIES = (*NAMES, DIGIT)
# The largest sum of distinct digits.
_LARGEST_SUM = sum(range(10 - MOST_DIGITS, 10))
_NOTHING = "nothing"


class Question(NamedTuple):
    """A question and its answer, as words that spaces separate.

    Attributes:
      kind: The kind of question.
      question: The question.
      answer: The answer.
    """

    kind: Kind
    question: str
    answer: str


def caption(scene: Scene) -> str:
    """Returns the caption of a scene: the place, name and color of each thing."""
    names = places(scene.grid)
    return " , ".join(
        f"{names[thing.cell]} : {thing.name} on {thing.color}" for thing in scene.things
    )


def ask(
    rng: np.random.Generator, scene: Scene, kind: Kind, all_names: list[str]
) -> Question | None:
    """Returns a random question of a kind, or None if the scene allows none.

    About half of the questions of the kind "presence" have the answer "no".

    Args:
      rng: The source of random choices.
      scene: The scene.
      kind: The kind of question.
      all_names: The names of all things, in the scene or not.
    """
    thing = scene.things[rng.integers(len(scene.things))]
    match kind:
        case "caption":
            return Question(kind, "describe the picture", caption(scene))
        case "presence":
            present = {thing.name for thing in scene.things}
            absent = [name for name in all_names if name not in present]
            yes = rng.random() < 0.5
            name = thing.name if yes else str(rng.choice(absent))
            return Question(kind, f"is there {name}", "yes" if yes else "no")
        case "count":
            category = str(rng.choice(CATEGORIES))
            if rng.random() < 0.7:
                category = thing.category
            count = sum(each.category == category for each in scene.things)
            return Question(kind, f"how many {category} things", str(count))
        case "place":
            names = {each.cell: each.name for each in scene.things}
            cell = int(rng.integers(scene.grid**2))
            if rng.random() < 0.7:
                cell = thing.cell
            location = places(scene.grid)[cell]
            return Question(kind, f"what is at {location}", names.get(cell, _NOTHING))
        case "color":
            return Question(kind, f"which color is behind {thing.name}", thing.color)
        case "sum":
            if not scene.digits:
                return None
            return Question(kind, "what is the sum of digits", str(sum(scene.digits)))


def words(grid: int, names_of_things: list[str]) -> list[str]:
    """Returns the distinct words of questions and answers about scenes."""
    texts = (
        "describe the picture , : is there yes no how many things what is at which",
        f"color behind on the sum of digits {_NOTHING}",
        *CATEGORIES,
        *places(grid),
        *COLORS,
        *names_of_things,
        *map(str, range(_LARGEST_SUM + 1)),
    )
    return list(dict.fromkeys(" ".join(texts).split()))
