"""Tests that no program runs code from a file: nothing unpickles or evaluates."""

import ast
import json
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FOLDERS = ("coat_jax", "pallas_kernels", "experiments")
# Modules and functions with readers that can run code that is in a file.
_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch"}
_MODULES |= {"yaml", "runpy", "importlib.machinery"}
_CALLS = {"eval", "exec", "compile", "__import__", "read_pickle", "allow_pickle"}


def dangers(source: str) -> set[str]:
    """Returns the modules and calls in a source that could run code from a file."""
    actual = set()
    if not re.search(rf"\b({'|'.join(_MODULES | _CALLS)})\b", source):
        return actual
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            actual |= {alias.name for alias in node.names} & _MODULES
        elif isinstance(node, ast.ImportFrom):
            actual |= {node.module} & _MODULES
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                actual |= {node.func.id} & _CALLS
            for keyword in node.keywords:
                safe = isinstance(keyword.value, ast.Constant) and (
                    keyword.value.value is False
                )
                actual |= ({keyword.arg} & _CALLS) if not safe else set()
    return actual


def sources():
    for folder in _FOLDERS:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(_ROOT)), path.read_text()
        for path in sorted((_ROOT / folder).rglob("*.ipynb")):
            cells = json.loads(path.read_text())["cells"]
            code = [c["source"] for c in cells if c["cell_type"] == "code"]
            lines = [line.rstrip("\n") for cell in code for line in cell]
            lines = [line for line in lines if not line.startswith(("%", "!"))]
            yield str(path.relative_to(_ROOT)), "\n".join(lines)


def test_no_program_reads_pickles_or_evaluates():
    actual = {name: dangers(source) for name, source in sources()}
    assert len(actual) > 100
    assert not {name for name, names in actual.items() if names}


@pytest.mark.parametrize(
    ("source", "danger"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("import numpy as np\nnp.load(f, allow_pickle=True)", "allow_pickle"),
        ("np.load(f, allow_pickle=flag)", "allow_pickle"),
        ("eval(text)", "eval"),
        ("def f():\n  exec(open(path).read())", "exec"),
        ("import yaml", "yaml"),
    ],
)
def test_dangers_are_found(source, danger):
    assert danger in dangers(source)
    assert not dangers("import json\nnp.load(f, allow_pickle=False)\nmodel.eval()")
