"""Times an AdamW step, and its memory: FP8 moments against optax in float32.

    uv run python -m experiments.bench.optimizer

times steps in place (parameters and state are donated) on an array of a billion
parameters and on the parameters of Llama 2 7B, both as 291 tensors and as stacked
layers. Every row is compared with `optax.adamw` with float32 moments in the same run.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import coat_jax as coat
from experiments.common.optimizers import in_float32
from experiments.common.programs import (
    new_parser,
    positive_int,
    results_path,
    rows_to_join,
)
from experiments.common.results import Bar, default_path, write_results
from experiments.common.tables import bars as bars_table

HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 4096, 11_008, 32, 32_000
ROUND_S = 1.0
MIB = 2**20
# A step maps ((parameters, state), gradients) to the new (parameters, state).
Step = Callable[[Any, Any], Any]


def fp8_adamw() -> optax.GradientTransformation:
    """Returns the optimizer that is measured."""
    return coat.fp8_adamw(1e-4, b2=0.95, weight_decay=0.1)


def optax_adamw() -> optax.GradientTransformation:
    """Returns the baseline: AdamW with float32 moments for parameters of any dtype."""
    return in_float32(optax.adamw(1e-4, b2=0.95, weight_decay=0.1))


def chain_step(
    tx: optax.GradientTransformation,
) -> tuple[optax.GradientTransformation, Step]:
    """Returns `tx`, and a step that calls `tx.update` and `optax.apply_updates`."""

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx, step


def fused_step(stochastic: bool = False) -> tuple[optax.GradientTransformation, Step]:
    """Returns `fp8_adamw()`, and a step that calls `coat.fused_update`.

    `stochastic` is whether parameters are rounded stochastically.
    """
    tx = fp8_adamw()
    key = jax.random.key(0) if stochastic else None
    return tx, lambda carry, grads: coat.fused_update(tx, grads, *carry[::-1], key=key)


def flat(last_axis: int, dtype: jnp.dtype, parameters: int) -> Any:
    """Returns an abstract matrix with about `parameters` elements.

    The length of its rows is `last_axis`.
    """
    rows = max(1, round(parameters / last_axis / 128)) * 128
    return jax.ShapeDtypeStruct((rows, last_axis), dtype)


def llama_7b(stacked: bool) -> Any:
    """Returns Llama 2 7B's abstract BF16 parameters: 291 tensors, or stacked layers."""
    h, f = HIDDEN, INTERMEDIATE
    layer = {"q": (h, h), "k": (h, h), "v": (h, h), "o": (h, h), "gate": (h, f)}
    layer |= {"up": (h, f), "down": (f, h), "norm_1": (h,), "norm_2": (h,)}
    shapes = {"embedding": (VOCAB, h), "head": (h, VOCAB), "norm": (h,)}
    if stacked:
        shapes |= {name: (LAYERS, *shape) for name, shape in layer.items()}
    else:
        layers = range(LAYERS)
        shapes |= {f"{i}/{name}": s for i in layers for name, s in layer.items()}
    return {k: jax.ShapeDtypeStruct(v, jnp.bfloat16) for k, v in shapes.items()}


def random_tree(abstract: Any, scale: float) -> Any:
    """Draws normal numbers, scaled by `scale`, for a tree of abstract arrays.

    Arrays are drawn one after another, because drawing BF16 numbers takes temporary
    arrays of 32 bits.
    """
    leaves, treedef = jax.tree.flatten(abstract)

    def draw(seed, x):
        normal = jax.random.normal(jax.random.key(seed), x.shape, x.dtype)
        return normal * jnp.asarray(scale, x.dtype)

    draw = jax.jit(draw, static_argnums=1)
    return treedef.unflatten([draw(i, x) for i, x in enumerate(leaves)])


def measure(
    tx: optax.GradientTransformation, step: Step, abstract: Any, repeats: int
) -> dict[str, float]:
    """Compiles a step, times `repeats` rounds of steps in place, and returns a row.

    A round takes about a second, for two reasons. Every case then runs on an equally
    hot GPU. And the first step of a round waits while the host passes up to thousands
    of arrays to the device; among many steps this wait counts for little, because in
    later steps the host is ahead.
    """
    params, grads = random_tree(abstract, 0.02), random_tree(abstract, 1e-3)
    carry = (params, jax.jit(tx.init)(params))
    started = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(carry, grads).compile()
    compile_s = time.perf_counter() - started

    def run(carry, steps):
        started = time.perf_counter()
        for _ in range(steps):
            carry = compiled(carry, grads)
        carry = jax.block_until_ready(carry)
        return carry, (time.perf_counter() - started) / steps

    carry, _ = run(carry, 1)
    carry, seconds = run(carry, 10)
    steps = max(1, round(ROUND_S / seconds))
    rounds = []
    for _ in range(repeats):
        carry, seconds = run(carry, steps)
        rounds.append(seconds)
    size = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract))
    state = sum(x.nbytes for x in jax.tree.leaves(carry[1]))
    ms = statistics.median(rounds) * 1e3
    moved = 2 * sum(x.nbytes for x in jax.tree.leaves(carry))
    moved += sum(x.nbytes for x in jax.tree.leaves(grads))
    return {
        "parameters": size,
        "ms": ms,
        "ms_per_1e9": ms / size * 1e9,
        "fastest_ms_per_1e9": min(rounds) * 1e3 / size * 1e9,
        "gb_per_s": moved / ms / 1e6,
        "state_bytes_per_parameter": state / size,
        "temporaries_mib": compiled.memory_analysis().temp_size_in_bytes / MIB,
        "compile_s": compile_s,
    }


def cases(parameters: int) -> list[tuple[str, str, Any, Any]]:
    """Returns the cases: (parameters' name, method, abstract tree, (optimizer, step)).

    The case of optax comes first, as the baseline of the cases that follow.
    """
    bf16, f32 = jnp.bfloat16, jnp.float32
    matrix = flat(32_768, bf16, parameters)
    wide, ragged = flat(32_768, f32, parameters), flat(5_000, bf16, parameters // 4)
    heads = flat(64, bf16, parameters // 4)
    trees = {"291 tensors": llama_7b(False), "stacked layers": llama_7b(True)}
    all_cases = [
        ("matrix bfloat16", "optax.adamw", matrix, chain_step(optax_adamw())),
        ("matrix bfloat16", "fused_update", matrix, fused_step()),
        ("matrix bfloat16", "fused_update, stochastic", matrix, fused_step(True)),
        ("matrix bfloat16", "tx.update", matrix, chain_step(fp8_adamw())),
        ("matrix float32", "optax.adamw", wide, chain_step(optax_adamw())),
        ("matrix float32", "fused_update", wide, fused_step()),
        ("last axis 5000", "optax.adamw", ragged, chain_step(optax_adamw())),
        ("last axis 5000", "fused_update", ragged, fused_step()),
        ("last axis 64", "optax.adamw", heads, chain_step(optax_adamw())),
        ("last axis 64", "fused_update", heads, fused_step()),
    ]
    for name, tree in trees.items():
        all_cases.append((name, "fused_update", tree, fused_step()))
    return all_cases


def bars(rows: list[dict]) -> list[Bar]:
    """Returns the targets for the speed, temporaries and compilation of steps."""
    at = {(row["what"], row["method"]): row for row in rows}
    parameters = "matrix bfloat16"
    fused = at[parameters, "fused_update"]
    targets = [
        Bar.of(
            f"{name}, times optax", ">=", least, at[parameters, name]["ratio_to_optax"]
        )
        for name, least in (
            ("fused_update", 1.8),
            ("fused_update, stochastic", 1.75),
            ("tx.update", 1.25),
        )
    ]
    temporaries = fused["temporaries_mib"]
    targets.append(Bar.of("fused_update, temporaries, MiB", "<=", 32, temporaries))
    for parameters in ("291 tensors", "stacked layers"):
        row = at[parameters, "fused_update"]
        ratio = row["ms_per_1e9"] / fused["ms_per_1e9"]
        targets.append(Bar.of(f"{parameters}, a parameter's time", "<=", 1.1, ratio))
        targets.append(
            Bar.of(f"{parameters}, compilation, s", "<=", 20, row["compile_s"])
        )
    return targets


def main() -> None:
    """Measures the cases, prints a table and writes the results file."""
    parser = new_parser("experiments.bench.optimizer", __doc__)
    parser.add_argument("--parameters", type=positive_int, default=1_000_000_000)
    parser.add_argument(
        "--repeats", type=positive_int, default=5, help="rounds of a second"
    )
    parser.add_argument("--no-trees", action="store_true", help="leave Llama 2 7B out")
    parser.add_argument(
        "--out", type=results_path, default=default_path("bench_optimizer")
    )
    args = parser.parse_args()
    rows_to_join(parser, args.out)  # Another device's results are refused.
    table = Table("parameters", "step", "ms / 1e9", "GB/s", "x optax", "temp. MiB")
    rows, optax_ms = [], {}
    trees = ("291 tensors", "stacked layers")
    chosen = [
        c for c in cases(args.parameters) if not args.no_trees or c[0] not in trees
    ]
    for parameters, method, abstract, (tx, step) in tqdm(chosen, unit="case"):
        row = {"what": parameters, "method": method}
        row |= measure(tx, step, abstract, args.repeats)
        if method == "optax.adamw":
            optax_ms[parameters] = row["ms_per_1e9"]
        base = optax_ms.get(parameters, optax_ms["matrix bfloat16"])
        row["ratio_to_optax"] = base / row["ms_per_1e9"]
        rows.append(row)
        numbers = ("ms_per_1e9", "gb_per_s", "ratio_to_optax", "temporaries_mib")
        table.add_row(parameters, method, *(f"{row[k]:.2f}" for k in numbers))
        write_results(args.out, rows=rows)
    targets = [] if args.no_trees else bars(rows)
    Console().print(table, bars_table(targets))
    write_results(args.out, rows=rows, bars=targets)


if __name__ == "__main__":
    main()
