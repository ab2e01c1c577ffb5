"""Tests of optimizers of parameters with partitioning metadata, on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from helpers.marks import slow, slow_except
from helpers.optimizers import is_quantized
from helpers.versions import as_pure
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import coat_jax as coat

pytestmark = pytest.mark.distributed
# Specs of a kernel [64, 1024]; the last ones cut groups of 128.
SPECS = {
    "rows": ("x", None),
    "columns": (None, "x"),
    "both": ("x", "y"),
    "tuple": (None, ("x", "y")),
    "rows on both": (("x", "y"), None),
}
X = jnp.ones((8, 64))


def _mesh(names=("x", "y")):
    return jax.make_mesh((2, 4), names, axis_types=(AxisType.Auto,) * 2)


def _initializer(module, spec):
    return module.with_partitioning(module.initializers.lecun_normal(), spec)


def _steps(tx, params, grads_of):
    """Returns parameters after two steps without any metadata, on one device."""

    @jax.jit
    def step(params, state):
        updates, state = tx.update(grads_of(params), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(2):
        params, state = step(params, state)
    return params


@pytest.mark.filterwarnings("ignore:a parameter of shape")
@pytest.mark.parametrize("spec", slow_except(["both"], SPECS))
@pytest.mark.parametrize("jit", [slow(False), True])
def test_an_nnx_optimizer_is_made_and_steps(spec, jit):
    # Every second spec has the narrow kernel, under jit the others.
    width = (1024, 256)[(list(SPECS).index(spec) + jit) % 2]
    tx = coat.fp8_adamw(1e-2)

    def loss(model):
        return jnp.mean(model(X) ** 2)

    plain = nnx.Linear(64, width, rngs=nnx.Rngs(0))
    params = as_pure(nnx.state(plain, nnx.Param))
    graph = nnx.graphdef(plain)
    expected = _steps(tx, params, jax.grad(lambda p: loss(nnx.merge(graph, p))))
    with jax.set_mesh(_mesh()):
        model = nnx.Linear(
            64, width, kernel_init=_initializer(nnx, SPECS[spec]), rngs=nnx.Rngs(0)
        )
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        def step(model, optimizer):
            optimizer.update(model, nnx.grad(loss)(model))

        for _ in range(2):
            (nnx.jit(step) if jit else step)(model, optimizer)
    moment = optimizer.opt_state[0].mu["kernel"]
    assert is_quantized(moment)
    assert tuple(moment.codes.get_metadata()["out_sharding"]) == SPECS[spec]
    if width == 1024:  # No device cuts a group.
        where = jax.NamedSharding(_mesh(), P(*SPECS[spec]))
        assert moment.codes[...].sharding.is_equivalent_to(where, 2)
    np.testing.assert_allclose(
        np.asarray(model.kernel[...]), np.asarray(expected["kernel"]), atol=2e-4
    )


@pytest.mark.parametrize("spec", slow_except(["both"], SPECS))
@pytest.mark.parametrize("width", [1024, 256])
def test_flaxs_recipe_for_sharded_train_states(spec, width):
    """`nn.get_sharding` of the abstract state works as `out_shardings`."""
    mesh, tx = _mesh(), coat.fp8_adamw(1e-2)
    model = nn.Dense(width, kernel_init=_initializer(nn, SPECS[spec]))

    def loss(params, model):
        return jnp.mean(model.apply({"params": params}, X) ** 2)

    def create(key):
        params = model.init(key, X)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    key = jax.random.key(0)
    shardings = nn.get_sharding(jax.eval_shape(create, key), mesh)
    state = jax.jit(create, out_shardings=shardings)(key)
    moment = state.opt_state[0].mu["kernel"]
    assert is_quantized(moment)
    assert moment.codes.names == SPECS[spec]
    assert moment.codes.value.sharding.spec == P(*SPECS[spec])

    @jax.jit
    def step(state):
        return state.apply_gradients(grads=jax.grad(loss)(state.params, model))

    plain = nn.Dense(width)
    expected = _steps(
        tx, plain.init(key, X)["params"], jax.grad(lambda p: loss(p, plain))
    )
    state = step(step(state))
    np.testing.assert_allclose(
        np.asarray(state.params["kernel"].value),
        np.asarray(expected["kernel"]),
        atol=2e-4,
    )


def test_scales_keep_the_spec_where_devices_hold_whole_groups():
    with jax.set_mesh(_mesh()):
        model = nnx.Linear(
            64, 1024, kernel_init=_initializer(nnx, (None, "x")), rngs=nnx.Rngs(0)
        )
        state = coat.fp8_adamw(1e-3).init(nnx.state(model, nnx.Param))
    moment = state[0].nu["kernel"]
    for piece in (moment.scale, moment.exponent):
        assert piece[...].sharding.spec == P(None, "x")


@pytest.mark.parametrize("stored", ["to_optax_state", "report"])
def test_states_of_boxed_parameters_are_read(stored):
    model = nn.Dense(256, kernel_init=_initializer(nn, (None, "x")))
    params = model.init(jax.random.key(0), X)["params"]
    tx = coat.fp8_adamw(1e-3)
    _, state = tx.update(params, tx.init(params), params)
    if stored == "report":
        assert len(coat.moment_report(state).rows()) == 2
        return
    wide = coat.to_optax_state(state)
    assert isinstance(wide[0].mu["kernel"], nn.Partitioned)
    assert wide[0].mu["kernel"].names == (None, "x")
    again = coat.from_optax_state(wide, state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
