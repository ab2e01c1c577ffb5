"""Tests that the examples in docstrings run."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import coat_jax
import pallas_kernels


def modules() -> list[str]:
    names = []
    for package in (coat_jax, pallas_kernels):
        actual = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        names += [package.__name__, *(module.name for module in actual)]
    return names


@pytest.mark.parametrize("name", modules())
def test_examples_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", coat_jax.__all__)
def test_public_names_are_documented(name):
    assert getattr(coat_jax, name).__doc__


@pytest.mark.parametrize(
    "name", [n for n in coat_jax.__all__ if inspect.isfunction(getattr(coat_jax, n))]
)
def test_public_functions_have_an_example(name):
    finder = doctest.DocTestFinder(exclude_empty=True)
    assert any(test.examples for test in finder.find(getattr(coat_jax, name)))
