"""Tests the kernels' benchmark: its cases can be called and its targets are right."""

import argparse
import functools

import jax
import pytest
from rich.console import Console

from experiments.bench import kernels as bench_kernels
from experiments.common import kernel_cases, timing
from experiments.kernels import tune
from pallas_kernels.ops.matmul.plan import Tuning


def test_every_case_can_be_called():
    names = set()
    for case in kernel_cases.elementwise((128, 256)):
        arguments = jax.eval_shape(case.draw, jax.random.key(0))
        call = functools.partial(case.call, implementation="reference")
        inputs = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments))
        result = jax.tree.leaves(jax.eval_shape(call, *arguments))
        written = sum(x.size * x.dtype.itemsize for x in result)
        # A case counts all bytes that are read and written, except for weights and
        # amax.
        assert case.size == pytest.approx(inputs + written, rel=0.05), case.kernel
        names.add(case.kernel)
    assert len(names) == 59


def test_products_are_of_every_layer_and_pass():
    products = kernel_cases.model_products((8192,))
    assert len(products) == 4 * 4 * 3
    by_name = {p.name: p.shape for p in products}
    assert by_name["7B gate_up, 8192 tokens, forward"] == (8192, 22016, 4096)
    assert by_name["7B gate_up, 8192 tokens, dx"] == (8192, 4096, 22016)
    assert by_name["7B gate_up, 8192 tokens, dw"] == (22016, 4096, 8192)


@pytest.mark.parametrize("kernel", kernel_cases.PRODUCTS)
def test_products_run_on_their_operands(kernel):
    product = kernel_cases.PRODUCTS[kernel]
    operands = kernel_cases.operands(kernel, (16, 384, 256))
    call = functools.partial(kernel_cases.run_product, kernel)
    y = jax.tree.leaves(call(*operands, implementation="reference", tuning=None))[0]
    shape = (1, 16, 1, 128) if kernel == "heads" else (16, 384)
    assert (y.shape, y.dtype) == (shape, product.out_dtype)
    theirs = jax.tree.leaves(bench_kernels.xla(kernel, *operands))[0]
    assert (theirs.shape, theirs.dtype) == (y.shape, y.dtype)


@pytest.mark.parametrize(
    ("shape", "mib"), [((4096, 4096, 4096), 32), ((16384, 22016, 4096), 150)]
)
def test_operands_are_drawn_until_a_cache_does_not_hold_them(shape, mib):
    draws = functools.partial(kernel_cases.draws, "product", shape)
    count = len(jax.eval_shape(draws))
    assert mib * count >= 128 > mib * (count - 1)


def test_times_are_of_each_function_and_errors_are_returned():
    x = jax.numpy.ones((4, 4))

    def broken(x):
        raise ValueError("no")

    *compiled, error = timing.compile_all([abs, jax.numpy.cumsum, broken], [(x,), (x,)])
    assert isinstance(error, ValueError)
    assert all(time > 0 for time in timing.seconds(compiled, [(x,), (x,)]))


def test_what_is_measured_again_takes_its_place():
    cube = {"kernel": "product", "shape": "1 x 1 x 1", "name": "cube"}
    rows = [{"kernel": "add", "shape": "1 x 2", "ms": 1.0}, cube | {"ms": 2.0}]
    again = rows[0] | {"ms": 3.0}
    assert bench_kernels.joined(rows, again) == [again, rows[1]]
    other = cube | {"kernel": "blocks"}
    assert bench_kernels.joined(rows, other) == [*rows, other]


def test_bars_and_table():
    quick = {"kernel": "add", "shape": "1 x 2", "ms": 1.0, "xla_ms": 2.0}
    quick |= {"ratio_to_xla": 2.0, "gb_per_s": 3.0, "copy_gb_per_s": 4.0}
    rows = [quick | {"share_of_copy": 0.75}]
    for kernel, name, ratio, runs in (
        ("product", "cube", 1.0, "mosaic"),
        ("product", "7B out, forward", 0.81, "mosaic"),
        # XLA runs this shape, so the time of our kernel does not matter.
        ("product", "7B out, dx", 0.5, "xla"),
    ):
        row = {"kernel": kernel, "name": name, "shape": "1 x 1 x 1", "ms": 1.0}
        row |= {"xla_ms": ratio, "ratio_to_xla": ratio, "tflop_per_s": 1200.0}
        row["runs"] = runs
        row |= {"rested_tflop_per_s": 1300.0} if name == "cube" else {}
        rows.append(row)
    rows.append({"kernel": "broken", "shape": "1 x 1", "error": "no"})
    actual = {
        bar.name: (round(bar.measured, 3), bar.holds)
        for bar in bench_kernels.bars(rows)
    }
    assert actual == {
        "elementwise, least share of a copy's rate": (0.75, False),
        "elementwise, least ratio to XLA": (2.0, True),
        "elementwise, mean ratio to XLA": (2.0, True),
        "products as they run, mean ratio to cuBLASLt": (0.932, False),
        "products as they run, least ratio to cuBLASLt": (0.81, False),
        "product, 8192^3, TFLOP/s": (1200.0, False),
        "product, 8192^3, TFLOP/s, rested": (1300.0, True),
    }
    console = Console(record=True, width=120)
    console.print(bench_kernels.table(rows))
    printed = console.export_text()
    assert all(name in printed for name in ("7B out, forward", "broken", "add"))


def test_the_table_gets_the_fastest_tiles_unless_xla_is_clearly_faster():
    narrow, plain = Tuning(tile_n=128), Tuning()
    times = {plain: 1.1, narrow: 1.0, None: 0.98}
    assert tune.entry(times) == {"tiles": {"tile_n": 128}, "xla": False}
    assert tune.entry(times | {None: 0.96})["xla"]
    assert not tune.entry(times | {None: 0.96}, 0.95)["xla"]
    # A matmul that XLA does not have has no XLA time.
    assert tune.entry({plain: 1.0}) == {"tiles": {}, "xla": False}


def test_products_that_loops_may_stack_are_xlas_only_where_it_wins_by_more():
    args = argparse.Namespace(shapes=None, tokens=[64], models=["7B"])
    actual = tune.shapes(args, "product")
    h, f = kernel_cases.TUNED["7B"]
    gradient, forward = actual[64, h, 2 * f], actual[64, 2 * f, h]
    assert gradient[0] == (jax.numpy.float8_e5m2, jax.numpy.float8_e4m3fn)
    assert gradient[1] > forward[1] == actual[h, f, 64][1]
    # The forward matmul has the same shape.
    assert actual[64, h, h][1] == forward[1]
