"""Measures rates of grouped matmuls, as in mixtures of experts, on one GPU.

    uv run python -m experiments.bench.moe

compares the kernels with their definitions in jnp, then times each matmul, and writes
`moe.json`. Timings alternate with other matmuls: the same kernel in BF16, a dense FP8
matmul of as many FLOPs, XLA's batched BF16 matmul of equal groups, JAX's kernel
`ragged_dot`, and `jax.lax.ragged_dot`. Times include the list of tiles, and rates count
no padding. Layers with the shapes of Qwen3-30B-A3B and Mixtral are measured, too, or
alone with `--only layers`; see `experiments.bench.moe_layers`. With `--only kernels`
the program profiles these layers, ours and a user's, and writes a row for each kernel
that ran on the GPU. With `--only expert_parallel`, on two GPUs or more, it checks and
measures a layer with its experts sharded over all GPUs; see
`experiments.bench.moe_parallel`. Each row is printed as a line of JSON when it is
measured. With `--small` tiny kernels are interpreted on a CPU.
"""

import argparse
import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

import coat_jax as coat
import pallas_kernels as pk
from experiments.bench import moe_layers, moe_parallel
from experiments.common import results
from experiments.common.grouped_cases import (
    BF16,
    E4M3,
    E5M2,
    F32,
    KINDS,
    UNUSUAL,
    Shape,
    drawn,
    operands,
    positive,
    sizes_of,
)
from experiments.common.programs import new_parser, positive_float, results_path
from experiments.common.results import Bar, default_path
from experiments.common.timing import Program, timed
from pallas_kernels.dispatch import devices, operations
from pallas_kernels.ops.grouped_matmul import tuning

Row = dict[str, Any]
# The most experts with which `jax.lax.ragged_dot` is timed: it computes all rows for
# each expert.
_FEW_EXPERTS = 8


# The targets of rates in TFLOP/s, with random sizes of groups.
FORWARD = {
    Shape(16384, 8, 4096, 14336): 1300,
    Shape(32768, 8, 7168, 2048): 1400,
    Shape(65536, 64, 4096, 2048): 1220,
    Shape(65536, 128, 2048, 1536): 1080,
}
GRADIENT = dict(zip(FORWARD, (1328, 1338, 1089, 867), strict=True))
IN_BF16 = dict.fromkeys(list(FORWARD)[:3], 680)
CHECKED = Shape(4096, 16, 1024, 1536)
SMALL = Shape(128, 2, 128, 128)


def main(arguments: list[str] | None = None) -> None:
    """Measures the chosen cases, prints their rows and writes the results file.

    Raises:
      SystemExit: If a check fails.
    """
    parser = new_parser("experiments.bench.moe", __doc__)
    add = parser.add_argument
    add(
        "--seconds",
        type=positive_float,
        default=420,
        help="start no case after this time",
    )
    names = [*CASES, "layers"]
    choices = [*names, "kernels", "expert_parallel"]
    add("--only", nargs="+", choices=choices, default=names)
    layers = list(moe_layers.NAMES)
    add("--layers", nargs="+", choices=layers, default=layers, help="(all)")
    add("--small", action="store_true", help="interpret tiny kernels on a CPU")
    add("--out", type=results_path, default=default_path("moe"))
    args = parser.parse_args(arguments)
    if not args.small and not devices.has_hopper():
        parser.error("it measures on a Hopper GPU; --small runs anywhere")
    if args.small and "kernels" in args.only:
        parser.error("--only kernels profiles a Hopper GPU, so it takes no --small")
    end, rows = time.monotonic() + args.seconds, []
    with interpreted() if args.small else contextlib.nullcontext():
        for row in measured(args, end):
            print(json.dumps(row), flush=True)
            rows.append(row)
            results.write_results(args.out, rows=rows, bars=bars(rows))
    if wrong := [row for row in rows if not row.get("right", True)]:
        raise SystemExit(f"{len(wrong)} checks failed")


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Interprets Pallas kernels in this context, as on a GPU with 2 multiprocessors."""
    count, devices.multiprocessors = devices.multiprocessors, lambda: 2
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            yield
    finally:
        devices.multiprocessors = count


def measured(args: argparse.Namespace, end: float) -> Iterator[Row]:
    """Yields the rows of the cases in `args.only`, in this order.

    `end` is a time of `time.monotonic`, after which cases are skipped.
    """
    shapes = [SMALL] if args.small else list(FORWARD)
    brief = {"calls": 1, "rounds": 1}
    options = brief if args.small else {"calls": 3, "rounds": 3, "round_s": 0.15}
    for name in args.only:
        if name == "check":
            yield from checks(SMALL if args.small else CHECKED)
            continue
        if name == "layers":
            layers = [moe_layers.NAMES[name] for name in args.layers]
            layers = [moe_layers.SMALL] if args.small else layers
            yield from moe_layers.rows(layers, end, options)
            continue
        if name == "kernels":
            layers = [moe_layers.NAMES[name] for name in args.layers]
            yield from moe_layers.kernel_rows(layers, calls=10)
            continue
        if name == "expert_parallel":
            yield from moe_parallel.rows(args.small, end, options)
            continue
        for shape in shapes:
            row = {"case": name, **shape._asdict()}
            if time.monotonic() > end:
                yield row | {"skipped": "time is up"}
                continue
            yield row | rates(CASES[name](shape), shape, options)


def rates(
    programs: Iterator[Program], shape: Shape, options: dict[str, Any]
) -> dict[str, Any]:
    """Times programs in alternation, and returns their TFLOP/s and error messages.

    The keys are `{name}_tflop_per_s` and `{name}_error`.
    """
    times, errors = timed(list(programs), options)
    return {
        f"{program.name}_tflop_per_s": shape.flops * program.matmuls / seconds / 1e12
        for program, seconds in times.items()
    } | errors


def grouped(*arrays: jax.Array, **options: Any) -> jax.Array:
    """Computes a grouped matmul with the kernel."""
    return pk.grouped_matmul(*arrays, implementation="mosaic", **options)


def gradient(*arrays: jax.Array, **options: Any) -> jax.Array:
    """Computes weight gradients with the kernel."""
    return pk.grouped_weight_gradient(*arrays, implementation="mosaic", **options)


def checks(shape: Shape) -> Iterator[Row]:
    """Compares kernels with their definitions, and yields a row for each comparison."""
    rows, experts, k, n = shape
    a, b, *scales = operands(shape)
    dy, x = drawn(5, (rows, n), BF16), drawn(6, (rows, k), BF16)

    def of_rows(sizes, implementation):
        return pk.grouped_matmul(a, b, sizes, *scales, implementation=implementation)

    def in_bf16(sizes, implementation):
        wide = a.astype(BF16), b.astype(BF16), sizes
        return pk.grouped_matmul(*wide, implementation=implementation)

    def of_depth(sizes, implementation):
        one, each = jnp.float32(1), jnp.exp2(jnp.arange(experts) % 5 - 2.0)
        codes = [
            pk.grouped_transpose(v, sizes, one, dtype=dtype)
            for v, dtype in ((dy, E5M2), (x, E4M3))
        ]
        options = {"implementation": implementation}
        return pk.grouped_weight_gradient(*codes, sizes, one, each, **options)

    def deviations(sizes, *scales):
        """Returns each result's standard deviation for random signs of its products."""
        squares = (jnp.square(v.astype(F32)).astype(BF16) for v in (a, b))
        scales = map(jnp.square, scales)
        arrays = *squares, sizes, *scales
        return jnp.sqrt(pk.grouped_matmul(*arrays, implementation="reference"))

    def size_of_rows(sizes):
        return jnp.sqrt(jnp.mean(of_depth(sizes, "reference") ** 2, -1, keepdims=True))

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def worst(function, unit, sizes):
        y, right = (
            function(sizes, name).astype(F32) for name in ("mosaic", "reference")
        )
        return jnp.max(jnp.abs(y - right) / (unit(sizes) + 1e-30))

    functions = {
        "forward": (of_rows, lambda sizes: deviations(sizes, *scales)),
        "bfloat16": (in_bf16, deviations),
        "weight gradient": (of_depth, size_of_rows),
    }
    for name, (function, unit) in functions.items():
        for kind in (*KINDS, *UNUSUAL):
            error = float(worst(function, unit, sizes_of(kind, rows, experts)))
            row = {"case": f"check {name}", "sizes": kind, "largest_error": error}
            # Kernels and definitions round to bfloat16; tensor cores keep sums to about
            # 14 bits.
            yield row | {"right": error < 0.05}


def forward(shape: Shape) -> Iterator[Program]:
    """Yields the forward matmul by kind of group sizes, and programs to compare."""
    rows, experts, k, _ = shape
    a, b, *scales = operands(shape)
    for kind in KINDS:
        arrays = a, b, sizes_of(kind, rows, experts), *scales
        yield Program(kind, grouped, arrays)
    sizes = sizes_of("random", rows, experts)
    tiles = pk.group_tiles(sizes, rows=rows)
    yield Program("random_listed_before", _listed, (tiles, a, b, sizes, *scales))
    dense = functools.partial(pk.matmul, implementation=_kernel_if_hopper())
    yield Program("dense_fp8", dense, (a, b[0], scales[0], scales[1][0]))
    wide_a, wide_b = (drawn(i, x.shape, BF16) for i, x in enumerate((a, b)))
    yield Program("bfloat16", grouped, (wide_a, wide_b, sizes))
    batched = wide_a.reshape(experts, rows // experts, k), wide_b
    einsum = functools.partial(jnp.einsum, "etk,enk->etn")
    yield Program("xla_batched_bfloat16", einsum, batched)
    if jax.default_backend() == "gpu":
        yield Program("jax_mosaic_bfloat16", _mosaics, (wide_a, wide_b, sizes))
        if experts <= _FEW_EXPERTS:
            transposed = wide_a, wide_b.swapaxes(1, 2), sizes
            yield Program("lax_ragged_dot_bfloat16", lax.ragged_dot, transposed)


def _listed(tiles: pk.GroupTiles, *arrays: jax.Array) -> jax.Array:
    return grouped(*arrays, tiles=tiles)


def _kernel_if_hopper() -> operations.Implementation | None:
    return "mosaic" if devices.has_hopper() else None


def _mosaics(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
    """Computes a grouped matmul with JAX's example kernel `ragged_dot`."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    tiles = {"block_m": 128, "block_n": 128, "block_k": 64, "grid_block_n": 8}
    return ragged_dot(
        a, b, group_sizes=sizes, max_concurrent_steps=4, transpose_rhs=True, **tiles
    )


def input_gradient(shape: Shape) -> Iterator[Program]:
    """Yields the matmul of input gradients, by kind of group sizes."""
    rows, experts, k, n = shape
    a, b, *scales = operands(shape._replace(k=n, n=k), backward=True)
    for kind in KINDS:
        arrays = a, b, sizes_of(kind, rows, experts), *scales
        yield Program(kind, grouped, arrays)


def weight_gradient(shape: Shape) -> Iterator[Program]:
    """Yields the matmul of weight gradients by kind of sizes, and others to compare."""
    rows, experts, k, n = shape
    total = pk.padded_rows(rows, experts)
    # Times do not depend on the values between groups.
    x, dy = drawn(1, (k, total), E4M3), drawn(2, (n, total), E5M2)
    scales = positive(3, ()), positive(4, (experts,))
    for kind in KINDS:
        yield Program(kind, gradient, (dy, x, sizes_of(kind, rows, experts), *scales))
    one, length = jnp.float32(1), rows // 128 * 128
    dense = functools.partial(pk.matmul, implementation=_kernel_if_hopper())
    yield Program("dense_fp8", dense, (dy[:, :length], x[:, :length], one, one))
    wide = [drawn(i, v.shape, BF16) for i, v in enumerate((dy, x))]
    sizes = sizes_of("random", rows, experts)
    yield Program("bfloat16", gradient, (*wide, sizes))
    batched = (
        drawn(5, (experts, rows // experts, n), BF16),
        drawn(6, (experts, rows // experts, k), BF16),
    )
    einsum = functools.partial(jnp.einsum, "etn,etk->enk")
    yield Program("xla_batched_bfloat16", einsum, batched)


def ragged_dot(shape: Shape) -> Iterator[Program]:
    """Yields `coat.fp8_ragged_dot` and XLA's batched matmul, forward and backward."""
    rows, experts, k, n = shape
    x, w = drawn(1, (rows, k), BF16), drawn(2, (experts, k, n), BF16)
    dy = drawn(3, (rows, n), BF16)

    def passes(dot, x, w, dy, *sizes):
        y, vjp = jax.vjp(lambda x, w: dot(x, w, *sizes), x, w)
        return y, *vjp(dy)

    sizes = sizes_of("random", rows, experts)
    ours = functools.partial(passes, coat.fp8_ragged_dot)
    yield Program("random", ours, (x, w, dy, sizes), matmuls=3)
    batched = functools.partial(passes, functools.partial(jnp.einsum, "etk,ekn->etn"))
    x, dy = (v.reshape(experts, rows // experts, -1) for v in (x, dy))
    yield Program("xla_batched_bfloat16", batched, (x, w, dy), matmuls=3)


def settings(shape: Shape) -> Iterator[Program]:
    """Yields the forward matmul and weight gradients with every tuning."""
    rows, experts, k, n = shape
    sizes = sizes_of("random", rows, experts)
    a, b, *scales = operands(shape)
    for tiles in tuning.ALONG_M:
        call = functools.partial(grouped, tuning=tiles)
        yield Program(f"forward, {tiles}", call, (a, b, sizes, *scales))
    total = pk.padded_rows(rows, experts)
    x, dy = drawn(1, (k, total), E4M3), drawn(2, (n, total), E5M2)
    for tiles in tuning.ALONG_K:
        call = functools.partial(gradient, tuning=tiles)
        yield Program(f"weight gradient, {tiles}", call, (dy, x, sizes))


CASES: dict[str, Callable[[Shape], Iterator[Program]]] = {
    "check": lambda shape: iter(()),
    "forward": forward,
    "weight_gradient": weight_gradient,
    "input_gradient": input_gradient,
    "ragged_dot": ragged_dot,
    "settings": settings,
}


def bars(rows: list[Row]) -> list[Bar]:
    """Returns the targets for an H100."""
    reached = []
    targets = (
        ("forward", "random_tflop_per_s", FORWARD),
        ("input_gradient", "random_tflop_per_s", FORWARD),
        ("weight_gradient", "random_tflop_per_s", GRADIENT),
        ("forward", "bfloat16_tflop_per_s", IN_BF16),
    )
    for case, key, by_shape in targets:
        for row in rows:
            shape = Shape(*(row.get(name) for name in Shape._fields))
            if row["case"] == case and key in row and shape in by_shape:
                sizes = " x ".join(map(str, shape))
                name = f"{case}, {key.removesuffix('_tflop_per_s')}, {sizes}, TFLOP/s"
                reached.append(Bar.of(name, ">=", by_shape[shape], row[key]))
    return [*reached, *moe_layers.bars(rows)]


if __name__ == "__main__":
    main()
