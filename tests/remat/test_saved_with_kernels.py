"""Tests that as much is saved if kernels compute matmuls as if XLA does."""

import collections
import contextlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers.gradients import FP8, saved, saved_bytes
from helpers.marks import slow, slow_except
from helpers.versions import needs_kernels
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import coat_jax as coat
import pallas_kernels as kernels
from experiments.bench.compile_case import for_hopper
from experiments.common.foreign_layers import LAYERS, made
from experiments.common.layer_cases import Shape
from experiments.rewrites import blocks, grammar, judge, programs
from pallas_kernels.dispatch import operations, placement, stand_ins

pytestmark = [needs_kernels, pytest.mark.internals]

BF16 = jnp.bfloat16
ROWS = 4 * 512
SHAPE = Shape(
    hidden=1024, seq=512, batch=4, intermediate=2048, kv_heads=8, head_dim=128
)
GRAPH, PARAMS = made("llama", SHAPE, coat.fp8_dot_general)


def layer(params, x):
    return nnx.merge(GRAPH, params)(x)


def fp8_sizes(hopper, **options):
    """Returns the sorted byte sizes of the FP8 codes that the layer saves.

    Args:
      hopper: Returns a context in which kernels are chosen as on a GPU.
      **options: Options of `fp8_remat`.
    """
    with operations.traced_anew(), hopper():
        residuals = saved(coat.fp8_remat(layer, **options), PARAMS, SHAPE.input())
    return sorted(r.nbytes for r in residuals if r.dtype in FP8)


# Programs that run have kernels, and others have stand-ins in their place.
@pytest.fixture(
    params=[for_hopper, slow(stand_ins.for_hopper)], ids=["kernels", "stand-ins"]
)
def hopper(request):
    """Returns a function that makes a context in which kernels are chosen."""
    return request.param


@pytest.mark.parametrize(
    "policy",
    [
        jax.checkpoint_policies.dots_saveable,
        slow(jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
        jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    ],
    ids=["dots", "products", "offloaded"],
)
def test_policies_of_jax_select_the_kernels_of_matmuls(policy, hopper):
    # The input, queries, keys, values, the sum after the projection, gate and up.
    # Scores have batch axes, and attention is no matmul where it has a kernel.
    sizes = sorted(ROWS * n for n in (1024, 1024, 1024, 1024, 1024, 2048, 2048))
    if policy is jax.checkpoint_policies.dots_saveable and hopper is for_hopper:
        sizes = sorted([*sizes, 4 * 8 * 512 * 512, ROWS * 1024])
    assert fp8_sizes(hopper, policy=policy) == sizes


def test_a_policy_sees_what_a_matmul_multiplies(hopper):
    seen = set()

    def policy(primitive, *types, **params):
        if primitive is jax.lax.dot_general_p:
            seen.add((*(t.shape for t in types), params["dimension_numbers"]))
        return False

    with operations.traced_anew(), hopper():
        saved(coat.fp8_remat(layer, policy=policy), PARAMS, SHAPE.input())
    rows = ((1,), (1,)), ((), ())
    of_rows = {tuple(shapes) for *shapes, dims in seen if dims == rows}
    assert of_rows == {
        ((ROWS, 1024), (1024, 1024)),
        ((ROWS, 1024), (2048, 1024)),
        ((ROWS, 2048), (1024, 2048)),
    }


def test_what_matmuls_read_is_copied(hopper):
    """The scale of an exact array next to its copy is no statistic of a kernel."""
    # The inputs of both norms; gate and up.
    sizes = [ROWS * 1024] * 2 + [ROWS * 2048] * 2
    if hopper is for_hopper:
        # Queries, keys and values; attention's output; scores. Its kernel has them all
        # as they are, where there is one.
        sizes += [ROWS * 1024] * 4 + [4 * 8 * 512 * 512]
    assert fp8_sizes(hopper) == sorted(sizes)


@pytest.fixture
def wide_programs(monkeypatch):
    """Makes random programs so large that kernels are chosen for them."""
    for module in (blocks, grammar, programs):
        monkeypatch.setattr(module, "WIDTH", 1024)
    monkeypatch.setattr(programs, "_SHAPES", [(2048, 1024), (4, 512, 1024)])


# Weights come first in 0, and random keys, other groups, policies and loops in others.
@pytest.mark.parametrize("seed", slow_except([0], [0, 6, 27, *range(100, 200)]))
def test_random_programs_save_as_much_with_kernels(seed, wide_programs):
    program = programs.random_program(seed)
    shapes = {
        name: (shape, jnp.float32 if name.startswith("scale") else BF16)
        for name, shape in program.shapes.items()
    }
    params = {name: jax.ShapeDtypeStruct(*of) for name, of in shapes.items()}
    x = jax.ShapeDtypeStruct(program.shape, BF16)
    numbers = jnp.zeros(program.shape[:-1], jnp.int32)

    def function(params, x):
        return judge.light(program)(params, x, numbers)

    sizes = []
    for context in (contextlib.nullcontext, for_hopper, stand_ins.for_hopper):
        with operations.traced_anew(), context():
            sizes.append(saved_bytes(saved(function, params, x)))
    in_jax, *with_kernels = sizes
    # Scales of weights are saved with kernels, and computed again in JAX.
    assert max(with_kernels) <= in_jax + 100 * 4


def kernels_of(fn, dy, *args):
    """Returns the kernels of a function and its gradients, and how often each runs."""

    def gradients(dy, *args):
        return jax.vjp(fn, *args)[1](dy)

    with stand_ins.for_hopper():
        program = jax.make_jaxpr(gradients)(dy, *args)
    return collections.Counter(re.findall(r"_Launch\(name='(\w+)'\)", str(program)))


def of_device(fn, parameters):
    """Returns a `shard_map` of `fn` with `parameters` first arguments replicated."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

    def spread(*args):
        specs = [P()] * parameters + [P("data")] * (len(args) - parameters)
        options = {"in_specs": tuple(specs), "out_specs": P("data")}
        return jax.shard_map(fn, mesh=mesh, **options)(*args)

    return spread


# Activations with numbers in them. A number within `shard_map` is cast twice: to vary
# over devices, and to a dtype.
@pytest.mark.parametrize("name", [slow("vision transformer"), "diffusion transformer"])
def test_as_many_kernels_run_within_shard_map(name):
    graph, params = made(name, SHAPE, coat.fp8_dot_general)
    light = coat.fp8_remat(lambda params, *x: nnx.merge(graph, params)(*x))
    inputs = [SHAPE.input()] * LAYERS[name].inputs
    expected = kernels_of(light, SHAPE.input(), params, *inputs)
    assert expected["gated"] + expected["norm"] >= 2
    actual = kernels_of(of_device(light, 1), SHAPE.input(), params, *inputs)
    assert actual == expected


def mlp(params, x):
    def dot(x, w):
        return coat.fp8_dot_general(x, w, (((1,), (0,)), ((), ())))

    h = nnx.RMSNorm(1024, dtype=BF16, rngs=nnx.Rngs(0))(x)
    inner = jax.nn.silu(dot(h, params["gate"])) * dot(h, params["up"])
    return dot(inner, params["down"])


SHAPES = {"gate": (1024, 2048), "up": (1024, 2048), "down": (2048, 1024)}
WEIGHTS = {name: jax.ShapeDtypeStruct(of, BF16) for name, of in SHAPES.items()}
X = jax.ShapeDtypeStruct((2048, 1024), BF16)


def gathering(params, x):
    gather = partial(jax.lax.all_gather, axis_name="data", tiled=True)
    return mlp(jax.tree.map(gather, params), x)


@pytest.mark.parametrize(
    "fn",
    [
        of_device(coat.fp8_remat(gathering), 1),
        coat.fp8_remat(of_device(mlp, 1)),
        slow(coat.fp8_remat(jax.jit(of_device(mlp, 1)))),
        coat.fp8_remat(of_device(coat.fp8_remat(mlp), 1)),
    ],
    ids=["gathered weights", "shard_map within", "jitted", "twice"],
)
def test_layers_on_devices_have_the_kernels_of_one(fn):
    """Gathered weights count as weights, and a `shard_map` is rewritten inside."""
    expected = coat.fp8_remat(mlp)
    assert kernels_of(fn, X, WEIGHTS, X) == kernels_of(expected, X, WEIGHTS, X)
    with stand_ins.for_hopper():
        actual, alone = (
            sum(r.nbytes for r in saved(f, WEIGHTS, X) if r.dtype in FP8)
            for f in (fn, expected)
        )
    assert actual == alone


def test_a_norm_within_shard_map_divides_by_an_integer():
    def fn(w, scale, x):
        x = x * scale
        squares = jnp.sum(x * x, axis=-1, keepdims=True)
        h = x * jax.lax.rsqrt(squares / x.shape[-1] + 1e-6)
        return coat.fp8_dot_general(h, w, (((1,), (0,)), ((), ())))

    shapes = (2048, 1024), (1024, 1024), (1024,), (2048, 1024)
    args = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    assert kernels_of(of_device(coat.fp8_remat(fn), 2), *args)["norm"] == 1


def test_a_users_function_with_other_work_is_no_kernel_of_ours(hopper):
    """A matmul before the codes runs once, and policies see the function as it is."""

    @jax.custom_batching.sequential_vmap
    def whitened(w):
        return kernels.quantize_rows(w @ w.T @ w)

    def function(w, x):
        codes = whitened(jax.lax.stop_gradient(w))
        return jnp.sin(x @ (codes.codes.astype(x.dtype) * codes.scale[:, None]))

    seen = set()

    def policy(primitive, *types, **params):
        seen.add(primitive.name)
        return False

    shapes = (1024, 1024), (512, 1024)
    args = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    with operations.traced_anew(), hopper():
        residuals = saved(coat.fp8_remat(function), *args, params=1)
        saved(coat.fp8_remat(function, policy=policy), *args)
    assert (1024 * 1024, jnp.dtype(FP8[0])) in {(r.nbytes, r.dtype) for r in residuals}
    assert "custom_vmap_call" in seen


@pytest.mark.parametrize(
    "params", [{"launch": True}, {"launch": (1, 2)}, {"static_args": 3}, {"call": 0}]
)
def test_parameters_of_other_primitives_name_no_operation(params):
    assert placement.operation_of(params) is None


@pytest.mark.parametrize(
    ("number", "dtype", "hits"),
    [
        (2.0, jnp.int32, 1),
        (2.7, jnp.int32, 0),
        (3e9, jnp.int32, 0),
        (-1.0, jnp.uint8, 0),
    ],
)
def test_numbers_that_a_cast_changes_are_unknown(number, dtype, hits):
    """The norm divides by 512 times a number, which must be 2 for 1,024 columns."""

    def fn(w, x):
        two = jax.lax.pcast(jnp.float32(number), ("data",), to="varying")
        factor = two.astype(dtype).astype(BF16)
        mean = jnp.sum(x * x, axis=-1, keepdims=True) / (512 * factor)
        h = x * jax.lax.rsqrt(mean + 1e-6)
        return coat.fp8_dot_general(h, w, (((1,), (0,)), ((), ())))

    shapes = (2048, 1024), (1024, 1024), (2048, 1024)
    args = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    assert kernels_of(of_device(coat.fp8_remat(fn), 1), *args)["norm"] == hits
