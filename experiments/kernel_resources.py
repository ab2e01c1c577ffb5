"""Registers, spills and shared memory of every kernel, compiled for an H200.

`python -m experiments.kernel_resources` compiles them on any machine with the packages
that `experiments.sm90` names, and writes experiments/results/kernel_resources.json,
which a test compares with. A family named instead is compiled alone and printed.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from experiments import kernel_cases, sm90
from experiments.results import write_results
from pallas_kernels import tuning

RESULTS = Path(__file__).parent / "results" / "kernel_resources.json"
_BF16, _F32 = jnp.bfloat16, jnp.float32
_E4M3, _E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@dataclasses.dataclass(frozen=True)
class Case:
    """A function with one kernel or a few, and abstract arrays to compile it for.

    Attributes:
      name: What it is called in tables.
      function: Called with `arrays` and implementation="mosaic".
      arrays: Its arguments; others are bound to it.
    """

    name: str
    function: Callable[..., Any]
    arrays: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first array."""
        return jax.tree.leaves(self.arrays)[0].shape

    def resources(self) -> sm90.Resources:
        """What compiling it says."""
        call = functools.partial(self.function, implementation="mosaic")
        return sm90.resources(call, *self.arrays)


def _array(*shape: int, dtype: Any = _BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _groups(*shape: int) -> pk.Groups:
    scale = _array(*shape[:-1], shape[-1] // 16)
    return pk.Groups(_array(*shape, dtype=_E4M3), scale)


def _adam() -> Iterator[Case]:
    def step(grads, moments, params, noise, *, implementation):
        # Numbers that are 0 leave arithmetic out.
        scalars = pk.AdamScalars(0.9, 0.95, 1e-8, 0.0, 1.5, 0.0, 1.1, 1e-4, 0.1)
        return pk.adam(
            scalars, grads, moments, params, noise, implementation=implementation
        )

    def case(name, shape, dtype=_BF16, params=True, noise=False):
        count = (*shape[:-1], -(-shape[-1] // 128))
        codes, scale = _array(*shape, dtype=_E4M3), _array(*count)
        exponent = _array(*count, dtype=jnp.uint8)
        moments = pk.Moments(codes, scale, codes, scale, exponent)
        grads = _array(*shape, dtype=dtype)
        bits = _array(*count, dtype=jnp.uint32) if noise else None
        return Case(name, step, (grads, moments, grads if params else None, bits))

    yield case("adam", (4096, 4096))
    yield case("adam, float32", (4096, 4096), _F32)
    yield case("adam, stochastic rounding", (4096, 4096), noise=True)
    yield case("adam, update", (4096, 4096), params=False)
    yield case("adam, a short last group", (4096, 200))


def _quantize() -> Iterator[Case]:
    shape = (8192, 4096)
    x, scalar = _array(*shape), _array(dtype=_F32)
    for group in (16, 32, 128):
        function = functools.partial(pk.quantize_groups, group=group)
        yield Case(f"quantize 1x{group}", function, (x,))
    yield Case(
        "quantize 1x16, float32", pk.quantize_groups, (_array(*shape, dtype=_F32),)
    )
    for copies in ("row", "transposed", "both"):
        function = functools.partial(pk.quantize_tensor, copies=copies)
        yield Case(f"quantize a tensor, {copies}", function, (x, scalar))
    keeping = functools.partial(pk.quantize_tensor, copies="both", keep_maxima=True)
    yield Case("quantize a tensor, both, keeping maxima", keeping, (x, scalar))
    yield Case("maxima", pk.maxima, (x,))
    yield Case("transpose", pk.transpose, (_array(*shape, dtype=_E5M2),))
    yield Case("dequantize 1x16", pk.dequantize_groups, (_groups(*shape),))
    codes = _array(*shape, dtype=_E4M3)
    yield Case("dequantize a tensor", pk.dequantize_tensor, (codes, scalar))


def _norm() -> Iterator[Case]:
    def case(name, shape, weight, bias=None, *, grouped=False, **how):
        x = _groups(*shape) if grouped else _array(*shape)
        n = shape[-1:]
        params = tuple(_array(*n) if given else None for given in (weight, bias))
        return Case(name, functools.partial(pk.norm, **how), (x, *params))

    def scaled(x, weight, scale, *, implementation):
        return pk.norm(x, weight, scale=scale, implementation=implementation)

    for shape in ((8192, 4096), (16384, 8192), (8192, 11008)):
        yield case("rms norm", shape, True)
        yield case(
            "rms norm to rows, keeping groups", shape, True,
            scale="row", keep_groups=True,
        )  # fmt: skip
        yield case("layer norm", shape, True, True, kind="layer")
    shape = (8192, 4096)
    arrays = (_groups(*shape), _array(4096), _array(dtype=_F32))
    yield Case("rms norm from groups to a tensor", scaled, arrays)
    add = functools.partial(_added_norm, scale="row", keep_groups=True)
    yield Case("rms norm of a sum", add, (_array(*shape), _array(4096), _array(*shape)))
    for shape in ((8192, 4096), (16384, 8192), (8192, 11008)):
        arrays = (_groups(*shape), _array(*shape), _array(shape[1]), _array(*shape))
        yield Case("rms norm, backward", _norm_grad, arrays)
        function = functools.partial(_norm_grad, kind="layer", with_bias=True)
        yield Case("layer norm, backward", function, arrays)


def _added_norm(x, weight, add, **how):
    return pk.norm(x, weight, add=add, **how)


def _norm_grad(x, dy, weight, add, **how):
    return pk.norm_grad(x, dy, weight, add=add, **how)


def _gate() -> Iterator[Case]:
    tokens, f = 8192, 11008
    gate_up, dy = _groups(tokens, 2, f), _array(tokens, f)
    scalar = _array(dtype=_F32)
    for activation in ("silu", "gelu", "gelu_exact"):
        how = {"activation": activation}
        name = f"{activation} gate"
        yield Case(name, functools.partial(pk.gated, **how), (gate_up,))
        by_row = functools.partial(pk.gated, scale="row", **how)
        yield Case(f"{name}, to rows", by_row, (gate_up,))
        wide = functools.partial(pk.gated, scale="row", keep_groups=True, **how)
        yield Case(f"{name} of BF16, to rows", wide, (_array(tokens, 2, f),))
        grad = functools.partial(pk.gated_grad, **how)
        yield Case(f"{name}, backward", grad, (gate_up, dy))
        both = functools.partial(_with_product, copies="both", **how)
        arrays = (gate_up, dy, scalar, scalar)
        yield Case(f"{name}, backward, with the product", both, arrays)
        for copies in ("row", "both"):
            options = {"copies": copies, **how}
            forward = functools.partial(_scaled, pk.gated, **options)
            to = f"to a tensor, {copies}"
            yield Case(f"{name}, {to}", forward, (gate_up, scalar))
            backward = functools.partial(_scaled, pk.gated_grad, **options)
            yield Case(f"{name}, backward, {to}", backward, (gate_up, dy, scalar))


def _scaled(function, *arrays, **how):
    *arrays, scale = arrays
    return function(*arrays, scale=scale, **how)


def _with_product(*arrays, **how):
    *arrays, scale, product_scale = arrays
    return pk.gated_grad(*arrays, scale=scale, product_scale=product_scale, **how)


def _heads() -> Iterator[Case]:
    heads, angles = _array(4, 2048, 32, 128), _array(2048, 64, dtype=_F32)
    arrays = (heads, heads, heads, angles, angles, _array(dtype=_F32))
    yield Case("heads, both", pk.join_heads, arrays)


def _residual() -> Iterator[Case]:
    x, scalar = _array(8192, 4096), _array(dtype=_F32)
    yield Case("add, keeping groups", pk.add_quantize_groups, (x, x))
    yield Case("add, maxima", pk.add_quantize_tensor, (x, x))
    for copies in ("row", "both"):
        add = functools.partial(pk.add_quantize_tensor, copies=copies)
        yield Case(f"add, to a tensor, {copies}", add, (x, x, scalar))


def _products() -> Iterator[Case]:
    m, n, k = 8192, 4096, 4096
    a, b, one = _array(m, k, dtype=_E4M3), _array(n, k, dtype=_E4M3), _array(dtype=_F32)
    blocks = _array(m, k // 128, dtype=_F32), _array(n // 128, k // 128, dtype=_F32)
    for kernel in kernel_cases.PRODUCTS:
        scales = blocks if kernel == "blocks" else (one, one)
        for tiles in tuning.candidates(kernel_cases.PRODUCTS[kernel]):
            call = functools.partial(kernel_cases.run_product, kernel, tuning=tiles)
            yield Case(f"{kernel}, {tiles}", call, (a, b, *scales))
    accumulate = functools.partial(pk.matmul, out_dtype=_F32)
    sums, rows = (
        _array(m, n, dtype=_F32),
        (_array(m, dtype=_F32), _array(n, dtype=_F32)),
    )
    yield Case("rows, accumulated", accumulate, (a, b, *rows, sums))
    yield Case("rows of a", pk.matmul, (a, b, rows[0], one))


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "adam": _adam,
    "quantize": _quantize,
    "gate": _gate,
    "heads": _heads,
    "residual": _residual,
    "norm": _norm,
    "products": _products,
}


def rows(family: str) -> list[dict[str, Any]]:
    """A record for each of a family's cases."""
    found = []
    for case in FAMILIES[family]():
        shape = "x".join(map(str, case.shape))
        taken = dataclasses.asdict(case.resources())
        found.append({"family": family, "kernel": case.name, "shape": shape, **taken})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the results file, or prints the rows of one family."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", nargs="?", choices=FAMILIES)
    family = parser.parse_args(arguments).family
    if reason := sm90.missing():
        parser.error(reason)
    if family is not None:
        print(json.dumps(rows(family)))
        return
    found = [row for name in FAMILIES for row in rows(name)]
    command = "uv run python -m experiments.kernel_resources"
    write_results(RESULTS, rows=found, command=command, compiled_by=sm90.versions())


if __name__ == "__main__":
    main()
