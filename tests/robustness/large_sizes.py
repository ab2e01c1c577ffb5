"""Compares the library with optax and Flax at large sizes.

    uv run python -m tests.robustness.large_sizes
    uv run python -m tests.robustness.large_sizes --parts steps,layers

The methods of a part run in one process, in turns. A part writes its rows into one
results file, which keeps the rows of the other parts:

  steps    many steps of `coat.fp8_adamw` and `optax.adamw` on the same gradients
  leaves   tracing and compiling an update, and a first state, of many leaves
  leaf     memory of an update of one large float32 leaf, donated
  layers   tracing the gradient of many unrolled layers, each rematerialized
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console

import coat_jax as coat
from experiments.common import tables
from experiments.common.programs import new_parser
from experiments.common.results import Bar, default_path, known_rows, write_results

_NAME = "tests.robustness.large_sizes"
_STEPS, _LEAVES, _ELEMENTS, _LAYERS = 100_000, 5_000, 200_000_000, 64
_DECAYS = (0.999, 0.9999)
_RATE, _NOISE = 1e-3, 0.5
_POINTS = 100  # Losses that are kept of a long run.
Row = dict[str, Any]
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


def plain_step(tx: optax.GradientTransformation) -> Step:
    """Returns optax's step: `update`, then `apply_updates`."""

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def fused_step(tx: optax.GradientTransformation) -> Step:
    """Returns the step of `coat.fused_update`."""

    def step(grads, state, params):
        return coat.fused_update(tx, grads, state, params)

    return step


def methods(**options: Any) -> dict[str, tuple[optax.GradientTransformation, Step]]:
    """Returns each optimizer and its step by name, `optax.adamw` first."""
    theirs, ours = optax.adamw(_RATE, **options), coat.fp8_adamw(_RATE, **options)
    return {
        "optax.adamw": (theirs, plain_step(theirs)),
        "coat.fp8_adamw": (ours, plain_step(ours)),
        "coat.fused_update": (ours, fused_step(ours)),
    }


def long_run(b2: float, steps: int) -> list[Row]:
    """Trains a noisy quadratic bowl with each of `methods` on the same noise.

    The curvatures span two orders of magnitude. `distance` is the distance between the
    parameters and the parameters of `optax.adamw`, relative to the latter's distance
    from the minimum. Both are root mean squares after the last step.
    """
    shape = (64, 128)
    curvature = jnp.logspace(-1, 1, shape[1])
    goal = jax.random.normal(jax.random.key(0), shape)

    def train(tx, step):
        def one(carry, count):
            params, state = carry
            error = params - goal
            key = jax.random.fold_in(jax.random.key(1), count)
            noise = jax.random.normal(key, shape)
            grads = curvature * error + _NOISE * noise
            return step(grads, state, params)[:2], jnp.mean(curvature * error**2)

        def some(carry, counts):
            carry, losses = jax.lax.scan(one, carry, counts)
            return carry, jnp.mean(losses)

        params = jnp.zeros(shape)
        counts = jnp.arange(steps).reshape(min(_POINTS, steps), -1)
        (params, state), losses = jax.lax.scan(some, (params, tx.init(params)), counts)
        return params, state, losses

    rows, reference = [], None
    for name, (tx, step) in methods(b2=b2, weight_decay=0.0).items():
        params, state, losses = jax.jit(lambda tx=tx, step=step: train(tx, step))()
        finite = all(
            bool(jnp.isfinite(x.astype(jnp.float32)).all())
            for x in jax.tree.leaves((params, state, losses))
        )
        reference = params if reference is None else reference
        last = float(jnp.mean(losses[-max(1, len(losses) // 10) :]))
        distance = jnp.sqrt(jnp.mean((params - reference) ** 2))
        distance /= jnp.sqrt(jnp.mean((reference - goal) ** 2))
        rows.append(
            {"part": "steps", "case": f"{name}, b2 = {b2:g}", "b2": b2, "steps": steps}
            | {"finite": finite, "first_loss": float(losses[0]), "last_loss": last}
            | {"distance": float(distance)}
        )
    for row in rows:
        row["ratio"] = row["last_loss"] / rows[0]["last_loss"]
    return rows


def many_leaves(count: int, repeats: int, shape: tuple[int, ...]) -> list[Row]:
    """Times tracing and compiling an update and a first state of `count` leaves."""
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    params = {f"leaf {i}": leaf for i in range(count)}
    cases = {}
    for name, (tx, step) in methods().items():
        state = jax.eval_shape(tx.init, params)
        cases[f"{name}, update"] = step, (params, state, params)
        if name != "coat.fused_update":
            cases[f"{name}, init"] = tx.init, (params,)

    def compiling(fn, arguments):
        return lambda: jax.jit(fn).lower(*arguments).compile()

    seconds = _in_turns({k: compiling(*case) for k, case in cases.items()}, repeats)
    rows = []
    for name, actual in seconds.items():
        # An update is compared with an update, and a first state with a first state.
        base = seconds["optax.adamw, init" if "init" in name else "optax.adamw, update"]
        rows.append(
            {"part": "leaves", "case": name, "leaves": count, "shape": str(list(shape))}
            | {"seconds": actual, "ratio": actual / base}
        )
    return rows


def large_leaf(size: int, measured: bool) -> list[Row]:
    """Returns the memory of a step of one leaf, as compiled and, if asked, measured."""
    params = {"w": jax.ShapeDtypeStruct((size // 10_000, 10_000), jnp.float32)}
    rows = []
    for name, (tx, step) in methods().items():
        state = jax.eval_shape(tx.init, params)
        jitted = jax.jit(step, donate_argnums=(1, 2))
        actual = jitted.lower(params, state, params).compile().memory_analysis()
        peak = actual.argument_size_in_bytes + actual.output_size_in_bytes
        peak += actual.temp_size_in_bytes - actual.alias_size_in_bytes
        row = {"part": "leaf", "case": name, "elements": size}
        row |= {"compiled_gib": peak / 2**30}
        row |= {"temporaries_gib": actual.temp_size_in_bytes / 2**30}
        if measured:
            row["resident_gib"] = _resident(name, size)
        rows.append(row)
    for row in rows:
        row["ratio"] = row["compiled_gib"] / rows[0]["compiled_gib"]
    return rows


def _resident(name: str, size: int) -> float:
    """Returns the largest resident memory of a process that makes two steps, in GiB."""
    command = [sys.executable, "-m", _NAME, "--resident", name, "--elements", str(size)]
    return float(subprocess.check_output(command, text=True).split()[-1])


def _print_resident(name: str, size: int) -> None:
    """Makes two steps and prints how much this process grew at most, in GiB."""
    tx, step = methods()[name]
    initial = _peak_kib()
    params = {"w": jnp.ones((size // 10_000, 10_000))}
    grads = {"w": jnp.full((size // 10_000, 10_000), 0.1)}
    state = jax.jit(tx.init)(params)
    jitted = jax.jit(step, donate_argnums=(1, 2))
    for _ in range(2):
        params, state = jax.block_until_ready(jitted(grads, state, params))
    print((_peak_kib() - initial) / 2**20)


def _peak_kib() -> int:
    """Returns the largest resident memory of this program so far (Linux).

    `getrusage` would count the process that started it, where that was larger.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


class _Block(nnx.Module):
    """A norm and an MLP, added to the residual stream."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class _Remat(_Block):
    @nnx.remat
    def __call__(self, x):
        return super().__call__(x)


def _function(weights: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    y = x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]
    return y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)


def unrolled_layers(layers: int, repeats: int) -> list[Row]:
    """Times tracing the gradient of a Python loop over rematerialized layers."""
    width = 64
    x = jnp.ones((4, 64, width))

    def modules(make):
        blocks = nnx.List([make(nnx.Rngs(i)) for i in range(layers)])
        graph, state = nnx.split(blocks)

        def loss(state, x):
            for block in nnx.merge(graph, state):
                x = block(x)
            return x.sum()

        return lambda: jax.jit(jax.grad(loss)).trace(state, x)

    def functions(light):
        shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
        weights = [{k: jnp.ones(s) for k, s in shapes.items()} for _ in range(layers)]

        def loss(weights, x):
            for layer in weights:
                x = light(layer, x)
            return x.sum()

        return lambda: jax.jit(jax.grad(loss)).trace(weights, x)

    of_modules = "coat.fp8_remat of modules"
    cases = {
        "nnx.remat": modules(lambda rngs: _Remat(width, rngs)),
        of_modules: modules(lambda rngs: coat.fp8_remat(_Block(width, rngs))),
        "jax.checkpoint": functions(jax.checkpoint(_function)),
        "coat.fp8_remat of a function": functions(coat.fp8_remat(_function)),
    }
    seconds = _in_turns(cases, repeats)
    rows = []
    for name, actual in seconds.items():
        base = "nnx.remat" if name in ("nnx.remat", of_modules) else "jax.checkpoint"
        rows.append(
            {"part": "layers", "case": name, "layers": layers}
            | {"seconds": actual, "ratio": actual / seconds[base]}
        )
    return rows


def _in_turns(cases: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Returns the median seconds of each case, without anything that JAX has cached."""
    actual: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            jax.clear_caches()
            started = time.perf_counter()
            case()
            actual[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in actual.items()}


def bars_of(rows: Iterable[Row]) -> list[Bar]:
    """Returns the bars that compare each part's results with its limit."""
    limits = {"leaves": 4.0, "leaf": 1.0, "layers": 2.0}
    measures = {"leaves": "compile time", "leaf": "memory", "layers": "trace time"}
    actual = []
    for row in rows:
        piece, case = row["part"], row["case"]
        if not case.startswith("coat"):
            continue
        if piece == "steps":
            finite = row["finite"]
            actual.append(Bar(f"{case}: all finite", "yes", finite, finite))
            away = abs(row["ratio"] - 1)
            actual.append(Bar.of(f"{case}: loss / adamw's, from 1", "<=", 0.02, away))
        else:
            name = f"{case}: {measures[piece]} / plain"
            actual.append(Bar.of(name, "<=", limits[piece], row["ratio"]))
    return actual


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, this process's by default; returns an exit code."""
    parser = new_parser(_NAME, __doc__)
    parser.add_argument("--parts", default="steps,leaves,leaf,layers")
    parser.add_argument("--steps", type=int, default=_STEPS)
    parser.add_argument("--leaves", type=int, default=_LEAVES)
    parser.add_argument("--elements", type=int, default=_ELEMENTS)
    parser.add_argument("--layers", type=int, default=_LAYERS)
    parser.add_argument("--repeats", type=int, default=5, help="turns of layers")
    parser.add_argument("--leaves-repeats", type=int, default=1, help="turns of leaves")
    parser.add_argument("--resident", help="prints one method's resident memory")
    out = default_path("robustness", "large_sizes")
    parser.add_argument("--out", type=Path, default=out)
    args = parser.parse_args(argv)
    if args.resident:
        _print_resident(args.resident, args.elements)
        return 0
    # A compilation that is read from a cache says nothing about a compilation.
    jax.config.update("jax_enable_compilation_cache", False)
    runs = {
        "steps": lambda: [row for b2 in _DECAYS for row in long_run(b2, args.steps)],
        "leaves": lambda: many_leaves(args.leaves, args.leaves_repeats, (64, 128)),
        "leaf": lambda: large_leaf(args.elements, measured=True),
        "layers": lambda: unrolled_layers(args.layers, args.repeats),
    }
    sizes = {"steps": _STEPS, "leaves": _LEAVES, "elements": _ELEMENTS}
    sizes |= {"layers": _LAYERS}
    chosen = {k: getattr(args, k) for k, size in sizes.items()}
    chosen = [f"--{k} {n}" for k, n in chosen.items() if n != sizes[k]]
    command = " ".join([f"uv run python -m {_NAME}", *chosen])
    parts, console = args.parts.split(","), Console()
    for piece in parts:
        if piece not in runs:
            parser.error(f"parts are {', '.join(runs)}, got {piece!r}")
    for piece in parts:
        rows = [row for row in known_rows(args.out) if row["part"] != piece]
        rows += runs[piece]()
        rows.sort(key=lambda row: list(runs).index(row["part"]))
        actual = bars_of(rows)
        write_results(args.out, rows=rows, bars=actual, command=command)
        _print(console, [row for row in rows if row["part"] == piece])
    console.print(tables.bars(actual))
    return 0 if all(bar.holds for bar in actual) else 1


def _print(console: Console, rows: Sequence[Row]) -> None:
    columns = [key for key in rows[0] if key not in ("part", "case")]
    table = tables.new_table(rows[0]["part"], "", *columns)
    for row in rows:
        cells = (row.get(key, "") for key in columns)
        cells = (f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells)
        table.add_row(row["case"], *cells)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
