"""Tests of the blocks of Linen models that `coat.fp8` converts."""

import functools
import warnings
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers.converted import converted
from helpers.gradients import flat
from helpers.marks import slow

import coat_jax as coat

pytestmark = pytest.mark.internals

WIDTH = 128
X = jax.random.normal(jax.random.key(0), (8, 16, WIDTH))


class ScanBlock(nn.Module):
    """A user's block with a name that begins like the names of Flax's own classes."""

    @nn.compact
    def forward(self, x):
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))

    def __call__(self, x):
        return self.forward(x)


class VmapBlock(ScanBlock):
    pass


class LinenTower(nn.Module):
    cls: type
    method: str = "__call__"

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = getattr(self.cls(name=f"layers_{i}"), self.method)(x)
        return x


def parameters(light, plain):
    """Returns the abstract parameters of two models, asserting that they are equal."""
    params = jax.eval_shape(plain.init, jax.random.key(0), X)
    assert jax.eval_shape(light.init, jax.random.key(0), X) == params
    return params


def nearly(light, plain):
    """Asserts that the gradients of two models differ, but by less than 15%."""
    params = jax.jit(plain.init)(jax.random.key(0), X)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(model, params):
        return jax.grad(lambda v: jnp.mean(model.apply(v, X) ** 2))(params)

    actual, expected = flat(gradient(light, params)), flat(gradient(plain, params))
    difference = np.linalg.norm(actual - expected)
    assert 0 < difference < 0.15 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("cls", "method"),
    [
        (ScanBlock, "forward"),
        (VmapBlock, "__call__"),
        slow(ScanBlock, "__call__"),
        slow(VmapBlock, "forward"),
    ],
)
def test_linen_blocks_of_any_name_and_method(cls, method):
    light = coat.fp8(LinenTower(cls, method))
    params = parameters(light, LinenTower(cls, method))
    assert converted(light.apply, params, X) == {"layers_0", "layers_1"}


def test_constants_of_classes_are_no_fields():
    class Tower(LinenTower):
        kind: ClassVar[str] = "tower"

    light = coat.fp8(Tower(ScanBlock))
    params = parameters(light, Tower(ScanBlock))
    assert converted(light.apply, params, X) == {"layers_0", "layers_1"}


def test_linen_blocks_under_jit_are_converted_once_for_all():
    light = coat.fp8(LinenTower(nn.jit(ScanBlock)))
    params = parameters(light, LinenTower(nn.jit(ScanBlock)))
    program = jax.make_jaxpr(light.apply)(params, X)
    assert str(jax.make_jaxpr(light.apply)(params, X)) == str(program)
    report = coat.fp8_report(light, params, X)
    assert all(row.converted for row in report.rows)
    assert len(report.rows) == 2
    # A class that Flax has traced already stays as it is, and the error says so.
    model = LinenTower(nn.jit(ScanBlock))
    jax.eval_shape(model.apply, params, X)
    with pytest.raises(ValueError, match=r"before nn\.jit"):
        jax.eval_shape(coat.fp8(model).apply, params, X)


@pytest.mark.parametrize("lift", [nn.remat, nn.checkpoint])
def test_linen_blocks_that_are_lifted_once_are_converted(lift):
    plain, light = LinenTower(lift(ScanBlock)), coat.fp8(LinenTower(lift(ScanBlock)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = parameters(light, plain)
        report = coat.fp8_report(light, params, X)
    assert {row.block for row in report.rows} == {"layers_0", "layers_1"}
    assert all(row.converted for row in report.rows)


@pytest.mark.parametrize("inner", [ScanBlock, slow(nn.remat(ScanBlock))])
@pytest.mark.parametrize("lift", [nn.scan, nn.vmap])
def test_linen_stacks_are_named(lift, inner):
    class Stacked(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            if lift is nn.vmap:
                axes |= {"in_axes": None, "axis_size": 2}
                return nn.vmap(inner, **axes)(name="layers")(x).sum(0)

            def body(block, x, _):
                return block(x), None

            return nn.scan(body, length=2, **axes)(inner(name="layers"), x, None)[0]

    light = coat.fp8(Stacked(), blocks="layers")
    params = parameters(light, Stacked())
    report = coat.fp8_report(light, params, X)
    assert {(row.block, row.converted) for row in report.rows} == {("layers", True)}
    if lift is nn.scan:
        nearly(light, Stacked())
    with pytest.raises(ValueError, match=r"below layers; name its blocks with"):
        jax.eval_shape(coat.fp8(Stacked()).apply, params, X)


def test_a_class_is_a_block_here_and_another_module_there():
    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(2):
                x = ScanBlock(name=f"layers_{i}")(x)
            return ScanBlock(name="head")(x)

    light = coat.fp8(Mixed())
    params = parameters(light, Mixed())
    report = coat.fp8_report(light, params, X)
    assert {row.block for row in report.rows} == {"layers_0", "layers_1"}


class SetupTower(nn.Module):
    def setup(self):
        self.stages = {"a": [ScanBlock(), ScanBlock()], "b": [ScanBlock()]}

    def __call__(self, x):
        for stage in self.stages.values():
            for block in stage:
                x = block(x=x)
        return x


def test_linen_blocks_of_nested_containers_and_keywords():
    light = coat.fp8(SetupTower(), blocks="stages_.*")
    nearly(light, SetupTower())
    params = parameters(light, SetupTower())
    names = {"stages_a_0", "stages_a_1", "stages_b_0"}
    assert converted(light.apply, params, X) == names
