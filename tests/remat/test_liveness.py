"""Tests the model of memory on programs with arrays that can be counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.versions import needs_kernels
from jax import lax

import pallas_kernels as kernels
from coat_jax.remat.liveness import liveness, peak, total_bytes
from pallas_kernels.dispatch import operations, stand_ins

N = 16
SIZE = N * N * 4  # Bytes of a float32 matrix.
X = jax.ShapeDtypeStruct((N, N), jnp.float32)


def peaks(fn, *args) -> list[int]:
    """Returns the peak memory of both passes, in units of a matrix."""
    actual = liveness(fn, *args)
    moments = actual.forward, actual.backward
    return [total_bytes(peak(m)) / SIZE for m in moments]


def test_matmuls_write_their_results_and_read_arguments_for_nothing():
    def chain(weights, x):
        return (x @ weights["a"]) @ weights["b"]

    weights = {"a": X, "b": X}
    forward, backward = peaks(chain, weights, X)
    assert forward == 2  # The first product, which is saved, and the second.
    # The gradients of `a`, `b`, x and of the first product. The product itself is freed
    # after the gradient of `b`.
    assert backward == 4


def test_fused_operations_write_nothing_until_an_array_is_needed():
    forward, _ = peaks(lambda x: jnp.sum(jnp.exp(x) * 2), X)
    assert forward == pytest.approx(1, abs=0.01)  # exp(x) is saved.
    actual = liveness(lambda x: jnp.tanh(x * 3 + 1) @ x, X)
    # The operand, what tanh saves, and the result.
    assert total_bytes(peak(actual.forward)) == 3 * SIZE
    assert total_bytes(actual.saved) == 2 * SIZE


def test_stacks_of_a_loop_exist_from_its_start():
    layers = 5

    def loop(weights, x):
        return lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, weights)[0]

    stack = jax.ShapeDtypeStruct((layers, N, N), jnp.float32)
    actual = liveness(loop, stack, X)
    # Each layer saves its input and the cosine of the product.
    assert total_bytes(actual.saved) == 2 * layers * SIZE
    total = peak(actual.backward)
    outputs = sum(h.nbytes for h in total if h.role == "output")
    saved = sum(h.nbytes for h in total if h.role == "saved")
    # The gradients of all weights, and of x.
    assert (outputs, saved) == ((layers + 1) * SIZE, 2 * layers * SIZE)
    # A slice of the weights is copied for the matmul with the gradient.
    copies = [h.shape for h in total if h.role == "copy"]
    assert copies in ([], [(N, N)])
    assert total_bytes(total) <= (3 * layers + 5) * SIZE


def test_casts_of_weights_are_copies_of_them():
    @jax.checkpoint  # Otherwise the cast would be saved.
    def half(w, x):
        return jnp.sum(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))

    total = peak(liveness(half, X, X).forward)
    actual = [(h.role, h.nbytes) for h in total if h.dtype == jnp.bfloat16]
    matrices = [pair for pair in actual if pair[1] == SIZE // 2]
    # The cast of w, the cast of x and the product.
    assert sorted(matrices) == [("copy", SIZE // 2)] + 2 * [("temporary", SIZE // 2)]


@pytest.mark.parametrize(
    ("read", "matrices"),
    [
        (lambda y: y.astype(jnp.bfloat16), 0.5),
        (lambda y: y.T.astype(jnp.bfloat16), 0.5),
        (lambda y: (y.astype(jnp.bfloat16), y), 1.5),
        (lambda y: ((z := y.T).astype(jnp.bfloat16), z), 1.5),
        (jax.jit(lambda y: (y.astype(jnp.bfloat16), y)), 1.5),
        # A result of the same size is written in the product's place.
        (lambda y: y.astype(jnp.int32), 1),
        (lambda y: y.astype(jnp.bfloat16) + jnp.sum(y), 1),
    ],
)
def test_a_product_is_narrow_if_its_only_reader_rounds_it(read, matrices):
    # A jitted function is inlined.
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    with operations.traced_anew():
        traced = liveness(lambda x: read(product(x)), X)
    assert total_bytes(peak(traced.forward)) / SIZE == pytest.approx(matrices, abs=0.01)


def test_products_of_a_function_that_is_called_again_are_narrow():
    @jax.jit
    def layer(x):
        return jnp.matmul(x, x, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

    x = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
    traced = liveness(lambda x: layer(layer(x)), x)
    assert total_bytes(peak(traced.forward)) == SIZE  # Both results, in 16 bits.


def test_an_array_that_is_saved_twice_counts_once():
    def twice(x):
        y = jnp.exp(x)
        return jnp.sum(y @ y)

    assert total_bytes(liveness(twice, X).saved) == SIZE


@needs_kernels
def test_kernels_are_stand_ins_of_the_right_types_and_leave_no_trace(rng):
    x = jnp.asarray(rng.standard_normal((64, 256)), jnp.bfloat16)
    quantize = jax.jit(kernels.quantize_rows)
    with stand_ins.for_hopper():
        program = jax.make_jaxpr(quantize)(x)
        [choice] = operations.explain(kernels.quantize_rows, x).choices
    assert choice.implementation == "mosaic"
    names = {eqn.primitive.name for eqn in program.eqns[0].params["jaxpr"].eqns}
    assert names == {stand_ins.KERNEL.name}
    codes, scale = quantize(x)  # This runs, since it is traced without stand-ins.
    types = [(a.shape, a.dtype) for a in program.out_avals]
    assert types == [(a.shape, a.dtype) for a in (codes, scale)]
    assert np.isfinite(np.asarray(scale)).all()


def test_flash_attention_saves_its_arguments_its_result_and_statistics():
    q = jax.ShapeDtypeStruct((2, 8, 4, 16), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((2, 8, 2, 16), jnp.bfloat16)
    actual = liveness(lambda q, k, v: stand_ins.attention(q, k, v), q, kv, kv)
    shapes = {h.shape: h.dtype for h in actual.saved}
    assert shapes == {(2, 8, 4, 16): jnp.bfloat16, (2, 4, 8): jnp.float32}
