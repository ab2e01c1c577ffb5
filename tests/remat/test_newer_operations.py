"""Tests operations of jax 0.12 that programs are read without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from coat_jax.programs.graph import written_out

pytestmark = pytest.mark.internals

FORMS = {
    "stack": lambda x: jnp.stack([x, 2 * x], axis=1),
    "stack of one": lambda x: jnp.stack([x]),
    "unstack": lambda x: jnp.unstack(x, axis=1),
    "loop": lambda x: [row * i for i, row in enumerate(x)],
    "tile": lambda x: jnp.tile(x, (2, 1, 3)),
    "tile of fewer axes": lambda x: jnp.tile(x, 2),
    "tile of more axes": lambda x: jnp.tile(x, (2, 1, 1, 1)),
    "gradient of unstack": jax.grad(lambda x: jnp.unstack(x)[1].sum()),
    "gradient of tile": jax.grad(lambda x: (jnp.tile(x, (2, 1, 1)) ** 2).sum()),
    "jitted": jax.jit(lambda x: jnp.stack(jnp.unstack(x), axis=-1)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_they_are_written_in_older_ones(form):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.float32)
    closed = jax.make_jaxpr(form)(x)
    program = written_out(closed.jaxpr)
    names = {eqn.primitive.name for eqn in program.eqns}
    assert names.isdisjoint({"stack", "tile", "unstack"})
    results = core.jaxpr_as_fun(core.ClosedJaxpr(program, closed.consts))(x)
    for result, expected in zip(results, jax.tree.leaves(form(x)), strict=True):
        np.testing.assert_array_equal(result, expected)
