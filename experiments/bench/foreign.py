"""Measures time and memory of layers in plain Flax, with and without this library.

    uv run python -m experiments.bench.foreign

times the forward and backward passes of layers of several kinds in BF16: unchanged,
with `coat.fp8_remat`, with `dot_general=coat.fp8_dot_general`, with both, with both and
recomputed attention, and converted by `coat.fp8`. Decoder layers are also compared with
this library's own layer, in its recipe `coat` and in BF16. All cases of a layer are
timed in alternation. The unit U is the size of the residual stream in BF16. Commands
for the sizes of Qwen3-8B, and for heads as in Gemma 2:

    uv run python -m experiments.bench.foreign --layers qwen --intermediate 12288
    uv run python -m experiments.bench.foreign --layers "gemma 2" --head-dim 256
"""

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
from flax import nnx
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import coat_jax as coat
from coat_jax.layers.attention import Scores
from experiments.common import tables
from experiments.common.foreign_layers import (
    LAYERS,
    SOFTCAP,
    ConstrainedLlama,
    FlaxLlama,
    Gemma2,
    Gemma2InKernels,
    Layer,
    NamedLlama,
    Qwen,
    made,
)
from experiments.common.layer_cases import CASES as LAYER_CASES
from experiments.common.layer_cases import (
    LLAMA_3_8B,
    Shape,
    add_sizes,
    layer,
    normal,
    random_params,
    shape_of,
)
from experiments.common.programs import (
    new_parser,
    results_path,
    rows_to_join,
    usage_errors,
)
from experiments.common.results import Bar, default_path, versions, write_results
from experiments.common.tables import Column
from experiments.common.tables import bars as bars_table
from experiments.common.timing import OPTIONS, add_turns, in_turns, turns_of

Row = dict[str, Any]
# The `dot_general` and the wrapper of the layer, by case.
CASES: dict[str, tuple[Callable | None, Callable]] = {
    "bf16": (None, lambda fn: fn),
    "fp8_remat": (None, coat.fp8_remat),
    "fp8_dot_general": (coat.fp8_dot_general, lambda fn: fn),
    "both": (coat.fp8_dot_general, coat.fp8_remat),
    "both, attention again": (
        coat.fp8_dot_general,
        partial(coat.fp8_remat, rerun_attention=True),
    ),
    "fp8": (None, coat.fp8),
}
# The recipe of the library's own layer, which is compared with Flax's, by case.
OWN = "own layer"
OWN_CASES = {OWN: "coat", f"{OWN}, bf16": "bf16"}
# Options with which the library's own layer computes what a layer of Flax computes.
_GEMMA_2: dict[str, Any] = {"norm_placement": "both", "norm_offset": 1.0}
_GEMMA_2 |= {"gate": "gelu", "scores": Scores(softcap=SOFTCAP)}
OWN_OPTIONS: dict[type[Layer], dict[str, Any]] = {
    FlaxLlama: {},
    NamedLlama: {},
    ConstrainedLlama: {},
    Qwen: {"qk_norm": "head"},
    Gemma2: _GEMMA_2,
    Gemma2InKernels: _GEMMA_2,
}
# Targets on one Hopper GPU: the speed relative to BF16 and to the library's own layer,
# the saved U, and BF16's saved bytes relative to these.
_SPEED = {
    ("llama", "both"): 1.52,
    ("llama", "fp8_dot_general"): 1.45,
    ("diffusion transformer", "both"): 1.5,
}
_UNITS = {
    ("llama", "both"): 7.6,
    ("llama, named", "both"): 7.6,
    ("llama, constrained", "both"): 7.6,
    ("diffusion transformer", "both"): 8.5,
}
_OTHERS, _OF_OWN, _SMALLER = 1.35, 0.98, 3.5
# Targets of the library's own layer for models other than Llama: the speed relative to
# the fastest BF16 layer, and the saved U.
_OWN_SPEED, _OWN_UNITS = 1.5, 8.5
_OTHER_MODELS = ("qwen", "gemma 2", "gemma 2, coat.attention")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program with the arguments `argv`, by default the command line's."""
    top = parser()
    args = top.parse_args(argv)
    with usage_errors(top):
        shape = shape_of(args)
    earlier = rows_to_join(top, args.out)
    options = turns_of(args)
    rows = [row for row in earlier if row["layer"] not in args.layers]
    for name in tqdm(args.layers, unit="layer", disable=None):
        rows += layer_rows(name, shape, args.cases, **options)
        write_results(args.out, rows=rows, bars=bars(rows))
    console = Console(width=110)
    console.print(table(rows))
    console.print(bars_table(bars(rows)))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line; the default shape is Llama-3-8B's."""
    top = new_parser("experiments.bench.foreign", __doc__)
    add = top.add_argument
    cases = [*CASES, *OWN_CASES]
    add("--layers", nargs="+", choices=LAYERS, default=list(LAYERS), metavar="LAYER")
    add("--cases", nargs="+", choices=cases, default=cases, metavar="CASE")
    add_sizes(top, LLAMA_3_8B)
    add_turns(top)
    add("--out", type=results_path, default=default_path("bench_foreign"))
    return top


def case_of(name: str, case: str, shape: Shape) -> tuple[Callable, nnx.State]:
    """Returns a case as a function, and the abstract parameters of that function.

    The function takes parameters and inputs.

    Args:
      name: The name of a layer in `LAYERS`.
      case: A name in `CASES` or `OWN_CASES`.
      shape: The shape of the layer.
    """
    if case in OWN_CASES:
        options = OWN_OPTIONS[LAYERS[name]]
        return layer(LAYER_CASES[OWN_CASES[case]], shape, **options)
    dot_general, wrap = CASES[case]
    graph, params = made(name, shape, dot_general)
    return wrap(lambda params, *xs: nnx.merge(graph, params)(*xs)), params


def layer_rows(
    name: str, shape: Shape, cases: Sequence[str], **options: float
) -> list[Row]:
    """Times the cases of a layer in alternation, and returns a row per case.

    The case "bf16" is always among the rows. `options` are arguments of `in_turns`.
    """
    stream = shape.input()
    xs = [stream] * LAYERS[name].inputs
    chosen = ["bf16", *(case for case in cases if case != "bf16")]
    if LAYERS[name] not in OWN_OPTIONS:
        chosen = [case for case in chosen if case not in OWN_CASES]
    functions = {case: case_of(name, case, shape) for case in chosen}

    def compiled(fn, params):
        jitted = jax.jit(partial(forward_backward, fn))
        return jitted.lower(params, stream, *xs).compile(OPTIONS)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = list(pool.map(lambda case: compiled(*case), functions.values()))
    dy, *inputs = (normal(i, x) for i, x in enumerate((stream, *xs)))
    values = [random_params(params) for _, params in functions.values()]
    calls = [
        partial(program, params, 1e-3 * dy, *inputs)
        for program, params in zip(programs, values, strict=True)
    ]
    ms = [1e3 * seconds for seconds in in_turns(calls, **options)]
    # The report does not count arguments. In a model the inputs are outputs of other
    # layers, so `-x` makes them count.
    saved = {
        case: coat.residual_report(
            lambda params, *xs, fn=fn: fn(params, *(-x for x in xs)), params, *xs
        ).nbytes
        for case, (fn, params) in functions.items()
    }
    return [
        {"layer": name, "case": case}
        | dataclasses.asdict(shape)
        | {"forward_backward_ms": time, "ratio_to_bf16": ms[0] / time}
        | {"saved_units": saved[case] / shape.unit}
        | {"times_smaller": saved["bf16"] / saved[case]}
        | {"commit": versions()["commit"]}
        for case, time in zip(functions, ms, strict=True)
    ]


def forward_backward(
    fn: Callable, params: nnx.State, dy: jax.Array, *xs: jax.Array
) -> tuple[jax.Array, Any]:
    """Returns a layer's output, and the gradients of its parameters and inputs.

    `dy` is the gradient of the output.
    """
    y, vjp = jax.vjp(fn, params, *xs)
    return y, vjp(dy)


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Returns the targets of the measured cases for memory and, on GPUs, for speed."""
    results = []
    own_ms = {
        row["layer"]: row["forward_backward_ms"] for row in rows if row["case"] == OWN
    }
    for row in rows:
        key = row["layer"], row["case"]
        name = ", ".join(key)
        both = row["case"] in ("both", "fp8")
        is_llama = row["layer"].startswith("llama")
        speed = _SPEED.get(key) or (_OTHERS if both and not is_llama else None)
        if speed and jax.default_backend() == "gpu":
            ratio = row["ratio_to_bf16"]
            results.append(Bar.of(f"{name}: times bf16", ">=", speed, ratio))
        if row["case"] == "both" and row["layer"] in own_ms:
            ratio = own_ms[row["layer"]] / row["forward_backward_ms"]
            label = f"{name}: times the own layer's speed"
            if jax.default_backend() == "gpu":
                results.append(Bar.of(label, ">=", _OF_OWN, ratio))
        if key in _UNITS:
            units = row["saved_units"]
            results.append(Bar.of(f"{name}: U saved", "<=", _UNITS[key], units))
        if both:
            smaller = row["times_smaller"]
            results.append(Bar.of(f"{name}: times smaller", ">=", _SMALLER, smaller))
    return [*results, *_own_bars(rows)]


def _own_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """Yields the targets of this library's own layer for models other than Llama."""
    for name in _OTHER_MODELS:
        at = {row["case"]: row for row in rows if row["layer"] == name}
        if OWN not in at:
            continue
        units = at[OWN]["saved_units"]
        yield Bar.of(f"{name}, {OWN}: U saved", "<=", _OWN_UNITS, units)
        if jax.default_backend() == "gpu":
            plain = ("bf16", f"{OWN}, bf16")
            fastest = min(at[c]["forward_backward_ms"] for c in plain if c in at)
            ratio = fastest / at[OWN]["forward_backward_ms"]
            label = f"{name}, {OWN}: times the fastest bf16"
            yield Bar.of(label, ">=", _OWN_SPEED, ratio)


def table(rows: Sequence[Row]) -> Table:
    """Returns the rows as a table."""
    columns = (
        Column("layer", "layer"),
        Column("case", "case"),
        Column("ms", "forward_backward_ms", "{:.2f}"),
        Column("times bf16", "ratio_to_bf16", "{:.2f}"),
        Column("U saved", "saved_units", "{:.2f}"),
        Column("times smaller", "times_smaller", "{:.1f}"),
    )
    return tables.table("Layers of plain Flax", columns, rows)


if __name__ == "__main__":
    main()
