"""Tests of callable pytrees, such as Equinox modules, under `fp8_remat` and `fp8`."""

import copy
import dataclasses
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers.gradients import flat

import coat_jax as coat

pytestmark = pytest.mark.internals

WIDTH = 128
X = jax.random.normal(jax.random.key(0), (64, WIDTH))


def weights(number):
    keys = jax.random.split(jax.random.key(number), 2)
    return [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys]


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    scale: float = eqx.field(static=True)

    def __init__(self, key, scale=1.0):
        first, second = jax.random.split(key)
        self.up = eqx.nn.Linear(WIDTH, 256, key=first)
        self.down = eqx.nn.Linear(256, WIDTH, key=second)
        self.scale = scale

    def __call__(self, x, *, key=None):
        return x + self.scale * self.forward(x)

    def forward(self, x):
        return jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))


class Tower(eqx.Module):
    embed: eqx.nn.Linear
    layers: list[Block]
    method: str = eqx.field(static=True, default="__call__")

    def __call__(self, x):
        x = jax.vmap(self.embed)(x)
        for block in self.layers:
            x = getattr(block, self.method)(x)
        return x


class Stack(eqx.Module):
    layers: Block

    def __call__(self, x):
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        def step(x, arrays):
            return eqx.combine(arrays, static)(x), None

        return jax.lax.scan(step, x, arrays)[0]


@jax.tree_util.register_pytree_node_class
class Plain:
    """A callable pytree class without Equinox, with two arrays and a static scale."""

    def __init__(self, first, second, scale):
        assert not isinstance(first, int)
        self.first, self.second, self.scale = jnp.asarray(first), second, scale

    def tree_flatten(self):
        return (self.first, self.second), self.scale

    @classmethod
    def tree_unflatten(cls, scale, children):
        return cls(*children, scale)

    def __call__(self, x, power=1):
        return (jnp.tanh(x @ self.first) @ self.second) ** power * self.scale


@struct.dataclass
class Dataclass:
    first: jax.Array
    second: jax.Array
    scale: float = struct.field(pytree_node=False)
    __call__ = Plain.__call__


class Node(struct.PyTreeNode):
    first: jax.Array
    second: jax.Array
    scale: float = struct.field(pytree_node=False)
    __call__ = Plain.__call__


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    first: jax.Array
    second: jax.Array
    scale: float = dataclasses.field(metadata={"static": True})

    def __call__(self, x, power=1):
        return Plain.__call__(self, x, power)


MAKERS = {
    "equinox": lambda: Block(jax.random.key(0)),
    "class": lambda: Plain(*weights(0), 0.5),
    "flax dataclass": lambda: Dataclass(*weights(0), 0.5),
    "flax node": lambda: Node(*weights(0), 0.5),
    "slots": lambda: Slots(*weights(0), 0.5),
    "partial": lambda: jax.tree_util.Partial(Plain.__call__, Plain(*weights(0), 0.5)),
    "bound method": lambda: Block(jax.random.key(0)).forward,
}
KINDS = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
WRAPS = pytest.mark.parametrize("wrap", [coat.fp8_remat, coat.fp8])


def of_arrays(module):
    """Returns a function of a module's arrays and an input, the arrays, and `X`."""
    leaves, tree = jax.tree.flatten(module)
    arrays = {i: x for i, x in enumerate(leaves) if eqx.is_array(x)}

    def call(arrays, x):
        return jax.tree.unflatten(tree, (dict(enumerate(leaves)) | arrays).values())(x)

    return call, arrays, X


def nearly(light, plain):
    """Asserts that the gradients of two modules differ, but by less than 15%."""

    def gradient(module):
        call, arrays, x = of_arrays(module)
        compute = jax.jit(jax.grad(lambda arrays: jnp.mean(call(arrays, x) ** 2)))
        return flat(compute(arrays))

    actual, expected = gradient(light), gradient(plain)
    difference = np.linalg.norm(actual - expected)
    assert 0 < difference < 0.15 * np.linalg.norm(expected)


@KINDS
@WRAPS
def test_a_module_keeps_its_leaves_and_saves_fp8(make, wrap):
    plain = make()
    light = wrap(plain)
    assert isinstance(light, type(plain))
    assert type(light).__name__ == type(plain).__name__
    for a, b in zip(jax.tree.leaves(light), jax.tree.leaves(plain), strict=True):
        assert a is b
    report = coat.residual_report(*of_arrays(light))
    initial = coat.residual_report(*of_arrays(plain))
    assert "float8" in str(report)
    assert report.nbytes < initial.nbytes / 2


@KINDS
def test_modules_of_one_class_stay_of_one_structure(make):
    first, second = coat.fp8_remat(make()), coat.fp8_remat(make())
    if not isinstance(first, jax.tree_util.Partial):
        assert jax.tree.structure(first) == jax.tree.structure(second)
        assert type(coat.fp8(make())) is type(coat.fp8(make()))
        assert type(copy.deepcopy(first)) is type(first)
    doubled = jax.tree.map(lambda x: x if callable(x) else 2 * x, first)
    assert type(doubled) is type(first)


def test_a_wrapped_module_pickles():
    for light in (coat.fp8_remat(Slots(*weights(0), 0.5)), coat.fp8_remat(
            Block(jax.random.key(0)))):  # fmt: skip
        twin = pickle.loads(pickle.dumps(light))
        assert type(twin) is type(light)
        np.testing.assert_array_equal(twin(X), light(X))


@pytest.mark.parametrize("method", ["__call__", "forward"])
def test_blocks_of_an_equinox_model(method):
    keys = jax.random.split(jax.random.key(0), 3)
    embed = eqx.nn.Linear(WIDTH, WIDTH, key=keys[0])
    plain = Tower(embed, [Block(k) for k in keys[1:]], method)
    light = coat.fp8(plain)
    assert type(light) is Tower
    assert light.embed is embed
    assert jax.tree.structure(light.layers[0]) == jax.tree.structure(light.layers[1])
    report = coat.fp8_report(light, X)
    assert report.called == ("layers/0", "layers/1")
    assert [row.parameter for row in report.rows] == ["up/weight", "down/weight"] * 2
    assert all(row.converted for row in report.rows)
    one = coat.fp8(plain, blocks="layers/1", matmuls=".*/up/weight")
    (row,) = (row for row in coat.fp8_report(one, X).rows if row.converted)
    assert (row.block, row.parameter) == ("layers/1", "up/weight")
    none = coat.fp8(plain, matmuls=[])
    assert not any(row.converted for row in coat.fp8_report(none, X).rows)
    np.testing.assert_array_equal(none(X), plain(X))
    nearly(none, plain)


def test_a_stack_of_an_equinox_model_is_named():
    stack = eqx.filter_vmap(Block)(jax.random.split(jax.random.key(0), 2))
    nearly(coat.fp8(Stack(stack), blocks="layers"), Stack(stack))


@pytest.mark.parametrize(
    ("kind", "wrap"), [("class", coat.fp8_remat), ("slots", coat.fp8)]
)
def test_gradients_of_a_class_are_nearly_the_same(kind, wrap):
    nearly(wrap(MAKERS[kind]()), MAKERS[kind]())


@eqx.filter_jit
def _step(model, x):
    return eqx.filter_value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)


@WRAPS
def test_equinox_transformations_take_the_module(wrap):
    light = wrap(Block(jax.random.key(0)))
    loss, grads = _step(light, X)
    stepped = eqx.apply_updates(light, jax.tree.map(lambda g: -0.1 * g, grads))
    assert type(stepped) is type(light)
    assert _step(stepped, X)[0] < loss


def test_small_equinox_modules_are_refused():
    mlp = eqx.nn.MLP(128, 128, 500, 2, key=jax.random.key(0))
    with pytest.raises(ValueError, match="500 outputs are no multiple of 16"):
        coat.fp8(mlp)(X[0])


def test_a_pytree_without_arrays_is_a_function():
    light = coat.fp8_remat(eqx.nn.Lambda(jax.nn.gelu))
    np.testing.assert_array_equal(light(X), jax.nn.gelu(X))


class Pair(tuple):
    def __call__(self, x):
        return jnp.tanh(x @ self[0]) @ self[1]


jax.tree_util.register_pytree_node(Pair, lambda p: (p, None), lambda _, c: Pair(c))


@WRAPS
def test_a_pytree_that_cannot_be_subclassed_is_refused_with_a_way(wrap):
    with pytest.raises(TypeError, match=r"pytree class Pair .* wrap a function of it"):
        wrap(Pair(weights(0)))
    light = wrap(lambda module, x: module(x))
    assert light(Pair(weights(0)), X).shape == X.shape
