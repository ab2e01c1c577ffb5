"""Registers, spills and shared memory of every kernel, compiled for an H200.

`python -m experiments.kernels.resources` compiles all kernels and writes
`kernel_resources.json`, which a test compares with new compilations. The command runs
on any machine with the packages that `experiments.common.sm90` names. With names of
families of kernels, it compiles and prints only these families. With `--hardest`, it
compiles only one case of each kernel: the case that uses the most registers.
"""

import dataclasses
import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from experiments.common import kernel_cases, sm90
from experiments.common.programs import new_parser
from experiments.common.results import write_results
from pallas_kernels.dispatch import devices
from pallas_kernels.ops.grouped_matmul import tuning as grouped_tuning
from pallas_kernels.ops.matmul import kernel as matmul_kernel
from pallas_kernels.ops.matmul import tuning
from pallas_kernels.ops.matmul.plan import Product

RESULTS = Path(__file__).resolve().parent.parent / "results/kernel_resources"
RESULTS /= "kernel_resources.json"
_BF16, _F32 = jnp.bfloat16, jnp.float32
_E4M3 = jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class CompiledCase:
    """A function with one or several kernels, and abstract arrays to compile it for.

    Attributes:
      name: The name of the kernel in tables.
      function: The function, which is called with `arrays` and implementation="mosaic".
      arrays: The arguments of the function; other arguments are bound to it.
      tiles: The tuning of the kernel; None if the kernel has no choice of tiles.
    """

    name: str
    function: Callable[..., Any]
    arrays: tuple[Any, ...]
    tiles: tuning.Tuning | None = None

    @property
    def names(self) -> dict[str, str]:
        """The names in a record: the kernel with its tiles, and the first shape."""
        kernel = self.name if self.tiles is None else f"{self.name}, {self.tiles}"
        shape = jax.tree.leaves(self.arrays)[0].shape
        return {"kernel": kernel, "shape": "x".join(map(str, shape))}

    def resources(self) -> sm90.Resources:
        """Compiles the function and returns the resources of its kernels."""
        call = functools.partial(self.function, implementation="mosaic")
        return sm90.resources(call, *self.arrays)


def _array(*shape: int, dtype: Any = _BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _groups(*shape: int) -> pk.Scaled:
    scale = _array(*shape[:-1], shape[-1] // 16)
    return pk.Scaled(_array(*shape, dtype=_E4M3), scale)


def _adam() -> Iterator[CompiledCase]:
    def step(*arrays, implementation):
        # The kernel omits arithmetic with scalars that are the number 0.
        scalars = pk.AdamScalars(0.9, 0.95, 1e-8, 0.0, 1.5, 0.0, 1.1, 1e-4, 0.1)
        return pk.adam(scalars, *arrays, implementation=implementation)

    def case(name, shape, dtype=_BF16, params=True, stochastic=False):
        count = (*shape[:-1], -(-shape[-1] // 128))
        codes, scale = _array(*shape, dtype=_E4M3), _array(*count, dtype=_F32)
        exponent = _array(*count, dtype=jnp.uint8)
        moments = pk.Moments(codes, scale, codes, scale, exponent)
        grads = _array(*shape, dtype=dtype)
        seed = _array(dtype=jnp.uint32)
        salt = seed if stochastic else None
        params = grads if params else None
        return CompiledCase(name, step, (grads, moments, seed, seed, params, salt))

    yield case("adam", (4096, 4096))
    yield case("adam, float32", (4096, 4096), _F32)
    yield case("adam, stochastic rounding", (4096, 4096), stochastic=True)
    yield case("adam, update", (4096, 4096), params=False)
    yield case("adam, a short last group", (4096, 200))


def _measured(
    *beginnings: str, shape: tuple[int, int] = (8192, 4096)
) -> Iterator[CompiledCase]:
    """Yields the benchmark's cases with names that start with one of `beginnings`."""
    for case in kernel_cases.elementwise(shape):
        if case.kernel.startswith(beginnings):
            arrays = jax.eval_shape(case.draw, jax.random.key(0))
            yield CompiledCase(case.kernel, case.call, arrays)


def _scales(*maxima, **options):
    bounds = [pk.Bound((x, maxima[0]), 2.0) for x in maxima]
    return pk.tensor_scales(*bounds, **options)


def _quantize() -> Iterator[CompiledCase]:
    yield from _measured("quantize", "scale", "dequantize", "transpose")
    of_32 = functools.partial(pk.quantize_groups, group=32)
    yield CompiledCase("quantize 1x32", of_32, (_array(8192, 4096),))
    x = _array(8192, 24576)
    yield CompiledCase("quantize rows", pk.quantize_rows, (x,))
    arrays = x, _array(len(x), dtype=_F32)
    yield CompiledCase("quantize rows with known scales", pk.quantize_rows, arrays)
    for x in (_array(8, 4096, 4096), _array(8, 4096, 4096, dtype=_F32)):
        yield CompiledCase(f"quantize columns, {x.dtype}", pk.quantize_columns, (x,))
    rows = [_array(n, dtype=_F32) for n in (8192, 22016, 264)]
    yield CompiledCase("scales of tensors", _scales, tuple(rows))


def _gate(activation: str) -> Iterator[CompiledCase]:
    tokens, f = 8192, 11008
    names = f"{activation} gate", f"{activation} without a product"
    yield from _measured(*names, shape=(tokens, f))

    def backward(gate_up, dy, scale, **options):
        return pk.gated_grad(gate_up, dy, scale=scale, activation=activation, **options)

    arrays = (_groups(tokens, 2, f), _array(tokens, f), _array(dtype=_F32))
    yield CompiledCase(
        f"{activation} gate, backward, to a tensor, row", backward, arrays
    )

    def pair(gate, up, **options):
        options |= {"scale": "row", "keep_groups": True, "activation": activation}
        return pk.gated((gate, up), **options)

    def pair_backward(gate, up, dy, scale, **options):
        return backward((gate, up), dy, scale, product_scale=scale, **options)

    # Rows in registers of a warp, of a thread block, and in shared memory.
    for n in (1024, 1408, f, 26_624, 28_672):
        y = _array(tokens, n)
        yield CompiledCase(f"{activation} gate of two arrays, to rows", pair, (y, y))
    arrays = (_groups(tokens, f), _groups(tokens, f), *arrays[1:])
    yield CompiledCase(
        f"{activation} gate of two arrays, backward", pair_backward, arrays
    )

    def pair_in_bf16(gate, up, dy, **options):
        options |= {"keep_product": True, "activation": activation}
        return pk.gated_grad((gate, up), dy, **options)

    yield CompiledCase(
        f"{activation} gate of two arrays, backward, and the product",
        pair_in_bf16,
        arrays[:3],
    )


def _heads() -> Iterator[CompiledCase]:
    yield from _measured("heads")


def _norm() -> Iterator[CompiledCase]:
    def backward(x, dy, weight, add, y_scale=None, bias=None, **options):
        # A layer asks for the amax together with the output.
        options |= {"keep_maxima": y_scale is not None}
        return pk.norm_grad(x, dy, weight, bias, add=add, y_scale=y_scale, **options)

    def to_tensor(x, weight, scale, **options):
        return pk.norm(x, weight, scale=scale, **options)

    layer = functools.partial(pk.norm, kind="layer")
    layer_backward = functools.partial(backward, kind="layer")
    for shape in kernel_cases.ELEMENTWISE_SHAPES:
        yield from _measured("rms norm", "layer norm", shape=shape)
        x, weight = _array(*shape), _array(shape[1])
        arrays = (_groups(*shape), x, weight, x)
        yield CompiledCase("layer norm with a bias", layer, (x, weight, weight))
        yield CompiledCase("rms norm, backward, added", backward, arrays)
        with_output = (*arrays, _array(dtype=_F32))
        yield CompiledCase(
            "rms norm, backward, added, and the output", backward, with_output
        )
        with_output = *with_output, weight
        text = "layer norm with a bias, backward, added, and the output"
        yield CompiledCase(text, layer_backward, with_output)
        sequences = 4
        x, weight, scale = (
            x.update(shape=(sequences, shape[0] // sequences, shape[1])),
            _array(sequences, shape[1]),
            _array(dtype=_F32),
        )
        yield CompiledCase("layer norm of sequences", layer, (x, weight, weight))
        groups = jax.eval_shape(pk.quantize_groups, x)
        arrays = (groups, x, weight, x, scale, weight)
        text = "layer norm of sequences, backward, added, and the output"
        yield CompiledCase(text, layer_backward, arrays)
    arrays = (_groups(8192, 4096), _array(4096), _array(dtype=_F32))
    yield CompiledCase("rms norm from groups to a tensor", to_tensor, arrays)


def _tiles(product: Product) -> list[tuning.Tuning]:
    return _but_for_width(tuning.candidates(product))


def _but_for_width(candidates: Sequence[tuning.Tuning]) -> list[tuning.Tuning]:
    """Returns the candidates without those that differ only in their `width`.

    The width only changes the order in which tiles are visited, not the registers.
    """
    # The default width does not appear in the names of cases.
    options = {"width": tuning.Tuning.width}
    return list(dict.fromkeys(dataclasses.replace(t, **options) for t in candidates))


def _products() -> Iterator[CompiledCase]:
    m, n, k = 8192, 4096, 4096
    a, b, one = _array(m, k, dtype=_E4M3), _array(n, k, dtype=_E4M3), _array(dtype=_F32)
    for kernel, product in kernel_cases.PRODUCTS.items():
        shape = (m, 3 * n if product.heads else n, k)
        arrays = jax.eval_shape(functools.partial(kernel_cases.operands, kernel, shape))
        for tiles in _tiles(product):
            call = functools.partial(kernel_cases.run_product, kernel, tuning=tiles)
            yield CompiledCase(kernel, call, arrays, tiles)
            if product.heads:
                again = functools.partial(call, copies=2)
                yield CompiledCase(f"{kernel} twice", again, arrays, tiles)
    for tiles in _tiles(kernel_cases.PRODUCTS["product"]):
        call = functools.partial(pk.matmul, keep_maxima=True, tuning=tiles)
        yield CompiledCase("product and maxima", call, (a, b, one, one), tiles)
    accumulate = functools.partial(pk.matmul, out_dtype=_F32)
    sums, rows = (
        _array(m, n, dtype=_F32),
        (_array(m, dtype=_F32), _array(n, dtype=_F32)),
    )
    yield CompiledCase("rows, accumulated", accumulate, (a, b, *rows, sums))
    yield CompiledCase("rows of a", pk.matmul, (a, b, rows[0], one))
    for name, addend in ("rows, biased", None), ("rows, biased and added", sums):
        biased = functools.partial(_biased, out_dtype=_BF16 if addend is None else _F32)
        yield CompiledCase(name, biased, (a, b, *rows, addend, rows[1]))


def _biased(*arrays, **options):
    *arrays, bias = arrays
    return pk.matmul(*arrays, bias=bias, **options)


def _parts() -> Iterator[CompiledCase]:
    """Yields matmuls with an operand in parts, as gathered from several devices."""
    one = _array(1, dtype=_F32)
    arrays = _array(8192, 4096, dtype=_E4M3), _array(2, 4096, 2, 1024, dtype=_E4M3)

    def multiply(product, tiles, a, b, a_scale, b_scale, implementation):
        del implementation
        sms = devices.multiprocessors()
        return matmul_kernel.run(product, a, b, a_scale, b_scale, (), tiles, sms)

    for name, maxima in (("product", False), ("product and maxima", True)):
        product = Product(out_dtype=_BF16, maxima=maxima)
        for tiles in _tiles(product):
            if not tiles.transposed:
                call = functools.partial(multiply, product, tiles)
                yield CompiledCase(f"{name} of parts", call, (*arrays, one, one), tiles)


def _grouped() -> Iterator[CompiledCase]:
    """Yields grouped matmuls with every kind of scales, in FP8 and BF16."""
    rows, groups, n, k = 16_384, 8, 4096, 4096
    sizes = _array(groups, dtype=jnp.int32)
    one, each, all_columns = (
        _array(*shape, dtype=_F32) for shape in ((), (groups,), (groups, n))
    )
    a, b, of_rows = (
        _array(rows, k, dtype=_E4M3),
        _array(groups, n, k, dtype=_E4M3),
        _array(rows, dtype=_F32),
    )
    gradient = a.update(dtype=jnp.float8_e5m2)
    kinds = {
        "rows of groups": (a, b, sizes, of_rows, all_columns),
        "rows of groups, a scale a group": (gradient, b, sizes, one, each),
        "rows of groups, scales of rows and groups": (a, b, sizes, of_rows, each),
        "rows of groups, bfloat16": (_array(rows, k), _array(groups, n, k), sizes),
    }
    listed = functools.partial(pk.group_tiles, rows=rows)
    yield CompiledCase("tiles of groups", listed, (sizes,))
    for tiles in _but_for_width(grouped_tuning.ALONG_M):
        call = functools.partial(_of_listed_tiles, tuning=tiles)
        height = functools.partial(listed, height=tiles.tile_m)
        tiles_of_rows = jax.eval_shape(height, sizes)
        for name, arrays in kinds.items():
            yield CompiledCase(name, call, (*arrays, tiles_of_rows), tiles)
        call = functools.partial(call, out_dtype=_F32)
        arrays = *kinds["rows of groups"], tiles_of_rows
        yield CompiledCase("rows of groups to float32", call, arrays, tiles)
        name = "rows of groups, a scale a group"
        call = functools.partial(_of_listed_tiles, tuning=tiles, keep_maxima=True)
        arrays = *kinds[name], tiles_of_rows
        yield CompiledCase(f"{name}, and maxima", call, arrays, tiles)
    for x in (_array(rows, k), _array(rows, k, dtype=_F32)):
        arrays = x, sizes, one
        yield CompiledCase(
            f"quantized transpose of groups, {x.dtype}", pk.grouped_transpose, arrays
        )
    for x in (_array(rows, k), gradient):
        call, arrays = pk.grouped_transpose, (x, sizes)
        yield CompiledCase(f"transpose of groups, {x.dtype}", call, arrays)
    tokens, choices = rows // 8, 8
    index = _array(rows, dtype=jnp.int32)
    arrays = _array(tokens, k, dtype=_E4M3), sizes, None, index
    yield CompiledCase("transpose of copied rows", pk.grouped_transpose, arrays)
    places = _array(tokens, choices, dtype=jnp.int32)
    call = functools.partial(pk.copy_rows, rows=rows)
    yield CompiledCase("copies of tokens", call, (arrays[0], places))
    for add in (None, _array(tokens, k)):
        arrays = _array(rows, k), places, add
        name = "sums of rows" if add is None else "sums of rows and an array"
        yield CompiledCase(name, pk.sum_rows, arrays)
    for activation in get_args(pk.Activation):
        call = functools.partial(_weighted_gate_grad, activation)
        groups_of_16 = pk.Scaled(
            _array(rows, 2, k, dtype=_E4M3), _array(rows, 2, k // 16)
        )
        arrays = groups_of_16, _array(rows, k), of_rows, sizes, one, one
        yield CompiledCase(f"weighted {activation} gate, backward", call, arrays)
    padded = pk.padded_rows(rows, groups)
    a, b = (_array(n, padded, dtype=dtype) for dtype in (gradient.dtype, _E4M3))
    kinds = {
        "weight gradients of groups": (a, b, sizes, one, each),
        "weight gradients of groups, bfloat16": (*2 * [_array(n, padded)], sizes),
    }
    for tiles in _but_for_width(grouped_tuning.ALONG_K):
        call = functools.partial(pk.grouped_weight_gradient, tuning=tiles)
        for name, arrays in kinds.items():
            yield CompiledCase(name, call, arrays, tiles)


def _attention() -> Iterator[CompiledCase]:
    """Yields attention and its gradients, with several masks."""
    b, s = 4, 4096
    capped = {"softcap": 50.0, "window": 1024}
    kinds = {
        "attention": ({}, ()),
        "attention, capped, in a window": (capped, ()),
        "attention, capped, in a window, packed": (
            capped,
            (_array(b, s, dtype=jnp.int32),),
        ),
    }
    for d, n, m in ((128, 32, 8), (256, 16, 8)):
        q, k = _array(b, s, n, d), _array(b, s, m, d)
        grads = q, q, k, k, q, _array(b, n, s, dtype=_F32)
        for name, (options, masks) in kinds.items():
            call = functools.partial(_with_segments, pk.attention, 3, options)
            yield CompiledCase(name, call, (q, k, k, *masks))
            call = functools.partial(_with_segments, pk.attention_grad, 6, options)
            yield CompiledCase(f"{name}, backward", call, (*grads, *masks))


def _with_segments(function, count, options, *arrays, implementation):
    masks = dict(zip(("segment_ids",), arrays[count:], strict=False))
    options = options | masks | {"implementation": implementation}
    return function(*arrays[:count], **options)


def _weighted_gate_grad(activation, *arrays, **options):
    *arrays, scale, product_scale = arrays
    scales = {"scale": scale, "product_scale": product_scale}
    return pk.weighted_gate_grad(*arrays, **scales, activation=activation, **options)


def _of_listed_tiles(*arrays, **options):
    *arrays, tiles = arrays
    return pk.grouped_matmul(*arrays, tiles=tiles, **options)


FAMILIES: dict[str, Callable[[], Iterator[CompiledCase]]] = {
    "adam": _adam,
    "quantize": _quantize,
    "silu": functools.partial(_gate, "silu"),
    "gelu": functools.partial(_gate, "gelu"),
    "gelu_exact": functools.partial(_gate, "gelu_exact"),
    "heads": _heads,
    "norm": _norm,
    "products": _products,
    "parts": _parts,
    "grouped": _grouped,
    "attention": _attention,
}


def hardest(family: str) -> list[CompiledCase]:
    """Returns the case with the most registers of each kernel in the results file.

    Cases that are missing in the file are returned, too.
    """
    registers = {
        (row["kernel"], row["shape"]): row["registers"]
        for row in json.loads(RESULTS.read_text())["rows"]
        if row["family"] == family
    }
    all_cases, recorded = [], defaultdict(list)
    for case in FAMILIES[family]():
        if (names := tuple(case.names.values())) in registers:
            recorded[case.name].append((registers[names], case))
        else:
            all_cases.append(case)
    for cases in recorded.values():
        _, case = max(cases, key=lambda pair: pair[0])
        all_cases.append(case)
    return all_cases


def rows(
    family: str, cases: Iterable[CompiledCase] | None = None
) -> list[dict[str, Any]]:
    """Compiles `cases` of a family, by default all, and returns a record for each."""
    return [
        {"family": family, **case.names, **dataclasses.asdict(case.resources())}
        for case in (FAMILIES[family]() if cases is None else cases)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles kernels, and writes the results file or prints the rows of families."""
    parser = new_parser("experiments.kernels.resources", __doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="family", help="print this one")
    parser.add_argument(
        "--hardest", action="store_true", help="compile the case with most registers"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.families) - FAMILIES.keys():
        parser.error(f"no family: {', '.join(sorted(unknown))}")
    if options.hardest and not options.families:
        parser.error("--hardest needs families, and leaves the results file")
    if reason := sm90.missing():
        parser.error(reason)
    records = [
        row
        for name in options.families or FAMILIES
        for row in rows(name, hardest(name) if options.hardest else None)
    ]
    if options.families:
        print(json.dumps(records))
        return
    command = "uv run python -m experiments.kernels.resources"
    write_results(RESULTS, rows=records, command=command, compiled_by=sm90.versions())


if __name__ == "__main__":
    main()
