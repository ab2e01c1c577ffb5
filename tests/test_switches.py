"""Tests of functions under JAX's switches, in JAX's transformations.

Where the plain twin of optax, JAX or Flax works, the library's function must work.
"""

import pytest
from helpers import switches
from helpers.marks import slow


def _cells():
    """Yields each function with each switch, of which all but a third are slow."""
    for i, function in enumerate(switches.cases()):
        for j, switch in enumerate(switches.SWITCHES):
            cell = function, switch
            yield slow(*cell) if (i + j) % 3 else cell


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("function", "switch"), list(_cells()))
def test_functions_work_where_their_plain_twins_do(function, switch):
    text, wrong = switches.cell(function, switch)
    assert not wrong
    assert text == switches.read_page()[function, switch]


def test_the_page_is_rendered_from_these_cells():
    assert switches.render(switches.read_page()) == switches.PAGE.read_text()
