"""Tests that kernels are lowered once, to the custom calls that Pallas emits.

The tests lower programs for a GPU, but need none.
"""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.kernels import adam, adam_arrays
from helpers.marks import slow_except
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
from pallas_kernels import checks
from pallas_kernels.dispatch import lowering, storage

_ROWS = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
_quantize = functools.partial(pk.quantize_rows, implementation="mosaic")


@pytest.fixture
def lowered(monkeypatch):
    """Returns a list that collects the names of launches lowered from Pallas."""
    names, calls = [], lowering._Launch._calls

    def counted(launch):
        names.append(launch.name)
        return calls(launch)

    monkeypatch.setattr(lowering._Launch, "_calls", counted)
    monkeypatch.setattr(storage, "path_of", lambda *_: None)
    jax.clear_caches()
    return names


@pytest.fixture
def in_jaxs_way(monkeypatch):
    """Yields a function that makes JAX lower the kernels in its own way."""

    def switch():
        monkeypatch.setattr(lowering._Launch, "calls", lambda launch: None)
        jax.clear_caches()

    yield switch
    jax.clear_caches()


def lower(fn, *arrays, **options):
    return jax.jit(fn, **options).trace(*arrays).lower(lowering_platforms=("cuda",))


def text(fn, *arrays, **options):
    return lower(fn, *arrays, **options).as_text()


def custom_calls(lowered):
    """Yields the text of each kernel's custom call, without the kernel's code."""
    pattern = r"stablehlo.custom_call @mosaic_gpu_v2.*"
    for call in re.findall(pattern, lowered):
        call = re.sub(r'kernel_hash = "(?:[^"\\]|\\.)*"', "", call)
        yield re.sub(r'module = "(?:[^"\\]|\\.)*"', "", call)


def hashes(lowered):
    return re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', lowered)


def matmul(a, b):
    return pk.matmul(a, b, jnp.float32(1), jnp.float32(1), implementation="mosaic")


def transpose(x, sizes):
    return pk.grouped_transpose(x, sizes, implementation="mosaic")


_CODES = jax.ShapeDtypeStruct((256, 256), jnp.float8_e4m3fn)
_CASES = {
    "a kernel with barriers and copies": (matmul, (_CODES, _CODES)),
    "words of 16 bits": (
        transpose,
        (_CODES.update(dtype=jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)),
    ),
    "in place, two kernels": (adam, adam_arrays(rows=72)),
}


@pytest.mark.internals
@pytest.mark.parametrize(
    "case", slow_except(["words of 16 bits", "in place, two kernels"], _CASES)
)
def test_custom_calls_are_those_of_pallas(case, in_jaxs_way, lowered):
    fn, arrays = _CASES[case]
    module = text(fn, *arrays)
    assert lowered
    in_jaxs_way()
    ordinary = text(fn, *arrays)
    calls = list(custom_calls(module))
    assert calls == list(custom_calls(ordinary))
    assert len(calls) == 1 + ("two" in case)
    assert hashes(module) != hashes(ordinary)
    if "in place" in case:
        assert all("output_operand_alias" in call for call in calls)


@pytest.mark.internals
def test_a_kernel_is_lowered_once_in_a_process(lowered):
    programs = [text(lambda x, n=n: _quantize(x * n), _ROWS) for n in (2, 3)]

    def scanned(x):
        return jax.lax.scan(lambda c, _: (c, _quantize(x * c)), x, None, length=2)

    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    shards = jax.shard_map(_quantize, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    programs += [text(scanned, _ROWS), text(shards, _ROWS)]
    three = jax.ShapeDtypeStruct((3, *_ROWS.shape), _ROWS.dtype)
    programs.append(text(lambda x: jax.lax.map(_quantize, x), three))
    assert len({*map(tuple, map(hashes, programs))}) == 1
    # A trace within `shard_map` is another one.
    assert lowered in (["quantize_rows"], ["quantize_rows"] * 2)


@pytest.mark.internals
def test_a_mapped_kernel_is_one_kernel(lowered):
    x = jax.ShapeDtypeStruct((3, *_ROWS.shape), _ROWS.dtype)
    program = text(jax.vmap(_quantize), x)
    assert len(hashes(program)) == 1
    assert lowered == ["quantize_rows"]


@pytest.mark.internals
def test_kernels_have_no_names_of_callers_and_no_lines(lowered):
    def called(x):
        return _quantize(x)

    first = hashes(text(_quantize, _ROWS))
    jax.clear_caches()
    with jax.named_scope("other"):
        second = hashes(text(called, _ROWS))
    assert first == second
    assert lowered == ["quantize_rows"] * 2
    assert ".py" not in text(called, _ROWS)


@pytest.mark.internals
def test_metadata_of_callers_stands_at_the_call_and_not_in_the_kernel(lowered):
    plain = text(_quantize, _ROWS)

    def labelled(x):
        with set_xla_metadata(label="first"):
            return _quantize(x)

    program = text(labelled, _ROWS)
    (call,) = custom_calls(program)
    assert 'mhlo.frontend_attributes = {label = "first"}' in call
    assert hashes(program) == hashes(plain)
    assert set(lowered) == {"quantize_rows"}


@pytest.mark.internals
def test_what_is_not_as_expected_is_lowered_in_jaxs_way_with_a_warning(monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.custom_calls._FLAGS", set())
    checks.warn_once.cache_clear()
    jax.clear_caches()
    with pytest.warns(UserWarning, match="lowered again at every call"):
        program = text(_quantize, _ROWS)
    with warnings.catch_warnings(action="error"):
        jax.clear_caches()
        again = text(_quantize, _ROWS)
    assert len(hashes(program)) == len(hashes(again)) == 1


@pytest.mark.internals
def test_results_that_no_one_reads_need_no_kernel():
    def unused(x):
        _quantize(x)
        return x

    assert not hashes(text(unused, _ROWS))


@pytest.mark.internals
def test_programs_with_kernels_can_be_exported(lowered):
    exported = jax.export.export(jax.jit(_quantize), platforms=["cuda"])(_ROWS)
    assert "mosaic_gpu_v2" in exported.mlir_module()
    assert not lowered  # An exported kernel is in an older form.


@pytest.mark.internals
@pytest.mark.usefixtures("lowered")  # A lowering in the caches may be of another form.
def test_profiles_name_the_kernel():
    assert "quantize_rows/kernel" in lower(_quantize, _ROWS).as_text(debug_info=True)


def test_donated_arrays_are_overwritten():
    program = text(adam, *adam_arrays(), donate_argnums=(1, 2, 3, 4))
    assert "jax.buffer_donor" in program or "tf.aliasing_output" in program


def test_types_of_results_are_those_of_pallas():
    codes, scale = jax.tree.leaves(jax.eval_shape(_quantize, _ROWS))
    assert (codes.shape, codes.dtype) == (_ROWS.shape, jnp.float8_e4m3fn)
    assert scale.dtype == np.float32
