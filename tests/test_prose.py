"""Tests that docstrings and comments begin as sentences do."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_FOLDERS = (
    "coat_jax",
    "experiments",
    "pallas_kernels",
    "tests",
)
_FILES = sorted(path for folder in _FOLDERS for path in (_ROOT / folder).rglob("*.py"))
# No sentence that says what a thing is or does begins with one of these words.
_NOT_IN_COMMENTS = """
    Of What Whose Which Who Or Nor Than That Those Not Such Also Likewise Besides Beside
    And By Like So From Whether How Why As For With To
"""
_NOT_IN_DOCSTRINGS = _NOT_IN_COMMENTS + "Where Both Either One It If In At On"


def _first_word(text: str) -> str:
    found = re.match(r"[A-Za-z]+", text)
    return found[0] if found else ""


def _docstrings(source: str):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def _comments(source: str):
    """Yields the first line of each comment."""
    lines, end = source.splitlines(), 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row = token.start[0]
            alone = lines[row - 1].lstrip().startswith("#")
            if not (alone and end == row - 1):
                yield row, token.string.lstrip("# ")
            end = row if alone else 0


@pytest.mark.parametrize("path", _FILES, ids=lambda p: str(p.relative_to(_ROOT)))
def test_sentences_begin_with_their_subject_or_verb(path):
    source = path.read_text()
    wrong = [
        f"{row}: {text.splitlines()[0]}"
        for row, text in _docstrings(source)
        if _first_word(text) in _NOT_IN_DOCSTRINGS.split()
    ]
    wrong += [
        f"{row}: {text}"
        for row, text in _comments(source)
        if _first_word(text) in _NOT_IN_COMMENTS.split()
    ]
    assert not wrong


@pytest.mark.parametrize("path", _FILES, ids=lambda p: str(p.relative_to(_ROOT)))
def test_docstrings_end_in_a_full_stop(path):
    wrong = [
        f"{row}: {text}"
        for row, text in _docstrings(path.read_text())
        if len(text.splitlines()) == 1 and not text.endswith((".", ":"))
    ]
    assert not wrong
