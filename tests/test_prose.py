"""Tests the wording of docstrings and comments, and that names describe values."""

import ast
import collections
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_FOLDERS = ("coat_jax", "experiments", "pallas_kernels", "tests")
_FILES = sorted(path for folder in _FOLDERS for path in (_ROOT / folder).rglob("*.py"))
# No sentence that says what a thing is or does begins with one of these words.
_NOT_IN_COMMENTS = """
    Of What Whose Which Who Or Nor Than That Those Not Such Also Likewise Besides Beside
    And By Like So From Whether How Why As For With To
"""
_NOT_IN_DOCSTRINGS = _NOT_IN_COMMENTS + "Where Both Either One It If In At On"

# A noun in their place says at once what is meant. Words in backticks are names.
_ROUNDABOUT = re.compile(
    r"\b(that of|those of|(?:one|two|some|most) of which|whose|behind|beside)\b(?!:)",
    re.IGNORECASE,
)
# Local names that say nothing of the value that they stand for.
_GENERIC = """
    found given own made behind before rest others known kept part place answer whole
    wanted ran added read held there left taken said told met asked beside apart done
    once ones seen got way what
"""
_MOST_GENERIC = 0.015
# Folders that have more than the others may have, with the most roundabout phrases and
# generic names of each. The numbers may only fall; a folder goes from here with them.
_LIMITS = {
    "coat_jax/layers": (0, 19),
    "coat_jax/models": (0, 16),
    "coat_jax/optimizers": (32, 58),
    "pallas_kernels/ops": (24, 105),
}


def _first_word(text: str) -> str:
    actual = re.match(r"[A-Za-z]+", text)
    return actual[0] if actual else ""


_parsed = functools.cache(ast.parse)


@functools.cache
def _docstrings(source: str) -> list[tuple[int, str]]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [
        (getattr(node, "lineno", 1), text)
        for node in ast.walk(_parsed(source))
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
    ]


def _comments(source: str):
    """Yields the row and text of each comment's first line.

    Yields nothing if no comment line of the source begins with a forbidden word.
    """
    if not re.search(rf"# *({'|'.join(_NOT_IN_COMMENTS.split())})\b", source):
        return
    lines, end = source.splitlines(), 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row = token.start[0]
            alone = lines[row - 1].lstrip().startswith("#")
            if not (alone and end == row - 1):
                yield row, token.string.lstrip("# ")
            end = row if alone else 0


def test_sentences_begin_with_their_subject_or_verb():
    wrong = []
    for path in _FILES:
        source = path.read_text()
        for texts, words in (
            (_docstrings(source), _NOT_IN_DOCSTRINGS.split()),
            (_comments(source), _NOT_IN_COMMENTS.split()),
        ):
            wrong += [
                f"{path.relative_to(_ROOT)}:{row}: {text.splitlines()[0]}"
                for row, text in texts
                if _first_word(text) in words
            ]
    assert not wrong


def test_docstrings_end_in_a_full_stop():
    wrong = [
        f"{path.relative_to(_ROOT)}:{row}: {text}"
        for path in _FILES
        for row, text in _docstrings(path.read_text())
        if len(text.splitlines()) == 1 and not text.endswith((".", ":"))
    ]
    assert not wrong


def _folder(path: Path) -> str:
    """Returns the folder of a file, relative to the root and at most two names long."""
    return "/".join(path.relative_to(_ROOT).parent.parts[:2])


def _blocks(source: str) -> Iterator[str]:
    """Yields each docstring, and each run of successive comment lines as one text."""
    for _, text in _docstrings(source):
        yield text
    lines = [line.strip() for line in source.splitlines()]
    comments = [line[1:] if line.startswith("#") else "\n" for line in lines]
    yield from " ".join(comments).split("\n")


_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.comprehension


def _local_names(tree: ast.AST) -> Iterator[str]:
    """Yields the names of arguments and the names that functions assign."""
    scopes = (node for node in ast.walk(tree) if isinstance(node, _SCOPES))
    nodes = {id(node): node for scope in scopes for node in ast.walk(scope)}
    for node in nodes.values():
        if isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


_BY_FOLDER = collections.defaultdict(list)
for _path in _FILES:
    _BY_FOLDER[_folder(_path)].append(_path)


@pytest.mark.parametrize("folder", _BY_FOLDER)
def test_sentences_have_nouns_in_place_of_pronouns(folder):
    phrases = [
        f"{path.name}: {' '.join(block.split())[:60]}: {phrase[0]}"
        for path in _BY_FOLDER[folder]
        for block in _blocks(path.read_text())
        for phrase in _ROUNDABOUT.finditer(" ".join(re.sub("`.*?`", "", block).split()))
    ]
    most, _ = _LIMITS.get(folder, (0, 0))
    assert len(phrases) <= most, "\n".join(phrases)


@pytest.mark.parametrize("folder", _BY_FOLDER)
def test_local_names_say_what_values_are(folder):
    names = collections.Counter(
        name.strip("_")
        for path in _BY_FOLDER[folder]
        for name in _local_names(_parsed(path.read_text()))
    )
    generic = {name: count for name, count in names.items() if name in _GENERIC.split()}
    _, most = _LIMITS.get(folder, (0, _MOST_GENERIC * names.total()))
    assert sum(generic.values()) <= most, generic


@pytest.mark.parametrize(
    ("source", "phrases", "names"),
    [
        ('"""The size is that of `x`."""', 1, 0),
        ("# A row, one of\n# which is behind `beside`.", 2, 0),
        ("def f(x, rest):\n    found = [own for own in x]\n    return found", 0, 3),
        ("before = 1\nclass C:\n    kept: int = 2", 0, 0),
    ],
)
def test_phrases_and_names_are_counted(source, phrases, names):
    texts = (" ".join(re.sub("`.*?`", "", b).split()) for b in _blocks(source))
    assert sum(len(_ROUNDABOUT.findall(text)) for text in texts) == phrases
    assert (
        sum(name in _GENERIC.split() for name in _local_names(_parsed(source))) == names
    )
