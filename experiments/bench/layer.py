"""Measures time and memory of a Llama layer, forward and backward, by recipe.

    uv run python -m experiments.bench.layer

times a layer with BF16 weights: the BF16 layer as JAX differentiates it, the same layer
with policies of `jax.checkpoint` and with `fp8_remat`, and the FP8 recipes. All cases
of a shape are timed in alternation. The paper's numbers, from table 6 and the totals of
table 2, are printed below ours. Rows of other hidden sizes and sequence lengths remain
in the results file.
"""

import argparse
import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from rich.console import Console
from tqdm import tqdm

import coat_jax as coat
from experiments.bench import layer_report
from experiments.common import profiling
from experiments.common.layer_cases import (
    CASES,
    PLAIN,
    TARGET_UNITS,
    LayerState,
    Shape,
    first_histories,
    forward_backward,
    layer,
    llama_intermediate,
    normal,
    random_params,
)
from experiments.common.programs import (
    new_parser,
    positive_int,
    results_path,
    rows_to_join,
    usage_errors,
)
from experiments.common.results import (
    Bar,
    default_path,
    known_rows,
    versions,
    write_results,
)
from experiments.common.tables import bars as bars_table
from experiments.common.timing import OPTIONS, add_turns, in_turns, turns_of

MIB = 2**20
Row = dict[str, Any]
# Target speedups of "coat" over the fastest BF16 layer, by hidden size and sequence.
SPEED_TARGETS = {
    (4096, 2048): 1.80,
    (4096, 4096): 1.70,
    (2048, 2048): 1.52,
    (2048, 4096): 1.50,
}
# The cases that `--profile` profiles.
_PROFILED = ("bf16", "coat", "coat, delayed scaling")
# `fp8_remat` of all residuals of autodiff, and of the residuals that a policy saves.
_REMATS = ("fp8_remat", "fp8_remat of products")


class Compiled(NamedTuple):
    """The compiled programs of a case, and their memory.

    Attributes:
      forward: The program of the forward pass.
      forward_backward: The program of the forward and the backward pass.
      histories: The abstract histories of delayed scaling.
      known: The entries of the case's row that are known after compilation: memory
        sizes.
    """

    forward: jax.stages.Compiled
    forward_backward: jax.stages.Compiled
    histories: nnx.State
    known: Row

    def state(self, params: nnx.State) -> LayerState:
        """Returns the state of a layer: parameters, and new histories of amaxes."""
        return LayerState(params, first_histories(self.histories))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program with the arguments `argv`, by default the command line's."""
    top = parser()
    args = top.parse_args(argv)
    if args.profile and "bf16" not in args.cases:
        top.error("--profile compares with bf16, which --cases lack")
    with usage_errors(top):
        all_shapes = shapes(args)
    console = Console(width=130)
    rows_to_join(top, args.out)  # Exits if the file is of another device.
    compiled = compile_cases(all_shapes, args.cases)
    for shape, programs in tqdm(compiled.items(), unit="shape", disable=None):
        new_rows = shape_rows(shape, programs, **turns_of(args))
        own_parts = profile_rows(shape, programs) if args.profile else []
        rows, parts = known(args.out)  # Other processes may have written to it.
        rows, parts = replaced(rows, new_rows), replaced(parts, own_parts)
        write(args.out, rows, parts)
    for table in layer_report.tables(rows):
        console.print(table)
    if parts:
        console.print(layer_report.parts_table(parts))
    console.print(bars_table(bars(rows)))
    layer_report.draw(rows).savefig(args.out.with_suffix(".png"))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line.

    The default shapes are the four shapes of the paper's table 6.
    """
    top = new_parser("experiments.bench.layer", __doc__)
    add = top.add_argument
    add("--hidden", type=positive_int, nargs="+", default=[4096, 2048], metavar="H")
    add("--seq", type=positive_int, nargs="+", default=[2048, 4096], metavar="S")
    add("--batch", type=positive_int, default=4)
    add(
        "--intermediate",
        type=positive_int,
        help="by default Llama's for each hidden size",
    )
    add("--kv-heads", type=positive_int, help="by default as many as query heads")
    add("--head-dim", type=positive_int, default=128)
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    add_turns(top)
    add("--profile", action="store_true", help="say where time goes; on GPUs")
    out = default_path("bench_layer")
    add(
        "--out", type=results_path, default=out, help="joined; a figure goes next to it"
    )
    return top


def shapes(args: argparse.Namespace) -> list[Shape]:
    """Returns the shapes of all pairs of a hidden size and a sequence length."""
    return [
        Shape(
            hidden=hidden,
            seq=seq,
            batch=args.batch,
            intermediate=args.intermediate or llama_intermediate(hidden),
            kv_heads=args.kv_heads or hidden // args.head_dim,
            head_dim=args.head_dim,
        )
        for hidden, seq in itertools.product(args.hidden, args.seq)
    ]


def compile_cases(
    shapes: Sequence[Shape], cases: Sequence[str] = tuple(CASES)
) -> dict[Shape, dict[str, Compiled]]:
    """Compiles every case for every shape, several of them in parallel.

    Returns:
      The compiled programs by shape and case.
    """
    both = [(case, shape) for shape in shapes for case in cases]
    programs: dict[Shape, dict[str, Compiled]] = {shape: {} for shape in shapes}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(compile_case, *zip(*both, strict=True))
        for (case, shape), program in zip(
            both, tqdm(compiled, "compiling", len(both), disable=None), strict=True
        ):
            programs[shape][case] = program
    return programs


def known(path: Path) -> tuple[list[Row], list[Row]]:
    """Returns the rows of a results file, and the rows of its profiles."""
    rows, parts = (known_rows(path, of=of) for of in ("rows", "parts"))
    return rows, parts


def replaced(rows: Sequence[Row], new_rows: Sequence[Row]) -> list[Row]:
    """Returns `rows`, sorted, with `new_rows` in place of the rows of the same shape.

    All of `new_rows` have one shape.
    """
    remaining = [
        row for row in rows if not new_rows or _sizes(row) != _sizes(new_rows[0])
    ]
    return sorted([*remaining, *new_rows], key=lambda row: (-row["hidden"], row["seq"]))


def _sizes(row: Row) -> tuple[int, int]:
    """Returns the hidden size and the sequence length, which identify a shape."""
    return row["hidden"], row["seq"]


def shape_rows(
    shape: Shape, compiled: Mapping[str, Compiled], **options: float
) -> list[Row]:
    """Times the cases of a shape in alternation, and returns a row per case.

    Ratios are speedups over the BF16 layer as `jax.vjp` differentiates it, and over the
    fastest BF16 layer without this library. `options` are arguments of `in_turns`.
    """
    params, x, dy = arguments(shape)
    pairs = [(c, c.state(params)) for c in compiled.values()]
    forward = in_turns([partial(c.forward, s, x) for c, s in pairs], **options)
    both = in_turns(
        [partial(c.forward_backward, s, x, dy) for c, s in pairs], **options
    )
    ms = {case: 1e3 * seconds for case, seconds in zip(compiled, both, strict=True)}
    plain = [ms[case] for case in compiled if case in PLAIN]
    commit = versions()["commit"]
    return [
        {"case": case}
        | dataclasses.asdict(shape)
        | {"forward_ms": 1e3 * ahead, "backward_ms": ms[case] - 1e3 * ahead}
        | {"forward_backward_ms": ms[case]}
        | {"ratio_to_bf16": ms["bf16"] / ms[case] if "bf16" in ms else None}
        | {"ratio_to_fastest_bf16": min(plain) / ms[case] if plain else None}
        | result.known
        | layer_report.paper(case, shape)
        | {"commit": commit}
        for (case, result), ahead in zip(compiled.items(), forward, strict=True)
    ]


def compile_case(name: str, shape: Shape) -> Compiled:
    """Compiles a case for a shape, and its backward pass alone to find its memory."""
    apply, state = layer(CASES[name], shape)
    x = shape.input()

    def compiled(function, *args):
        return jax.jit(function).lower(*args).compile(OPTIONS)

    both = compiled(forward_backward(apply), state, x, x)
    _, vjp = jax.eval_shape(lambda state, x: jax.vjp(apply, state, x), state, x)
    backward = compiled(lambda vjp, dy: vjp(dy), vjp, x)
    # The report does not count arguments. In a model the input is the output of another
    # layer, so `-x` makes it count if backward reads it.
    saved = coat.residual_report(lambda state, x: apply(state, -x), state, x).nbytes
    sizes = {
        "saved_units": saved / shape.unit,
        "saved_mib": saved / MIB,
        "backward_temporaries_mib": _temporaries_mib(backward),
        "temporaries_mib": _temporaries_mib(both),
    }
    return Compiled(compiled(apply, state, x), both, state.histories, sizes)


def _temporaries_mib(compiled: jax.stages.Compiled) -> float:
    return compiled.memory_analysis().temp_size_in_bytes / MIB


def arguments(shape: Shape) -> tuple[nnx.State, jax.Array, jax.Array]:
    """Draws random BF16 parameters, an input, and the gradient of the output."""
    _, (params, _) = layer(CASES["bf16"], shape)
    x, dy = (normal(seed, shape.input()) for seed in (1, 2))
    return random_params(params), x, 1e-3 * dy


def profile_rows(shape: Shape, compiled: Mapping[str, Compiled]) -> list[Row]:
    """Profiles some cases, and returns a row for each kind of kernel and for gaps.

    The floor is the time that would remain if quantization cost nothing: half of BF16's
    time for matmuls, and all of BF16's time for attention. "bf16" must be among the
    cases.
    """
    params, *arrays = arguments(shape)
    by_case = {}
    for case in _PROFILED:
        if case in compiled:
            run, state = compiled[case].forward_backward, compiled[case].state(params)
            by_case[case] = profiling.kernel_ms(partial(run, state, *arrays))
    plain = by_case["bf16"]
    floor = {"products": plain["products"] / 2, "attention": plain["attention"]}
    return [
        {"case": case}
        | dataclasses.asdict(shape)
        | {"part": kind, "ms": ms, "floor_ms": floor.get(kind, 0.0)}
        for case, parts in by_case.items()
        for kind, ms in parts.items()
    ]


def bars(rows: list[Row]) -> list[Bar]:
    """Returns the targets of each shape for the cases that were measured."""
    targets = []
    for (hidden, seq), group in itertools.groupby(rows, key=_sizes):
        at = {row["case"]: row for row in group}
        targets += [
            bar._replace(name=f"{hidden}, {seq}: {bar.name}")
            for bar in (*_speed(at, SPEED_TARGETS.get((hidden, seq))), *_memory(at))
        ]
    return targets


def _speed(at: dict[str, Row], target: float | None) -> list[Bar]:
    ms = {case: row["forward_backward_ms"] for case, row in at.items()}
    targets = []
    if target and "coat" in at and at["coat"]["ratio_to_fastest_bf16"]:
        ratio = at["coat"]["ratio_to_fastest_bf16"]
        targets.append(Bar.of("coat, times the fastest BF16", ">=", target, ratio))
    if {"coat", "coat_max"} <= ms.keys():
        ratio = ms["coat"] / ms["coat_max"]
        targets.append(Bar.of("coat_max, times coat", ">=", 0.95, ratio))
    for name in _REMATS:
        if {"bf16", f"bf16, {name}"} <= ms.keys():
            ratio = ms[f"bf16, {name}"] / ms["bf16"]
            targets.append(Bar.of(f"{name}, time / bf16", "<=", 1.06, ratio))
    return targets


def _memory(at: dict[str, Row]) -> list[Bar]:
    units = {case: row["saved_units"] for case, row in at.items()}
    targets = [
        Bar.of(f"{case}, U saved", "<=", target, units[case])
        for case, target in TARGET_UNITS.items()
        if case in at
    ]
    for name in _REMATS:
        if {"bf16", f"bf16, {name}"} <= at.keys():
            ratio = units["bf16"] / units[f"bf16, {name}"]
            targets.append(Bar.of(f"{name}, times smaller than bf16", ">=", 1.8, ratio))
    if "coat" in at:
        better = sum(dominates(at[c], at["coat"]) for c in PLAIN if c in at)
        name = "BF16 policies both smaller and faster than coat"
        targets.append(Bar.of(name, "<=", 0, better))
    for case in ("coat", "coat_max"):
        if {case, "bf16"} <= at.keys():
            key = "backward_temporaries_mib"
            ratio = at[case][key] / at["bf16"][key]
            targets.append(Bar.of(f"{case}, temporaries / BF16's", "<=", 1.0, ratio))
    return targets


def dominates(row: Row, other: Row) -> bool:
    """Returns whether a case saves fewer bytes and takes less time than `other`."""
    keys = ("saved_units", "forward_backward_ms")
    return all(row[key] < other[key] for key in keys)


def write(path: Path, rows: list[Row], parts: list[Row]) -> None:
    """Writes the results file, with any rows of profiles in the entry "parts"."""
    extra = {"parts": parts} if parts else {}
    write_results(path, rows=rows, bars=bars(rows), **extra)


if __name__ == "__main__":
    main()
