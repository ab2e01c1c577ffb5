"""Tests of the blocks that `coat.fp8` converts, wherever an NNX model keeps them."""

import copy
import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.converted import converted
from helpers.gradients import assert_close, flat
from helpers.marks import slow

import coat_jax as coat
from coat_jax.convert import matmuls

pytestmark = pytest.mark.internals

WIDTH = 128
X = jax.random.normal(jax.random.key(0), (8, 16, WIDTH))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 256, rngs=rngs)
        self.down = nnx.Linear(256, WIDTH, rngs=rngs)

    def forward(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))

    def __call__(self, x):
        return self.forward(x)


class Pair(NamedTuple):
    first: Block
    second: Block


def in_order(tree):
    is_block = lambda x: isinstance(x, Block)  # noqa: E731
    return [x for x in jax.tree.leaves(tree, is_leaf=is_block) if is_block(x)]


class Tower(nnx.Module, pytree=False):
    """A model that keeps two blocks in any container, under any name."""

    def __init__(self, name, container):
        setattr(self, name, container)
        self.name = name

    def __call__(self, x):
        for block in in_order(getattr(self, self.name)):
            x = block(x)
        return x


def blocks():
    return Block(nnx.Rngs(0)), Block(nnx.Rngs(1))


def runs(fn, *args) -> int:
    """Returns how often the program of `fn` names the dtype of FP8 operands."""
    return str(jax.make_jaxpr(fn)(*args)).count("f8_e4m3fn")


@nnx.jit
def gradient(model):
    return nnx.grad(lambda m: jnp.mean(m(X) ** 2))(model)


def nearly(light, plain):
    """Asserts that the gradients of two models differ, but by less than 15%."""
    actual, expected = flat(gradient(light)), flat(gradient(plain))
    difference = np.linalg.norm(actual - expected)
    assert 0 < difference < 0.15 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("name", "make", "rule", "paths"),
    [
        ("_layers", lambda a, b: nnx.List([a, b]), None, ["_layers/0", "_layers/1"]),
        slow("layers", lambda a, b: [a, b], None, ["layers/0", "layers/1"]),
        ("_layers", lambda a, b: (a, b), None, ["_layers/0", "_layers/1"]),
        slow("layers", lambda a, b: {0: a, 1: b}, None, ["layers/0", "layers/1"]),
        slow("layers", lambda a, b: [[a], [b]], None, ["layers/0/0", "layers/1/0"]),
        ("layers", lambda a, b: [{"x": a}, (b,)], None, ["layers/0/x", "layers/1/0"]),
        ("_h", nnx.Sequential, None, ["_h/layers/0", "_h/layers/1"]),
        slow("c", lambda a, b: {"a": a, "b": b}, "c/.", ["c/a", "c/b"]),
        ("c", lambda a, b: {"a": a, "b": b}, "c/a", ["c/a"]),
        slow("c", lambda a, b: nnx.Dict(a=a, b=b), "c/.", ["c/a", "c/b"]),
        ("c", Pair, "c/(first|second)", ["c/first", "c/second"]),
        slow("c", lambda a, b: nnx.List([a, b]), "c", ["c/0", "c/1"]),
        ("c", lambda a, b: {"a": [a], "b": b}, "c", ["c/a/0", "c/b"]),
    ],
)
def test_blocks_of_any_container_are_converted(name, make, rule, paths):
    plain = Tower(name, make(*blocks()))
    light = coat.fp8(plain, blocks=rule)
    assert converted(light, X) == {*paths}
    assert type(getattr(light, name)) is type(getattr(plain, name))


def test_a_block_in_several_places_is_one_block():
    class Shared(nnx.Module):
        def __init__(self):
            block = Block(nnx.Rngs(0))
            self.first = block
            self.layers = nnx.List([block, block])
            self._last = block

        def __call__(self, x):
            return self._last(self.layers[1](self.layers[0](self.first(x))))

    plain, light = Shared(), coat.fp8(Shared())
    assert light.first is light.layers[0] is light.layers[1] is light._last
    assert type(light.first) is not Block
    nearly(light, plain)
    assert len(jax.tree.leaves(nnx.state(light))) == len(
        jax.tree.leaves(nnx.state(plain))
    )


def test_modules_that_know_their_parent_are_converted():
    class Child(Block):
        def __init__(self, rngs, parent):
            super().__init__(rngs)
            self.parent = parent

    class Parent(nnx.Module, pytree=False):
        def __init__(self):
            self.layers = [Child(nnx.Rngs(i), self) for i in range(2)]

        def __call__(self, x):
            for block in self.layers:
                x = block(x)
            return x

    forward = jax.make_jaxpr(lambda x: jax.vjp(coat.fp8(Parent()), x)[0])
    assert "f8_e4m3fn" in str(forward(X))


def test_a_container_without_a_module_is_refused():
    model = Tower("layers", [nnx.Param(jnp.ones((WIDTH, WIDTH)))])
    with pytest.raises(ValueError, match="chooses 'layers', a list"):
        coat.fp8(model, blocks="layers")


@pytest.mark.parametrize("method", ["forward", slow("__call__"), "_hidden"])
def test_blocks_are_converted_by_whatever_method_is_called(method):
    class Layer(Block):
        def _hidden(self, x):
            return self.forward(x)

        def config(self):
            return {"width": WIDTH}

        def scale(self, x: float) -> float:
            return 2.0 * x

    class Model(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([Layer(nnx.Rngs(i)) for i in range(2)])

        def __call__(self, x):
            for block in self.layers:
                assert block.config() == {"width": WIDTH}
                assert isinstance(block.scale(1.0), float)
                x = getattr(block, method)(x)
            return x

    light = coat.fp8(Model())
    assert converted(light, X) == {"layers/0", "layers/1"}
    # Methods that call each other are one program, and quantize once.
    assert runs(light, X) == runs(coat.fp8(Tower("layers", [*blocks()])), X)


class Statistics(nnx.Module):
    """A block with a variable and a counter that each call changes."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.down = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.largest = nnx.BatchStat(jnp.array(0.0))

    def forward(self, x, *, rngs=None):
        self.largest[...] = jnp.maximum(self.largest[...], x.max())
        return self.down(self.dropout(nnx.gelu(self.up(x)), rngs=rngs))


@pytest.mark.parametrize("own_rngs", [False, slow(True)])
def test_changes_by_other_methods_are_seen_outside(own_rngs):
    class Model(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([Statistics(nnx.Rngs(i)) for i in range(2)])

        def __call__(self, x, rngs):
            for block in self.layers:
                x = block.forward(x, rngs=rngs if own_rngs else None)
            return x

    @nnx.jit
    def changed(model):
        rngs = nnx.Rngs(7)
        y = model(X, rngs)
        state = nnx.state(model, nnx.BatchStat), nnx.state([model, rngs], nnx.RngCount)
        return y, jax.tree.leaves(state)

    plain, light = Model(), coat.fp8(Model())
    (y, state), (expected, expected_state) = changed(light), changed(plain)
    assert_close(y, expected, 0.1)
    assert_close(state, expected_state, 0.1)
    rngs = nnx.Rngs(7)
    assert coat.fp8_report(light, X, rngs).called == ("layers/0", "layers/1")
    assert jax.tree.leaves(nnx.state(rngs, nnx.RngCount))[0] == 0


def stacked():
    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def make(rngs):
        return Block(rngs)

    return make(nnx.Rngs(0))


class Stack(nnx.Module):
    def __init__(self, how):
        self.layers, self.how = stacked(), how

    def __call__(self, x):
        if self.how == "vmap":
            call = nnx.vmap(lambda m, x: m.forward(x), in_axes=(0, None))
            return call(self.layers, x).sum(0)
        if self.how == "nnx.scan":
            axes = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
            return nnx.scan(lambda x, m: m.forward(x), **axes)(x, self.layers)
        graph, state = nnx.split(self.layers)

        def step(x, state):
            return nnx.merge(graph, state).forward(x), None

        return jax.lax.scan(step, x, state)[0]


@pytest.mark.parametrize("how", ["vmap", slow("nnx.scan"), "jax.lax.scan"])
def test_stacks_of_nnx_are_named(how):
    light = coat.fp8(Stack(how), blocks="layers")
    assert converted(lambda model, x: model(x), light, X) == {"layers"}
    with pytest.raises(ValueError, match="name its blocks with blocks="):
        coat.fp8(Stack(how))


def test_equal_models_have_equal_structures_and_copies():
    def model():
        return coat.fp8(Stack("nnx.scan"), blocks="layers")

    first, second = model(), model()
    assert nnx.graphdef(first) == nnx.graphdef(second)
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for twin in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert type(twin.layers) is type(first.layers)
        assert nnx.graphdef(twin) == nnx.graphdef(first)
        np.testing.assert_array_equal(flat(nnx.state(twin)), flat(nnx.state(first)))


def test_equal_blocks_are_converted_once(monkeypatch):
    sizes = []
    check = matmuls._too_small
    monkeypatch.setattr(
        matmuls, "_too_small", lambda *args: sizes.append(1) or check(*args)
    )
    layers = [Block(nnx.Rngs(i)) for i in range(4)]
    jax.make_jaxpr(coat.fp8(Tower("layers", layers)))(X)
    assert len(sizes) == 2


def test_methods_that_are_jitted_are_converted():
    class Jitted(Block):
        @nnx.jit
        def compute(self, x):
            return self.forward(x)

    class Model(Tower, pytree=False):
        def __call__(self, x):
            for block in self.layers:
                x = block.compute(x)
            return x

    light = coat.fp8(Model("layers", [Jitted(nnx.Rngs(0)), Jitted(nnx.Rngs(1))]))
    report = coat.fp8_report(light, X)
    assert [row.converted for row in report.rows] == [True] * 4
