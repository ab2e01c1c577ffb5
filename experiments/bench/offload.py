"""Measures layers with a policy that offloads activations to the host's memory.

    uv run python -m experiments.bench.offload

The layers are a stack of Llama layers in plain Flax, in a scan. There are two cases:
BF16 with `jax.checkpoint`, and `coat.fp8_remat` with FP8 matmuls. Each case runs with
two policies. One keeps the results of all matmuls in the host's memory between the
forward and the backward pass; the other keeps them in the device's memory. The backward
pass recomputes everything else. The forward and backward passes of all programs are
timed in alternation, and the bytes on the host and on the device are counted.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from rich.console import Console

import coat_jax as coat
from experiments.bench.foreign import forward_backward
from experiments.common import tables
from experiments.common.foreign_layers import made
from experiments.common.layer_cases import (
    LLAMA_3_8B,
    Shape,
    add_sizes,
    normal,
    random_params,
    shape_of,
)
from experiments.common.programs import (
    new_parser,
    positive_int,
    results_path,
    rows_to_join,
    usage_errors,
)
from experiments.common.results import Bar, default_path, write_results
from experiments.common.tables import Column
from experiments.common.timing import OPTIONS, add_turns, in_turns, turns_of

Row = dict[str, Any]
_POLICIES = {
    True: jax.checkpoint_policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    ),
    False: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
# The wrapper of a layer and its matmul, by case.
CASES: dict[str, tuple[Callable, Callable | None]] = {
    "bf16": (jax.checkpoint, None),
    "coat": (coat.fp8_remat, coat.fp8_dot_general),
}
_BYTES, _TIME = 0.57, 1.0


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program with the arguments `argv`, by default the command line's."""
    top = new_parser("experiments.bench.offload", __doc__)
    add = top.add_argument
    add("--layers", type=positive_int, default=8)
    add_sizes(top, LLAMA_3_8B)
    add_turns(top)
    add("--out", type=results_path, default=default_path("bench_offload"))
    args = top.parse_args(argv)
    with usage_errors(top):
        shape = shape_of(args)
    rows_to_join(top, args.out)  # Another device's results are refused.
    rows = measured(shape, args.layers, **turns_of(args))
    write_results(args.out, rows=rows, bars=bars(rows))
    Console(width=110).print(table(rows), tables.bars(bars(rows)))


def measured(shape: Shape, layers: int, **options: float) -> list[Row]:
    """Times all cases in alternation, with and without offloading.

    Args:
      shape: The shape of a layer.
      layers: The number of layers.
      **options: The arguments of `in_turns`.

    Returns:
      A row for each case and policy: whether it offloads, the milliseconds of the
      forward and backward passes, the bytes on the host between them, and the bytes
      that the program takes on the device beyond its arguments and results.
    """
    x, dy = normal(0, shape.input()), 1e-3 * normal(1, shape.input())
    rows, calls = [], []
    for case, offloads, run, params in programs(shape, layers):
        step = jax.jit(partial(forward_backward, run))
        step = step.lower(params, dy, x).compile(OPTIONS)
        calls.append(partial(step, random_params(params), dy, x))
        rows.append(
            {"case": case, "offloads": offloads, "layers": layers}
            | {"host_bytes": host_bytes(run, params, x)}
            | {"temporary_bytes": step.memory_analysis().temp_size_in_bytes}
        )
    for row, seconds in zip(rows, in_turns(calls, **options), strict=True):
        row["ms"] = 1e3 * seconds
    return rows


def programs(
    shape: Shape, layers: int
) -> Iterator[tuple[str, bool, Callable[..., jax.Array], Any]]:
    """Yields the name of each case, whether it offloads, its function and parameters.

    The parameters are abstract.
    """
    for case, (wrap, dot_general) in CASES.items():
        graph, params = made("llama", shape, dot_general)
        params = jax.tree.map(partial(_stacked, layers), params)

        def layer(params, x, graph=graph):
            return nnx.merge(graph, params)(x)

        for offloads, policy in _POLICIES.items():
            yield case, offloads, partial(_run, wrap(layer, policy=policy)), params


def _stacked(layers: int, p: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((layers, *p.shape), p.dtype)


def _run(layer: Callable, params: Any, x: jax.Array) -> jax.Array:
    """Computes a stack of layers."""
    return lax.scan(lambda x, p: (layer(p, x), None), x, params)[0]


def host_bytes(run: Callable, params: Any, x: jax.Array) -> int:
    """Returns the bytes on the host between the forward and the backward pass."""
    program = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(run, *args)[1]))
    saved = program(params, x).out_avals
    on_host = [a for a in saved if a.memory_space == jax.memory.Space.Host]
    return sum(a.size * jnp.dtype(a.dtype).itemsize for a in on_host)


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Returns the targets of `coat` relative to `bf16`, both with offloading."""
    at = {row["case"]: row for row in rows if row["offloads"]}
    host, time = (at["coat"][key] / at["bf16"][key] for key in ("host_bytes", "ms"))
    targets = [Bar.of("bytes on the host / bf16's", "<=", _BYTES, host)]
    if jax.default_backend() == "gpu":
        targets.append(Bar.of("time / bf16's", "<=", _TIME, time))
    return targets


def table(rows: Sequence[Row]) -> Any:
    """Returns the rows as a table."""
    columns = (
        Column("", "case"),
        Column("offloads", lambda row: "yes" if row["offloads"] else "no"),
        Column("forward, backward, ms", "ms", "{:.2f}"),
        Column("on the host, MiB", lambda row: row["host_bytes"] / 2**20, "{:,.0f}"),
        Column(
            "temporaries, MiB", lambda row: row["temporary_bytes"] / 2**20, "{:,.0f}"
        ),
    )
    return tables.table("Layers whose activations wait on the host", columns, rows)


if __name__ == "__main__":
    main()
