"""Tests the Adam kernel against its reference, and the reference against optax."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.marks import slow
from jax.experimental.pallas import mosaic_gpu as plgpu

import coat_jax as coat
import pallas_kernels
from coat_jax.optimizers.noise import seed_of, stream_of
from coat_jax.quantization.array import quantize_moment
from pallas_kernels import AdamScalars, Moments
from pallas_kernels.ops.adam.api import _Adam
from pallas_kernels.ops.adam.kernel import Tuning

B1, B2, EPS, LR, DECAY = 0.9, 0.95, 1e-8, 1e-2, 0.1
STEP = 3
SCALARS = AdamScalars(
    b1=B1,
    b2=B2,
    eps=EPS,
    eps_root=0.0,
    mu_weight=1 / (1 - B1**STEP),
    grad_weight=0.0,
    nu_weight=1 / (1 - B2**STEP),
    learning_rate=LR,
    decay=DECAY,
)
GENERAL = SCALARS._replace(eps_root=1e-6, grad_weight=0.3)
BF16, F32 = jnp.bfloat16, jnp.float32
on_gpu = pytest.param("mosaic", marks=pytest.mark.gpu)


# Seeds of a step and of a stream.
SEEDS = jnp.uint32(0x9BD1_2A03), jnp.uint32(0xC4E1_77F5)


@jax.jit
def quantized(mu, nu):
    one = {"granularity": coat.PerGroup(128), "noise": None}
    return (
        quantize_moment(mu, format=coat.E4M3, power=3.0, **one),
        quantize_moment(nu, format=coat.UE4M4, power=None, **one),
    )


def random_state(shape, dtype, seed=0):
    """Returns gradients, stored moments and parameters; some groups are all zero."""
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.uniform(-12, 0, shape))
    nu = rng.standard_normal(shape) ** 2 * size**2 * 1e-4
    ratio = rng.standard_normal(shape) * 0.3
    grads = rng.standard_normal(shape) * size * 1e-2
    grads[..., 3] = 0
    for x in (nu, ratio, grads):
        x.reshape(-1)[:300] = 0
    mu, nu = quantized(jnp.asarray(ratio, F32), jnp.asarray(nu, F32))
    moments = Moments(mu.codes, mu.scale, nu.codes, nu.scale, nu.exponent)
    params = rng.standard_normal(shape)
    return jnp.asarray(grads, dtype), moments, jnp.asarray(params, dtype)


def run(
    implementation, scalars, grads, moments, params=None, salt=None, seeds=SEEDS, **how
):
    """Runs a step by an implementation; "interpret" is the kernel without a GPU."""
    named = "mosaic" if implementation == "interpret" else implementation

    @jax.jit
    def step(grads, moments, seeds, params, salt):
        return pallas_kernels.adam(
            scalars, grads, moments, *seeds, params, salt, implementation=named, **how
        )

    if implementation != "interpret":
        return step(grads, moments, seeds, params, salt)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        return step(grads, moments, seeds, params, salt)


def assert_close(actual, expected):
    """Asserts equality, except that roundings may rarely differ by one step."""
    (result, moments), (expected_result, expected_moments) = actual, expected
    assert result.dtype == expected_result.dtype
    steps = {BF16: 2**-7, F32: 2e-5}[result.dtype.type]
    np.testing.assert_allclose(
        np.asarray(result, F32), np.asarray(expected_result, F32), rtol=steps, atol=2e-6
    )
    for name, a, b in zip(Moments._fields, moments, expected_moments, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.dtype == F32:
            np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=name)
            continue
        a, b = (code_steps(x, name) for x in (a, b))
        # If the exponent of a group differs, all its codes may differ.
        assert np.mean(a != b) <= max(2e-3, 1 / a.size), name
        if name.endswith("exponent"):
            assert np.abs(a - b).max(initial=0) <= 1, name


def code_steps(x, name) -> np.ndarray:
    """Maps codes to integers in their order; UE4M4's last bit is the sign bit."""
    bits = np.asarray(x).view(np.uint8).astype(int)
    return (bits & 0x7F) * 2 + (bits >> 7) if name == "nu" else bits


CASES = [
    ((40, 256), BF16, "nearest", SCALARS),
    slow((3, 11, 256), F32, "nearest", SCALARS),
    slow((25, 384), BF16, "stochastic", SCALARS),
    slow((33, 128), F32, "nearest", GENERAL),
    slow((24, 200), BF16, "nearest", SCALARS),
    slow((16, 136), BF16, "update", GENERAL),
    slow((40, 100), BF16, "stochastic", SCALARS),
    slow((9, 5, 64), BF16, "nearest", SCALARS),
    slow((51, 128), BF16, "update", GENERAL),
    slow((16, 128), F32, "update", SCALARS),
    # Nesterov's momentum with b1 = 0.
    ((16, 128), F32, "nearest", SCALARS._replace(b1=0, mu_weight=0, grad_weight=1)),
]


@pytest.mark.parametrize("implementation", ["interpret", on_gpu])
@pytest.mark.parametrize(("shape", "dtype", "result", "scalars"), CASES)
def test_the_kernel_agrees_with_its_reference(
    implementation, shape, dtype, result, scalars
):
    grads, moments, params = random_state(shape, dtype, seed=sum(shape))
    params = None if result == "update" else params
    salt = jnp.uint32(77) if result == "stochastic" else None
    arguments = (scalars, grads, moments, params, salt)
    assert_close(run(implementation, *arguments), run("reference", *arguments))


# Sizes of a layer that the kernel takes out of stacks itself, and of one it does not.
@pytest.mark.parametrize(
    ("implementation", "shape"),
    [
        slow("reference", (40, 200)),
        ("interpret", (24, 256)),
        ("interpret", (40, 200)),
        pytest.param("mosaic", (24, 256), marks=pytest.mark.gpu),
        pytest.param("mosaic", (40, 200), marks=pytest.mark.gpu),
    ],
)
def test_a_layer_of_stacks_steps_alone(implementation, shape):
    layers, layer, salt = 3, 1, jnp.uint32(77)
    grads, moments, params = random_state((layers, *shape), BF16)
    at = slice(layer, layer + 1)
    arrays = jax.tree.map(lambda x: x[at], (grads, moments, params))
    expected = run("reference", SCALARS, *arrays, salt)
    actual = run(
        implementation, SCALARS, arrays[0], moments, params, salt, layer=jnp.int32(1)
    )
    assert_close(jax.tree.map(lambda x: x[at], actual), expected)
    for before, after in zip(
        jax.tree.leaves((params, moments)), jax.tree.leaves(actual), strict=True
    ):
        for other in (0, 2):
            np.testing.assert_array_equal(
                np.asarray(after[other], F32), np.asarray(before[other], F32)
            )


def test_a_layer_has_gradients_of_a_layer():
    grads, moments, params = random_state((3, 16, 128), BF16)
    with pytest.raises(ValueError, match=r"shape \[1, ..., n\], got \(3, 16, 128\)"):
        run("reference", SCALARS, grads, moments, params, layer=jnp.int32(0))


@pytest.mark.parametrize(
    ("implementation", "width"),
    [
        slow("reference", 200),
        ("interpret", 200),
        pytest.param("mosaic", 384, marks=pytest.mark.gpu),
        pytest.param("mosaic", 200, marks=pytest.mark.gpu),
    ],
)
def test_a_part_of_an_array_rounds_as_in_the_whole(implementation, width):
    """The rows of a slice along the middle axis have uneven strides in the array."""
    arrays = random_state((4, 24, width), BF16)
    complete = run("reference", SCALARS, *arrays, jnp.uint32(77))
    groups = -(-width // 128)
    strides = (24 * groups, groups, 1)
    piece = (slice(1, 3), slice(8, 24), slice(None))
    first = jnp.uint32(1 * strides[0] + 8 * strides[1])
    arrays = jax.tree.map(lambda x: x[piece], arrays)
    seeds = SEEDS[0], SEEDS[1] + first
    actual = run(
        implementation, SCALARS, *arrays, jnp.uint32(77), seeds=seeds, strides=strides
    )
    expected = jax.tree.map(lambda x: x[piece], complete)
    assert_close(actual, expected)
    assert np.mean(np.asarray(actual[0] != expected[0])) < 5e-3


@pytest.mark.parametrize("implementation", ["interpret", on_gpu])
@pytest.mark.parametrize("dtype", [BF16, slow(F32)])
def test_steps_follow_each_other_through_shared_memory(implementation, dtype):
    grads, moments, params = random_state((7 * 64 + 40, 128), dtype)
    arguments = (SCALARS, grads, moments, params)
    tuning = Tuning(warpgroups=2, stages=2, sms=2)
    actual = run(implementation, *arguments, tuning=tuning)
    assert_close(actual, run("reference", *arguments))


@pytest.mark.parametrize("implementation", ["interpret", on_gpu])
@pytest.mark.parametrize("nu_weight", [*map(slow, (1.0, 1.5, 2.2)), 3.3])
def test_updates_have_small_errors_whatever_they_are_divided_by(
    implementation, nu_weight
):
    grads, moments, _ = random_state((32, 128), F32)
    scalars = SCALARS._replace(nu_weight=nu_weight)
    actual, _ = run(implementation, scalars, grads, moments)
    expected, _ = run("reference", scalars, grads, moments)
    # Where moment and gradient cancel, the absolute error stays as large.
    np.testing.assert_allclose(actual, expected, rtol=1.5e-4, atol=1e-5)


def test_tunings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="warpgroups must be 1, 2 or 4, got 3"):
        Tuning(warpgroups=3)


@pytest.mark.parametrize("shape", [slow((96, 128)), (60, 200)])
def test_the_reference_is_the_librarys_quantization_around_optax(shape):
    """The fused step is the step of `with_quantized_state` around optax's Adam."""
    grads, stored, _ = random_state(shape, F32)
    tx = coat.with_quantized_state(optax.scale_by_adam(B1, B2, EPS))
    state = jax.jit(tx.init)(grads)
    inner = state.inner_state
    mu = dataclasses.replace(inner.mu, codes=stored.mu, scale=stored.mu_scale)
    nu = dataclasses.replace(
        inner.nu, codes=stored.nu, scale=stored.nu_scale, exponent=stored.nu_exponent
    )
    inner = inner._replace(count=jnp.asarray(STEP - 1, jnp.int32), mu=mu, nu=nu)
    seeds = seed_of(state.rounding_step), stream_of((), grads)
    updates, state = jax.jit(tx.update)(grads, state._replace(inner_state=inner))
    mu, nu = state.mu, state.nu
    expected = Moments(mu.codes, mu.scale, nu.codes, nu.scale, nu.exponent)
    actual = run("reference", SCALARS, grads, stored, seeds=seeds)
    assert_close(actual, (updates, expected))


@pytest.mark.parametrize("implementation", ["interpret", on_gpu])
def test_vmap_is_a_loop(implementation):
    arrays = random_state((2, 20, 128), BF16)
    step = functools.partial(run, implementation, SCALARS)
    together = jax.vmap(step)(*arrays)
    for i in range(2):
        alone = run("reference", SCALARS, *jax.tree.map(lambda x, i=i: x[i], arrays))
        assert_close(jax.tree.map(lambda x, i=i: x[i], together), alone)


def test_stochastic_rounding_is_unbiased_and_between_the_neighbours():
    grads, moments, params = random_state((256, 128), BF16)
    exact, _ = run("reference", SCALARS, grads, moments, params.astype(F32))
    exact, draws = np.asarray(exact), 16
    seeds = jax.random.bits(jax.random.key(0), (2, draws))
    step = functools.partial(run, "reference", SCALARS, grads, moments, params)
    salt = jnp.uint32(1)
    rounded = np.asarray(jax.vmap(lambda *s: step(salt, s)[0])(*seeds), F32)
    low, bits = exact.view(np.uint32) & 0xFFFF0000, rounded.view(np.uint32)
    assert np.all((bits == low) | (bits == low + 0x10000))
    size = np.exp2(np.floor(np.log2(np.abs(exact))) - 7)
    bias = (rounded.mean(0, dtype=np.float64) - exact) / size
    assert abs(bias.mean()) < 4 * 0.5 / np.sqrt(draws * bias.size)


def _twice(x):
    return x.repeat(2, 0)


def test_what_the_kernel_cannot_run_is_named():
    grads, moments, _ = random_state((8, 128), BF16)
    with pytest.raises(ValueError, match="2048 elements or more, got 1024"):
        run("mosaic", SCALARS, grads, moments)
    with pytest.raises(ValueError, match="float32, got float16"):
        run("mosaic", SCALARS, grads.astype(jnp.float16), moments)
    with pytest.raises(ValueError, match="'mosaic' and 'reference', got 'cuda'"):
        run("cuda", SCALARS, grads, moments)
    wide = moments._replace(mu_scale=moments.mu_scale.astype(BF16))
    with pytest.raises(ValueError, match="mu_scale must be float32, got bfloat16"):
        run("mosaic", SCALARS, _twice(grads), jax.tree.map(_twice, wide))


@pytest.mark.parametrize("implementation", ["reference", "mosaic"])
def test_what_does_not_go_together_is_named(implementation):
    grads, moments, params = random_state((16, 128), BF16)
    with pytest.raises(ValueError, match=r"mu must have the shape \(8, 128\), got"):
        run(implementation, SCALARS, grads[:8], moments)
    with pytest.raises(ValueError, match=r"params must have the shape \(16, 128\)"):
        run(implementation, SCALARS, grads, moments, params[:1])
    with pytest.raises(ValueError, match=r"strides must be 2, one an axis, got \(1,"):
        run(implementation, SCALARS, grads, moments, params, strides=(1,))
    with pytest.raises(ValueError, match="gradients need an axis"):
        run(implementation, SCALARS, grads[0, 0], moments)


def test_a_gradient_that_is_not_finite_spoils_its_group():
    """A NaN is found on CPUs too, where XLA's maximum may overlook it."""
    grads, moments, params = random_state((16, 256), F32)
    for bad in (jnp.nan, jnp.inf):
        _, after = run("reference", SCALARS, grads.at[3, 200].set(bad), moments, params)
        # An infinite second moment is stored as a large one.
        for scale in (after.mu_scale, after.nu_scale)[: 2 if np.isnan(bad) else 1]:
            assert np.argwhere(np.isnan(np.asarray(scale, F32))).tolist() == [[3, 1]]


@pytest.mark.internals
def test_parameters_of_one_shape_have_one_seed_on_a_mesh():
    operation = _Adam(known=SCALARS, strides=(8, 1), tuning=Tuning())
    places = [jnp.array(x, jnp.uint32) for x in ([16, 24], [2, 3])]
    for stream in map(jnp.uint32, (5, 7)):
        seeds = operation._seeds((SEEDS[0], stream, None), places)
        assert seeds.seed == SEEDS[0] + jnp.uint32(18)
        assert seeds.stream == stream
