"""Tests the library's functions under JAX's switches, in JAX's transformations.

A function must work wherever its counterpart of optax, JAX or Flax works.
"""

import itertools

import pytest
from helpers import switches
from helpers.marks import slow

# Every function with one switch and every switch with one function at least. In this
# order the layer, which takes the longest, has a switch of few transformations. It is
# slow, and `tests/remat/test_remat_reuse.py` has leak checks, too.
_FUNCTIONS = [*list(switches.cases())[2:], *list(switches.cases())[:2]]
_SOME = list(zip(itertools.cycle(_FUNCTIONS), switches.SWITCHES, strict=False))


def _checked(function: str, switch: str) -> None:
    text, wrong = switches.cell(function, switch)
    assert not wrong
    assert text == switches.read_page()[function, switch]


@pytest.mark.parametrize(
    ("function", "switch"),
    [slow(*cell) if cell[0].startswith("DecoderLayer") else cell for cell in _SOME],
)
def test_functions_work_where_their_plain_twins_do(function, switch):
    _checked(function, switch)


@pytest.mark.slow
@pytest.mark.parametrize("function", switches.cases())
def test_all_functions_work_with_all_switches(function):
    for switch in switches.SWITCHES:
        if (function, switch) not in _SOME:
            _checked(function, switch)


def test_the_page_is_rendered_from_these_cells():
    assert switches.render(switches.read_page()) == switches.PAGE.read_text()
