"""The data of `experiments.vlm`: images, and questions as tokens."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32, UInt8
from tqdm import tqdm

from experiments.vlm import pictures, questions, scenes
from experiments.vlm.questions import KINDS, Question
from experiments.vlm.scenes import Scene
from experiments.vlm.settings import VlmSettings

PAD, IMAGE, END = 0, 1, 2
_SPECIAL = ("<pad>", "<image>", "<end>")


class Vocabulary:
    """The words of all questions and answers, as tokens.

    Args:
      words: The distinct words.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = [*_SPECIAL, *words]
        self._ids = {word: i for i, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of the words of a text, which spaces separate.

        Raises:
          ValueError: If a word is not in the vocabulary.
        """
        for word in (words := text.split()):
            if word not in self._ids:
                raise ValueError(f"{word!r} is not in the vocabulary")
        return [self._ids[word] for word in words]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the words of tokens up to the first end token."""
        numbers = list(map(int, tokens))
        numbers = numbers[: numbers.index(END)] if END in numbers else numbers
        return " ".join(self.words[token] for token in numbers)


class Batch(NamedTuple):
    """Sequences that consist of an image, a question and its answer.

    Attributes:
      images: The images.
      tokens: The tokens: image tokens, the question, the answer, an end token, padding.
      is_answer: Whether each token belongs to an answer or is its end token.
    """

    images: UInt8[np.ndarray, "b size size 3"]
    tokens: Int32[np.ndarray, "b length"]
    is_answer: Bool[np.ndarray, "b length"]


class Examples(NamedTuple):
    """Scenes, their images, and questions about them.

    Attributes:
      scenes: The annotations.
      images: The image of each scene.
      questions: The questions.
      which: The index of each question's scene.
      tokens: The tokens of each question, as in a `Batch`.
      is_answer: Whether each token belongs to an answer or is its end token.
    """

    scenes: list[Scene]
    images: UInt8[np.ndarray, "n size size 3"]
    questions: list[Question]
    which: Int[np.ndarray, " m"]
    tokens: Int32[np.ndarray, "m length"]
    is_answer: Bool[np.ndarray, "m length"]

    def batch(self, chosen: Int[np.ndarray, " b"]) -> Batch:
        """Returns the questions with the indices `chosen`, and their images."""
        images = self.images[self.which[chosen]]
        return Batch(images, self.tokens[chosen], self.is_answer[chosen])


class Data(NamedTuple):
    """All data of a run.

    Attributes:
      vocabulary: The vocabulary.
      train: The examples for training: for each scene a question of every kind that the
        scene allows.
      test: The examples for tests: one question about each scene. Kinds alternate.
    """

    vocabulary: Vocabulary
    train: Examples
    test: Examples


class _Source(NamedTuple):
    """The pictures for scenes, the names of all things, and the vocabulary."""

    train: pictures.Pictures
    test: pictures.Pictures
    known: list[str]
    vocabulary: Vocabulary


def make(settings: VlmSettings) -> Data:
    """Draws and renders a run's scenes; returns all data with their questions.

    The data depend only on the settings.

    Raises:
      ValueError: If drawings would have fewer than 8 pixels in height and width.
    """
    source = _source(settings)
    numbered = _all_kinds(settings, source.train, source.known)
    train = _examples(settings, source, source.train, numbered)
    return Data(source.vocabulary, train, _test(settings, source))


def make_test(settings: VlmSettings) -> Examples:
    """Returns the examples for tests that `make` returns, and makes no others."""
    return _test(settings, _source(settings))


def _source(settings: VlmSettings) -> _Source:
    pools = pictures.load(settings.picture_size, settings.names_per_category)
    names = [*pools[0].drawings, *map(str, range(10))]
    return _Source(*pools, names, Vocabulary(questions.words(settings.grid, names)))


def _test(settings: VlmSettings, source: _Source) -> Examples:
    numbered = _kinds_in_turn(settings, source.test, source.known)
    return _examples(settings, source, source.test, numbered)


def _examples(
    settings: VlmSettings,
    source: _Source,
    pool: pictures.Pictures,
    numbered: Iterator["_Numbered"],
) -> Examples:
    items = list(numbered)
    rng = np.random.default_rng((settings.data_seed, int(pool.is_test)))
    drawn: dict[int, Scene] = dict((index, scene) for index, scene, _ in items)
    order = tqdm(range(len(drawn)), desc="scenes", unit="scene", disable=None)
    images = [scenes.render(rng, drawn[i], pool) for i in order]
    questions_asked = [question for _, _, question in items]
    tokens, is_answer = _sequences(questions_asked, source.vocabulary, settings)
    return Examples(
        scenes=[drawn[i] for i in range(len(drawn))],
        images=np.stack(images),
        questions=questions_asked,
        which=np.array([index for index, _, _ in items]),
        tokens=tokens,
        is_answer=is_answer,
    )


def batches(data: Data, settings: VlmSettings, seed: int) -> Iterator[Batch]:
    """Yields endless batches of training questions, in a new order in each epoch."""
    rng = np.random.default_rng((settings.data_seed, 2, seed))
    size, total = settings.batch_size, len(data.train.questions)
    while True:
        order = rng.permutation(total)
        for start in range(0, total - size + 1, size):
            yield data.train.batch(order[start : start + size])


def prompt_length(is_answer: Bool[np.ndarray, "*b length"]) -> Int[np.ndarray, "*b"]:
    """Returns the number of tokens before the answer of each sequence."""
    return np.argmax(is_answer, axis=-1)


_Numbered = tuple[int, Scene, Question]


def _all_kinds(
    settings: VlmSettings, pool: pictures.Pictures, names: list[str]
) -> Iterator[_Numbered]:
    """Yields the index of a scene, the scene, and a question about it.

    There is a question of every kind that a scene allows.
    """
    rng = np.random.default_rng((settings.data_seed, 3))
    for index in range(settings.train_scenes):
        scene = scenes.draw_scene(rng, pool, settings.grid, settings.most_things)
        for kind in KINDS:
            if question := questions.ask(rng, scene, kind, names):
                yield index, scene, question


def _kinds_in_turn(
    settings: VlmSettings, pool: pictures.Pictures, names: list[str]
) -> Iterator[_Numbered]:
    """Yields the index of a scene, the scene, and its question; kinds alternate."""
    rng = np.random.default_rng((settings.data_seed, 4))
    for index in range(settings.test_questions):
        question = None
        while question is None:
            scene = scenes.draw_scene(rng, pool, settings.grid, settings.most_things)
            question = questions.ask(rng, scene, KINDS[index % len(KINDS)], names)
        yield index, scene, question


def _sequences(
    questions_asked: Sequence[Question], vocabulary: Vocabulary, settings: VlmSettings
) -> tuple[Int32[np.ndarray, "m length"], Bool[np.ndarray, "m length"]]:
    shape = len(questions_asked), settings.length
    tokens, is_answer = np.full(shape, PAD, np.int32), np.zeros(shape, bool)
    for row, (_, question, answer) in enumerate(questions_asked):
        prompt = [IMAGE] * settings.tokens_per_image + vocabulary.encode(question)
        full = [*prompt, *vocabulary.encode(answer), END]
        tokens[row, : len(full)] = full
        is_answer[row, len(prompt) : len(full)] = True
    return tokens, is_answer
