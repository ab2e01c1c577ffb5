"""Tests that public names have docstrings, and that examples in docstrings run."""

import doctest
import importlib.util
import inspect
import pkgutil
from pathlib import Path

import pytest
from helpers.marks import slow

import coat_jax
import pallas_kernels


def modules() -> list[str]:
    names = []
    for package in (coat_jax, pallas_kernels):
        actual = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        names += [package.__name__, *(module.name for module in actual)]
    return names


def with_examples() -> list[str]:
    files = {name: importlib.util.find_spec(name).origin for name in modules()}
    return [name for name, file in files.items() if ">>>" in Path(file).read_text()]


# Examples in these modules compile whole models.
WHOLE_MODELS = ["coat_jax.models.llama", "coat_jax.models.vit"]


@pytest.mark.parametrize(
    "name", [slow(n) if n in WHOLE_MODELS else n for n in with_examples()]
)
def test_examples_run(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted
    assert not results.failed


def test_public_names_are_documented():
    names = coat_jax.__all__
    assert not [name for name in names if not getattr(coat_jax, name).__doc__]


def test_public_functions_have_an_example():
    finder = doctest.DocTestFinder(exclude_empty=True)
    public = {name: getattr(coat_jax, name) for name in coat_jax.__all__}
    functions = {k: fn for k, fn in public.items() if inspect.isfunction(fn)}
    assert len(functions) > 10
    examples = {k: [t.examples for t in finder.find(fn)] for k, fn in functions.items()}
    assert not [name for name, tests in examples.items() if not any(tests)]
