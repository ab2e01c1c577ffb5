"""Times the kernels against XLA, the bandwidth of a device copy, and cuBLASLt.

    uv run python -m experiments.bench.kernels

measures every kernel on arrays that do not fit the L2 cache, in alternation with the
kernel's reference as XLA compiles it, and writes `bench_kernels.json`. New rows are
added to the rows of this file, so that single kernels can be measured again; each row
has its commit. Calls follow one another without a pause. The largest matmuls are also
measured on a chip that rests before each call.
"""

import argparse
import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import geometric_mean
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import pallas_kernels
from experiments.common import kernel_cases, profiling, results, tables, timing
from experiments.common.programs import (
    new_parser,
    positive_int,
    results_path,
    rows_to_join,
    shape_of_rank,
)
from experiments.common.results import Bar, default_path
from experiments.common.tables import Column
from pallas_kernels.ops.matmul import tuning
from pallas_kernels.ops.rope.api import split_heads

Row = dict[str, Any]
_CUBE = (8192, 8192, 8192)
_DRAWS = 4
# Seconds in which the chip cools before each call. DeepGEMM's benchmark pauses, too: it
# clears the cache between calls.
_REST_S = 0.02


def main() -> None:
    """Measures the kernels, writes the results file and prints tables."""
    parser = new_parser("experiments.bench.kernels", __doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=("elementwise", "products"))
    add("--named", nargs="+", help="what has one of these in its name")
    add(
        "--shapes",
        type=shape_of_rank(2),
        nargs="+",
        metavar="ROWS,N",
        help="of elementwise kernels",
    )
    add("--tokens", type=positive_int, nargs="+", default=list(kernel_cases.TOKENS))
    names = tuple(kernel_cases.MODELS)
    add("--models", nargs="+", choices=names, default=names)
    add("--out", type=results_path, default=default_path("bench_kernels"))
    args = parser.parse_args()
    rows = rows_to_join(parser, args.out)
    if not (chosen := cases_of(args)):
        parser.error(f"no kernel has {' or '.join(args.named)} in its name")
    commit = results.versions()["commit"]
    for row in measured(chosen):
        rows = joined(rows, row | {"commit": commit})
        results.write_results(args.out, rows=rows, bars=bars(rows))
    Console(width=110).print(table(rows), tables.bars(bars(rows)))


def joined(rows: list[Row], row: Row) -> list[Row]:
    """Returns `rows` with `row`, which replaces an earlier row of the same case."""
    return results.joined(rows, row, case_of)


def case_of(row: Row) -> tuple[str, str]:
    """Returns the kernel of a row, and the name of its matmul or else its shape."""
    return row["kernel"], row.get("name", row["shape"])


def cases_of(args: argparse.Namespace) -> list["kernel_cases.KernelCase | ProductCase"]:
    """Returns the kernels and matmuls that a command line chooses."""
    only = args.only or ("elementwise", "products")
    shapes = args.shapes or kernel_cases.ELEMENTWISE_SHAPES
    cases: list[kernel_cases.KernelCase | ProductCase] = []
    if "elementwise" in only:
        cases += (c for shape in shapes for c in kernel_cases.elementwise(shape))
    if "products" in only:
        cases += products(args)
    return [c for c in cases if any(n in c.name for n in args.named or [""])]


def measured(cases: Sequence["kernel_cases.KernelCase | ProductCase"]) -> Iterable[Row]:
    """Compiles all programs, then yields a row after each measurement."""
    programs = map(_programs, cases)
    with ThreadPoolExecutor(8) as pool:
        compiling = pool.map(lambda call: timing.compile_all(*call), programs)
        total = len(cases)
        compiled = list(tqdm(compiling, total=total, unit="case", desc="compiling"))
    copies: dict[tuple[int, int], float] = {}
    for case, pair in tqdm(list(zip(cases, compiled, strict=True)), unit="case"):
        if isinstance(case, ProductCase):
            yield product_row(case, pair)
            continue
        if case.shape not in copies:
            copies[case.shape] = copy_gb_per_s(case.shape)
        yield elementwise_row(case, pair, copies[case.shape])


def copy_gb_per_s(shape: tuple[int, int]) -> float:
    """Measures the bandwidth of copying a bfloat16 array on the device, in GB/s."""
    x = jnp.ones(shape, jnp.bfloat16)
    draws = [(x,)] + [(x + i,) for i in range(1, _DRAWS)]
    (time,) = timing.seconds(timing.compile_all([jnp.copy], draws), draws)
    return 2 * x.nbytes / time / 1e9


class ProductCase(NamedTuple):
    """A matmul and the kernel that computes it.

    Attributes:
      kernel: The key of the kernel in `PRODUCTS`.
      product: The matmul.
    """

    kernel: str
    product: kernel_cases.MatrixProduct

    @property
    def name(self) -> str:
        """The names of the kernel and of the matmul, joined by a comma."""
        return f"{self.kernel}, {self.product.name}"

    @property
    def chosen(self) -> tuning.Tuning | None:
        """The settings that the tuning table chooses; None if it chooses cuBLASLt."""
        return tuning.choose(kernel_cases.PRODUCTS[self.kernel], *self.product.shape)

    @property
    def tiles(self) -> tuning.Tuning:
        """The settings with which the kernel is timed."""
        return tuning.tiles(kernel_cases.PRODUCTS[self.kernel], *self.product.shape)

    def draws(self) -> list[tuple[jax.Array, ...]]:
        """Draws several sets of random operands."""
        return kernel_cases.draws(self.kernel, self.product.shape, self.product.dtypes)


def _programs(
    case: kernel_cases.KernelCase | ProductCase,
) -> tuple[list[Callable], list]:
    """Returns the kernel's and XLA's functions, and their abstract arguments."""
    if isinstance(case, ProductCase):
        options = {"implementation": "mosaic", "tuning": case.tiles}
        ours = functools.partial(kernel_cases.run_product, case.kernel, **options)
        calls = [ours, functools.partial(xla, case.kernel)]
        return calls, jax.eval_shape(case.draws)
    calls = [
        functools.partial(case.call, implementation=name)
        for name in ("mosaic", "reference")
    ]
    return calls, [jax.eval_shape(case.draw, jax.random.key(0))] * _DRAWS


def elementwise_row(case: kernel_cases.KernelCase, compiled: list, copy: float) -> Row:
    """Returns a row of an elementwise kernel: times, and rates relative to a copy.

    Args:
      case: The kernel and its shape.
      compiled: The compiled programs of the kernel and of XLA, or exceptions.
      copy: The bandwidth of a device copy in GB/s.
    """
    row: Row = {"kernel": case.kernel, "shape": "{} x {}".format(*case.shape)}
    for error in compiled:
        if isinstance(error, Exception):
            return row | {"error": str(error)[:200]}
    draw = jax.jit(case.draw)
    draws = [draw(key) for key in jax.random.split(jax.random.key(0), _DRAWS)]
    ours, xla = timing.seconds(compiled, draws)
    rate = case.size / ours / 1e9
    row |= {"ms": ours * 1e3, "xla_ms": xla * 1e3, "ratio_to_xla": xla / ours}
    return row | {"gb_per_s": rate, "copy_gb_per_s": copy, "share_of_copy": rate / copy}


def products(args: argparse.Namespace) -> Iterable[ProductCase]:
    """Yields three kernels' matmuls of size 8192^3, then all matmuls of models."""
    cube = kernel_cases.MatrixProduct(name="cube", shape=_CUBE)
    for kernel in ("product", "promoted", "blocks"):
        yield ProductCase(kernel, cube)
    for product in kernel_cases.model_products(args.tokens, args.models):
        for kernel in ("product", *kernel_cases.OF_LAYERS):
            if product.is_of(kernel):
                yield ProductCase(kernel, product)


def product_row(case: ProductCase, compiled: list) -> Row:
    """Returns a row with times and rates of the kernel, and of cuBLASLt through XLA.

    `compiled` has the programs of both, or exceptions.
    """
    m, n, k = case.product.shape
    row: Row = {"kernel": case.kernel, "shape": f"{m} x {n} x {k}"}
    row["name"] = case.product.name
    for error in compiled:
        if isinstance(error, Exception):
            return row | {"error": str(error)[:200]}
    draws = case.draws()
    long = {"calls": 20, "rounds": 3, "round_s": timing.HOT_S}
    ours, theirs = timing.seconds(compiled, draws, **long)
    row |= {"ms": ours * 1e3, "xla_ms": theirs * 1e3, "ratio_to_xla": theirs / ours}
    rate = 2 * m * n * k / 1e12
    row |= {"tflop_per_s": rate / ours, "xla_tflop_per_s": rate / theirs}
    runs = "mosaic" if case.chosen else "xla"
    row |= {"runs": runs, "tiles": str(case.tiles)}
    if (m, n, k) == _CUBE:
        call = functools.partial(compiled[0], draws)
        rested = profiling.kernel_ms(call, rest_s=_REST_S)["products"] / 1e3
        row["rested_tflop_per_s"] = rate * len(draws) / rested
    return row


def xla(kernel: str, a: jax.Array, b: jax.Array, *more: jax.Array) -> Any:
    """Computes a kernel's result with cuBLASLt's matmul and separate operations.

    The operations after the matmul depend on `kernel`:

    - "added": an addition follows.
    - "heads": XLA splits the heads and applies RoPE.

    XLA's cuBLASLt matmul has per-tensor scales. Kernels with per-token or per-block
    scales are compared with a matmul with scales of 1.
    """
    if kernel in ("product", "promoted"):
        return pallas_kernels.matmul(a, b, *more, implementation="reference")
    one = jnp.float32(1)
    y = pallas_kernels.matmul(a, b, one, one, implementation="reference")
    if kernel == "added":
        return y + more[-1]
    if kernel == "heads":
        options = {"num_kv_heads": kernel_cases.kv_heads(b), "dtype": y.dtype}
        return split_heads(y, *more[2:], **options)
    return y


def bars(rows: list[Row]) -> list[Bar]:
    """Returns the targets of the kernels, which are for an H200."""
    targets = []
    quick = [r for r in rows if "share_of_copy" in r]
    if quick:
        ratios = [r["ratio_to_xla"] for r in quick]
        least = min(r["share_of_copy"] for r in quick)
        targets.append(
            Bar.of("elementwise, least share of a copy's rate", ">=", 0.8, least)
        )
        targets.append(
            Bar.of("elementwise, least ratio to XLA", ">=", 1.0, min(ratios))
        )
        targets.append(
            Bar.of("elementwise, mean ratio to XLA", ">=", 1.5, geometric_mean(ratios))
        )
    at = {(r["kernel"], r.get("name")): r for r in rows if "tflop_per_s" in r}
    plain = [_as_it_runs(r) for (k, _), r in at.items() if k == "product"]
    if plain:
        name = "products as they run, {} ratio to cuBLASLt"
        mean = geometric_mean(plain)
        targets.append(Bar.of(name.format("mean"), ">=", 1.0, mean))
        targets.append(Bar.of(name.format("least"), ">=", 0.93, min(plain)))
    for kernel, target in (("product", 1300), ("promoted", 1200), ("blocks", 1100)):
        if (kernel, "cube") in at:
            name = f"{kernel}, 8192^3, TFLOP/s"
            cube = at[kernel, "cube"]
            targets.append(Bar.of(name, ">=", target, cube["tflop_per_s"]))
            if rate := cube.get("rested_tflop_per_s"):
                targets.append(Bar.of(f"{name}, rested", ">=", target, rate))
    return targets


def _as_it_runs(row: Row) -> float:
    """Returns the speedup over cuBLASLt of the implementation that the library runs.

    The speedup is 1 if the tuning table chooses cuBLASLt.
    """
    return 1.0 if row["runs"] == "xla" else row["ratio_to_xla"]


def table(rows: list[Row]) -> Table:
    """Returns a table of all rows for a terminal."""
    columns = (
        Column("kernel", _name),
        Column("shape", "shape"),
        Column("ms", lambda row: row.get("error") or row["ms"], "{:.4f}"),
        Column("XLA's", "xla_ms", "{:.4f}", missing=""),
        Column("ratio", "ratio_to_xla", "{:.2f}", missing=""),
        Column("rate", lambda r: r.get("tflop_per_s", r.get("gb_per_s")), "{:.0f}"),
        Column("of a copy", lambda r: r.get("share_of_copy", r["kernel"]), "{:.2f}"),
    )
    return tables.table("Kernels", columns, rows)


def _name(row: Row) -> str:
    is_product = "share_of_copy" not in row and "error" not in row
    return row.get("name", row["kernel"]) if is_product else row["kernel"]


if __name__ == "__main__":
    main()
