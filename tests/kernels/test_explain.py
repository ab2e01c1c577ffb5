"""Tests what `explain` reports, and that it has no side effects."""

import functools
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels as pk
from pallas_kernels import checks
from pallas_kernels.dispatch import devices

BF16 = jnp.bfloat16


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(devices, "has_hopper", lambda: True)


def rows(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ({"device_kind": "cpu", "platform": "cpu"}, "cpu is no Hopper GPU"),
        (
            {"device_kind": "A", "platform": "gpu", "compute_capability": "8.0"},
            "A has compute capability 8.0, and kernels need 9.0, Hopper",
        ),
        (
            {"device_kind": "B", "platform": "gpu", "compute_capability": "10.0"},
            "B has compute capability 10.0, and kernels need 9.0, Hopper",
        ),
    ],
)
def test_a_device_without_the_kernels(monkeypatch, device, reason):
    gpu = SimpleNamespace(**device)
    monkeypatch.setattr(devices, "default_device", lambda: gpu)
    explanation = pk.explain(pk.norm, rows(4, 100), rows(100), eps=1e-6, scale="row")
    (choice,) = explanation.choices
    assert choice.operation == "norm"
    assert choice.arrays == ("bfloat16[4,100]", "bfloat16[100]")
    assert choice.implementation == "reference"
    assert choice.reason == (
        f"{reason}; rows must be multiples of 128 up to 12288 long, got 100"
    )


def test_shapes_and_dtypes_decide_on_a_hopper_gpu(hopper):
    def two(x, y):
        return pk.norm(x).y, pk.norm(y).y, pk.norm(x, implementation="reference").y

    choices = pk.explain(two, rows(4, 256), rows(4, 256, dtype=jnp.float16)).choices
    runs = [choice.implementation for choice in choices]
    assert runs == ["mosaic", "reference", "reference"]
    assert choices[0].reason.endswith("is a Hopper GPU")
    assert choices[1].reason == "rows must be bfloat16, got float16"
    assert choices[2].reason == "the caller named it"


def test_a_context_chooses_the_device_that_programs_are_traced_for(monkeypatch):
    cpu = jax.devices()[0]
    gpu = SimpleNamespace(device_kind="H", platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(
        jax, "devices", lambda platform="gpu": [{"gpu": gpu}.get(platform, cpu)]
    )
    quantize = functools.partial(pk.explain, pk.quantize_rows, rows(256, 256))
    assert quantize().choices[0].implementation == "mosaic"
    for device in (cpu, "cpu"):
        with jax.default_device(device):
            assert quantize().choices[0].reason == "cpu is no Hopper GPU"


def test_arrays_of_another_platform_are_computed_there(hopper, monkeypatch):
    gpu = SimpleNamespace(device_kind="H", platform="gpu")
    monkeypatch.setattr(devices, "default_device", lambda: gpu)
    x = jnp.ones((256, 256), BF16)  # On the CPU.
    assert devices.other_platforms((x, None)) == ["cpu"]
    quantized = pk.quantize_rows(x)
    assert float(quantized.codes[0, 0]) == 448
    # The arrays of a program that is traced may be anywhere.
    (choice,) = pk.explain(pk.quantize_rows, x).choices
    assert choice.implementation == "mosaic"


def test_a_program_with_kernels_for_another_platform_is_refused(hopper):
    with pytest.raises(ValueError, match=r"a kernel for a GPU.*compiled for cpu.*jax"):
        jax.jit(pk.quantize_rows).lower(rows(256, 256))


@pytest.mark.parametrize("tokens", [8192, 8])
def test_a_warning_says_once_that_a_kernel_does_not_take_large_arrays(hopper, tokens):
    checks.warn_once.cache_clear()
    x = rows(tokens, 1000)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(2):
            jax.eval_shape(lambda x: pk.norm(x).y, x)
        pk.explain(pk.norm, rows(8192, 1001))  # It says why by itself.
    expected = (
        "norm of bfloat16[8192,1000] runs in XLA and not in a kernel: rows must be "
        "multiples of 128 up to 12288 long, got 1000"
    )
    actual = [str(warning.message) for warning in caught]
    assert actual == ([expected] if tokens == 8192 else [])


def test_what_was_traced_before_is_explained_again_and_not_compiled_again():
    traces = []

    @jax.jit
    def layers(x):
        traces.append(None)
        body = jax.checkpoint(lambda x, _: (pk.norm(x).y, None))
        x, _ = jax.lax.scan(body, x, length=3)
        return pk.norm(x).y

    x = jnp.ones((4, 256), BF16)
    layers(x)
    explanation = pk.explain(layers, x)
    assert [choice.operation for choice in explanation.choices] == ["norm", "norm"]
    assert pk.explain(jax.jit(layers), x) == explanation
    count = len(traces)
    assert jax.jit(lambda x: layers(x))(x).shape == x.shape
    assert len(traces) == count
    header, *lines = str(explanation).splitlines()
    assert header.split() == ["operation", "of", "runs", "calls", "because"]
    assert [line.split()[:4] for line in lines] == [
        ["norm", "bfloat16[4,256]", "reference", "2"]
    ]


def test_nothing_is_recorded_outside():
    explanation = pk.explain(lambda x: x + 1, jnp.ones(3))
    assert explanation.choices == ()
    pk.norm(jnp.ones((2, 128), BF16))
    assert explanation.choices == ()


def test_errors_pass_through():
    with pytest.raises(ValueError, match="the kernel cannot run: there are no rows"):
        pk.explain(pk.norm, rows(0, 128), implementation="mosaic")
    assert pk.explain(pk.norm, rows(0, 128)).choices
