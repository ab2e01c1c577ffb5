"""Tests programs compiled for an H200: their registers, memory and kernels.

The tests need no GPU.
"""

import functools
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax.layers import attention
from coat_jax.models import llama, lora
from experiments.bench import foreign, model_step, moe_layers, moe_parallel
from experiments.common import kernel_cases, layer_cases, sm90
from experiments.common.timing import OPTIONS
from experiments.kernels import resources
from experiments.kernels.resources import FAMILIES, RESULTS, hardest
from pallas_kernels.dispatch import devices

_ROOT = Path(__file__).parents[2]
_RECORDED = json.loads(RESULTS.read_text())
# Cases of most kinds of kernels that are the nearest to spilling: they have the most
# registers that the number of threads leaves. Activations differ by a few instructions.
_NEAREST = {
    "products": ["rows, biased and added", "heads twice"],
    "parts": ["product and maxima of parts"],
    "gelu": [
        "gelu gate, backward, to a tensor, row, and the product",
        "gelu without a product, backward, and its output",
        "gelu gate of two arrays, to rows",
    ],
    "norm": ["layer norm of sequences, backward, added, and the output"],
    "adam": ["adam, stochastic rounding"],
    "quantize": ["quantize rows", "quantize blocks, row 1x128 and transposed 1x128"],
    "grouped": [
        "rows of groups, a scale a group, and maxima", "weight gradients of groups",
        "weighted gelu gate, backward",
    ],
}  # fmt: skip
_COMPILE_NEAREST = """
import json, sys
from experiments.kernels.resources import hardest, rows
families = json.loads(sys.argv[1])
cases = {f: [c for c in hardest(f) if c.name in n] for f, n in families.items()}
print(json.dumps([row for f, c in cases.items() for row in rows(f, c)]))
"""
_HOW = "python -m experiments.kernels.resources records what they take"


def compiled(*arguments):
    """Runs Python with these arguments and returns the JSON that it prints."""
    command = [sys.executable, *arguments]
    # The process must not look for a GPU.
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def by_case(rows):
    return {(row["kernel"], row["shape"]): row for row in rows}


needs_compiler = pytest.mark.skipif(
    sm90.missing() is not None, reason=str(sm90.missing())
)


def recorded(*families):
    return by_case(row for row in _RECORDED["rows"] if row["family"] in families)


def assert_no_more_than_recorded(rows, families):
    assert not [row for row in rows if row["spill_bytes"] or row["losses"]]
    if sm90.versions() != _RECORDED["compiled_by"]:
        pytest.skip("other compilers than those recorded assign registers differently")
    initial = recorded(*families)
    grown = [
        (row, initial[case])
        for case, row in by_case(rows).items()
        for resource in ("kernels", "registers", "shared_bytes")
        if row[resource] > initial[case][resource]
    ]
    assert not grown, _HOW


def state_of_kernels():
    """Returns a hash of what decides the kernels' resources: sources and compilers."""
    files = [*(_ROOT / "pallas_kernels").rglob("*.py"), resources.__file__]
    files += [kernel_cases.__file__, sm90.__file__, RESULTS, __file__]
    state = hashlib.sha256(json.dumps(sm90.versions()).encode())
    for file in sorted(map(Path, files)):
        state.update(file.read_bytes())
    return state.hexdigest()


def nearest_rows(config):
    """Returns the rows of the cases that are nearest to spilling registers.

    They are compiled once for a state of the kernels and kept in pytest's cache, which
    `pytest --cache-clear` empties.
    """
    state = state_of_kernels()
    cache = getattr(config, "cache", None)  # None with -p no:cacheprovider.
    known = cache and cache.get("kernels/nearest", None)
    if known and known["state"] == state:
        return known["rows"]
    rows = compiled("-c", _COMPILE_NEAREST, json.dumps(_NEAREST))
    if cache:
        cache.set("kernels/nearest", {"state": state, "rows": rows})
    return rows


@needs_compiler
def test_the_nearest_to_spilling_compile_and_take_no_more_than_recorded(pytestconfig):
    rows = nearest_rows(pytestconfig)
    cases = [
        case
        for family, names in _NEAREST.items()
        for case in hardest(family)
        if case.name in names
    ]
    assert len({case.name for case in cases}) == sum(map(len, _NEAREST.values()))
    assert by_case(rows).keys() == {tuple(case.names.values()) for case in cases}
    assert_no_more_than_recorded(rows, _NEAREST)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_all_cases_compile_and_take_no_more_than_recorded(family):
    rows = compiled("-m", "experiments.kernels.resources", family)
    assert rows
    assert by_case(rows).keys() == recorded(family).keys(), _HOW
    assert_no_more_than_recorded(rows, [family])


def test_all_cases_are_recorded():
    assert {row["family"] for row in _RECORDED["rows"]} == set(FAMILIES)
    for family, cases in FAMILIES.items():
        names = {tuple(case.names.values()) for case in cases()}
        assert names == recorded(family).keys(), _HOW
    measured = {case.kernel for case in kernel_cases.elementwise((8192, 4096))}
    assert measured <= {row["kernel"] for row in _RECORDED["rows"]}


@pytest.fixture
def hopper(monkeypatch):
    """Makes programs choose kernels and cuDNN's attention as on a Hopper GPU."""
    monkeypatch.setattr(devices, "has_hopper", lambda: True)
    monkeypatch.setattr(attention, "has_flash_attention", lambda q: True)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("hopper")
def test_backward_takes_no_more_memory_than_bf16s():
    sizes = {"hidden": 2048, "intermediate": 5504, "kv_heads": 16, "head_dim": 128}
    shape = layer_cases.Shape(seq=2048, batch=4, **sizes)
    x = shape.input()

    def temporaries(case):
        apply, state = layer_cases.layer(layer_cases.CASES[case], shape)
        vjp = jax.eval_shape(lambda state, x: jax.vjp(apply, state, x)[1], state, x)
        backward = sm90.compiled(lambda vjp, dy: vjp(dy), vjp, x, options=OPTIONS)
        return backward.memory_analysis().temp_size_in_bytes

    assert 0 < temporaries("coat") <= temporaries("bf16")


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("hopper")
def test_a_foreign_layer_runs_kernels_alone_in_less_memory_than_bf16(monkeypatch):
    """Kernels compute all matmuls, also the merged ones, and cuBLAS computes none."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # The layer asks.
    sizes = {"hidden": 2048, "intermediate": 5632, "kv_heads": 4, "head_dim": 128}
    shape = layer_cases.Shape(seq=2048, batch=4, **sizes)
    x = shape.input()

    def compiled(case):
        layer, params = foreign.case_of("llama", case, shape)
        step = functools.partial(foreign.forward_backward, layer)
        return sm90.compiled(step, params, x, x, options=OPTIONS)

    plain, both = compiled("bf16"), compiled("both")
    assert "cublas" in plain.as_text()
    assert "cublas" not in both.as_text()
    temporaries = (p.memory_analysis().temp_size_in_bytes for p in (both, plain))
    assert 0 < next(temporaries) < 0.75 * next(temporaries)


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("hopper")
def test_experts_run_kernels_alone():
    rows, experts, k, n = 8192, 16, 1024, 1536

    def passes(x, w, sizes, dy):
        y, vjp = jax.vjp(lambda x, w: coat.fp8_ragged_dot(x, w, sizes), x, w)
        return y, *vjp(dy)

    x, w, dy = (
        jax.ShapeDtypeStruct(shape, jax.numpy.bfloat16)
        for shape in ((rows, k), (experts, k, n), (rows, n))
    )
    sizes = jax.ShapeDtypeStruct((experts,), jax.numpy.int32)
    program = sm90.compiled(passes, x, w, sizes, dy, options=OPTIONS).as_text()
    named = r'custom-call\(.*op_name="[^"]*/(\w+)/kernel"'
    assert Counter(re.findall(named, program)) == {
        "group_tiles": 1,
        "grouped_matmul": 2,
        "grouped_transpose": 2,
        "grouped_weight_gradient": 1,
        "quantize_columns": 1,
        "quantize_rows": 1,
        "quantize_tensor": 1,
    }
    assert "cublas" not in program


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("hopper")
def test_a_step_inside_backward_copies_no_stack():
    """The kernel of Adam's step changes a layer of the stacks in place."""
    sizes = {"hidden": 1024, "intermediate": 2816, "heads": 8, "kv_heads": 8}
    model = model_step.ModelSize(**sizes, layers=8, vocab=1024, seq=512)

    def memory(case):
        loss, (params, histories) = model_step.loss_function(case, model)
        tx, step = model_step.step_of(case, loss)
        state = jax.eval_shape(tx.init, params)
        tokens = jax.ShapeDtypeStruct((2, model.seq + 1), jax.numpy.int32)
        with sm90.targeted():
            arguments = sm90.on_one_gpu((((params, state), histories), tokens))
            jitted = jax.jit(step, donate_argnums=0)
            lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
            found = lowered.compile(OPTIONS).memory_analysis()
        # The loss and the output's tuple are new arrays.
        assert found.output_size_in_bytes - found.alias_size_in_bytes < 4096
        layers = jax.tree.leaves(params["layers"])
        stack = sum(p.size * p.dtype.itemsize for p in layers)
        return found.temp_size_in_bytes, stack

    (ordinary, stack), (released, _) = map(memory, ("coat", "coat, released"))
    assert ordinary - released > 0.8 * stack


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("recipe", ["coat", "coat_max"])
def test_adapters_keep_no_transposed_copies_of_frozen_weights(recipe):
    """A kernel transposes the codes of one layer; XLA transposes no stack of layers."""
    config = llama.LlamaConfig(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=2816,
        num_layers=8,
        num_heads=8,
        num_kv_heads=8,
        recipe="bf16",
        param_dtype=jax.numpy.bfloat16,
    )

    def adapted():
        model = llama.Llama(config, rngs=nnx.Rngs(0))
        lora.adapt(model, rank=16, recipe=recipe, rngs=nnx.Rngs(1))
        return model

    graph, adapters, frozen = nnx.split(nnx.eval_shape(adapted), nnx.Param, ...)

    @jax.value_and_grad
    def step(adapters, frozen, tokens):
        model = nnx.merge(graph, adapters, frozen)
        return llama.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])

    tokens = jax.ShapeDtypeStruct((1, 129), jax.numpy.int32)
    program = sm90.compiled(step, adapters, frozen, tokens, options=OPTIONS)
    arrays = jax.tree.leaves(frozen["layers"])
    stacks = [x for x in arrays if x.dtype == jax.numpy.float8_e4m3fn]
    assert len(stacks) == 4
    # A few tokens take little, so that the copy of the largest stack would show.
    largest = max(x.size for x in stacks)
    assert 0 < program.memory_analysis().temp_size_in_bytes < largest
    kernels = re.findall(r'op_name="[^"]*/transpose/kernel"', program.as_text())
    assert len(kernels) >= 4


def _fully_sharded(shape) -> P:
    if len(shape) < 2:
        return P()
    return P(None, "fsdp") if len(shape) == 3 else P("fsdp")


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("hopper")
def test_two_gpus_run_kernels_on_shards_and_gather_codes():
    mesh = sm90.mesh_of((2,), ("fsdp",))
    sizes = {"hidden": 1024, "intermediate": 2816, "kv_heads": 2, "head_dim": 128}
    shape = layer_cases.Shape(seq=512, batch=8, **sizes)
    apply, state = layer_cases.layer(layer_cases.CASES["coat"], shape)

    def placed(x, spec):
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        )

    def gradients(state, x, dy):
        y, vjp = jax.vjp(apply, state, x)
        return y, *vjp(dy)

    state = jax.tree.map(lambda p: placed(p, _fully_sharded(p.shape)), state)
    x = placed(shape.input(), P("fsdp"))
    placements = jax.tree.map(lambda x: x.sharding, (x, state, x))
    program = sm90.compiled_on_mesh(
        gradients, state, x, x, out_shardings=placements, options=OPTIONS
    ).as_text()
    # The other operations of a layer are XLA's: matmuls that are small, and scales.
    assert program.count("mosaic_gpu") > 30

    def moved(collective):
        """Yields the dtypes and sizes of the arrays that a collective returns."""
        for actual in re.findall(rf" = (.*?) {collective}(?:-start)?\(", program):
            complete = actual.rsplit("), ", 1)[-1]  # A start returns its operands, too.
            for dtype, dims in re.findall(r"(\w+)\[([\d,]+)\]", complete):
                yield dtype, math.prod(map(int, dims.split(",")))

    weights = sum(p.size for p in jax.tree.leaves(state) if p.ndim > 1)
    gathered = Counter()
    for dtype, size in moved("all-gather"):
        gathered[dtype] += size
    assert gathered.keys() <= {"f8e4m3fn", "f32"}
    assert gathered["f8e4m3fn"] == 2 * weights
    assert gathered["f32"] < weights / 256  # Scales of output features.
    scattered = list(moved("reduce-scatter"))
    assert {dtype for dtype, _ in scattered} == {"bf16"}
    assert sum(size for _, size in scattered) == weights / 2


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("hopper")
def test_rows_travel_as_codes_between_two_gpus():
    mesh = sm90.mesh_of((2,), ("expert",))
    shape = moe_layers.LayerShape(2048, 16, 4, 1024, 512)
    arguments = jax.eval_shape(lambda: moe_parallel.arguments(shape, 2))
    places = moe_parallel.shardings(arguments[0], mesh)
    arguments = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        arguments,
        places,
    )
    layer = moe_parallel.layer_of(shape, "coat", 1.5, "expert")
    program = sm90.compiled_on_mesh(
        functools.partial(moe_layers.passes, layer),
        *arguments,
        out_shardings=(places[1], (places[0], places[1])),
        options=OPTIONS,
    ).as_text()
    sent = Counter()
    for types in re.findall(r" = (.*?) ragged-all-to-all(?:-start)?\(", program):
        dtype, dims = re.findall(r"(\w+)\[([\d,]+)\]", types)[0]
        sent[dtype, math.prod(map(int, dims.split(",")[1:]))] += 1
    # Tokens and their gradients are codes, tokens twice. Results and gradients return.
    rows = {("f8e4m3fn", 1024): 2, ("f8e5m2", 1024): 1, ("bf16", 1024): 2}
    assert {k: n for k, n in sent.items() if k[1] > 1} == rows
    assert set(sent) - set(rows) == {("f32", 1)}  # Scales and weights of rows.
    # The numbers of rows are all that is gathered.
    gathered = re.findall(r" = (.*?) all-gather(?:-start)?\(", program)
    assert gathered
    assert all("s32[2,2,8]" in types for types in gathered)
