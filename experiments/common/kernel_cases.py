"""The measured cases of the kernels: operations, shapes, and bytes that they move."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

import pallas_kernels
from pallas_kernels.ops.matmul.plan import Heads, Product

E4M3, E5M2, BF16, F32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32
ELEMENTWISE_SHAPES = ((8192, 4096), (8192, 11008), (16384, 8192))
TOKENS = (8192, 16384)
_CACHE = 2**27  # More bytes than the L2 cache of an H200 has.
# Sizes of the residual stream and of the MLP's hidden layer, by model.
MODELS = {
    "1B": (2048, 8192),
    "7B": (4096, 11_008),
    "13B": (5120, 13_824),
    "30B": (6656, 17_920),
}
# The tuned shapes include the smaller layer of `experiments.bench.layer`.
TUNED = MODELS | {"layer": (2048, 5504)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCase:
    """An operation on arrays of one shape.

    Attributes:
      kernel: The name of the operation in tables.
      shape: The numbers of rows and columns of the arrays.
      call: The operation, which takes `implementation` as a keyword.
      draw: A function from a key to random arguments of `call`.
      size: The fewest bytes that the operation can move.
    """

    kernel: str
    shape: tuple[int, ...]
    call: Callable[..., Any]
    draw: Callable[[Array], tuple[Any, ...]]
    size: float

    name = property(lambda self: self.kernel)


def elementwise(shape: tuple[int, int]) -> Iterator[KernelCase]:
    """Yields a case for every kernel that reads and writes each element once.

    `shape` has the numbers of rows and columns of the arrays.
    """
    elements = shape[0] * shape[1]

    def case(kernel, bytes_each, call, *draws):
        def draw(key):
            keys = jax.random.split(key, len(draws))
            return tuple(d(k) for d, k in zip(draws, keys, strict=True))

        return KernelCase(
            kernel=kernel, shape=shape, call=call, draw=draw, size=elements * bytes_each
        )

    def numbers(dtype):
        return lambda key: jax.random.normal(key, shape, dtype)

    def codes(dtype):
        return lambda key: numbers(BF16)(key).astype(dtype)

    def groups(key):
        return pallas_kernels.quantize_groups(
            numbers(BF16)(key), implementation="reference"
        )

    def scalar(key):
        return jnp.float32(2.0**-6)

    def weight(key):
        return 1 + 0.1 * jax.random.normal(key, shape[1:], BF16)

    def with_options(function, **options):
        return lambda *args, implementation: function(
            *args, **options, implementation=implementation
        )

    k = pallas_kernels
    # Bytes of an FP8 element and its share of a bfloat16 scale, by group size.
    of_16, of_128 = 1 + 2 / 16, 1 + 2 / 128
    yield case("quantize 1x16", 2 + of_16, k.quantize_groups, numbers(BF16))
    yield case(
        "quantize 1x128", 2 + of_128,
        with_options(k.quantize_groups, group=128), numbers(BF16),
    )  # fmt: skip
    yield case("quantize 1x16, float32", 4 + of_16, k.quantize_groups, numbers(F32))
    yield case("quantize rows", 3, k.quantize_rows, numbers(BF16))
    for copies, bytes_each in (("row", 3), ("transposed", 3), ("both", 4)):
        yield case(
            f"quantize a tensor, {copies}", bytes_each,
            with_options(k.quantize_tensor, copies=copies), numbers(BF16), scalar,
        )  # fmt: skip
    yield case(
        "quantize a tensor, both, keeping maxima", 4,
        with_options(k.quantize_tensor, copies="both", keep_maxima=True),
        numbers(BF16), scalar,
    )  # fmt: skip

    for copies in (
        {"row": "1x128", "transposed": "1x128"},
        {"row": "128x128"},
        {"transposed": "128x128"},
    ):
        named = " and ".join(f"{copy} {block}" for copy, block in copies.items())
        yield case(
            f"quantize blocks, {named}", 2 + len(copies),
            with_options(k.quantize_blocks, **copies), numbers(BF16),
        )  # fmt: skip

    def scale(x, *, implementation):
        maxima = k.maxima(x, implementation=implementation)
        return k.tensor_scales(k.Bound((maxima,)))

    yield case("scale of a tensor", 2, scale, numbers(BF16))
    yield case("dequantize 1x16", 2 + of_16, k.dequantize_groups, groups)
    yield case("transpose", 2, k.transpose, codes(E5M2))
    for kind in ("rms", "layer"):
        norm = {"kind": kind}
        yield case(
            f"{kind} norm", 4, with_options(k.norm, **norm), numbers(BF16), weight
        )
        yield case(
            f"{kind} norm from groups", 2 + of_16, with_options(k.norm, **norm),
            groups, weight,
        )  # fmt: skip
        yield case(
            f"{kind} norm to rows, keeping groups", 3 + of_16,
            with_options(k.norm, scale="row", keep_groups=True, **norm),
            numbers(BF16), weight,
        )  # fmt: skip
        yield case(
            f"{kind} norm, backward", 4 + of_16,
            lambda x, dy, w, *, implementation, norm=norm: k.norm_grad(
                x, dy, w, implementation=implementation, **norm
            ),
            groups, numbers(BF16), weight,
        )  # fmt: skip

    def wide_gate_up(key):
        return jax.random.normal(key, (shape[0], 2, shape[1]), BF16)

    def gate_up(key):
        return k.quantize_groups(wide_gate_up(key), implementation="reference")

    def scaled(function, **options):
        return lambda *args, implementation: function(
            *args[:-1], scale=args[-1], implementation=implementation, **options
        )

    def alone(function, **options):
        return lambda gate, *args, implementation: function(
            (gate,), *args, implementation=implementation, **options
        )

    for activation in ("silu", "gelu", "gelu_exact"):
        of = {"activation": activation}
        forward, backward = f"{activation} gate", f"{activation} gate, backward"
        yield case(forward, 2 * of_16 + 2, with_options(k.gated, **of), gate_up)
        yield case(
            f"{forward}, to rows", 2 * of_16 + 1,
            with_options(k.gated, scale="row", **of), gate_up,
        )  # fmt: skip
        yield case(
            f"{forward} of BF16, to rows, keeping groups", 5 + 2 * of_16,
            with_options(k.gated, scale="row", keep_groups=True, **of), wide_gate_up,
        )  # fmt: skip
        for copies, bytes_each in (("row", 1), ("transposed", 1), ("both", 2)):
            yield case(
                f"{forward}, to a tensor, {copies}", 2 * of_16 + bytes_each,
                scaled(k.gated, copies=copies, **of), gate_up, scalar,
            )  # fmt: skip
        yield case(
            backward, 2 * of_16 + 6, with_options(k.gated_grad, **of),
            gate_up, numbers(BF16),
        )  # fmt: skip
        yield case(
            f"{backward}, and the product", 2 * of_16 + 8,
            with_options(k.gated_grad, keep_product=True, **of),
            gate_up, numbers(BF16),
        )  # fmt: skip
        yield case(
            f"{backward}, to a tensor, both", 2 * of_16 + 6,
            scaled(k.gated_grad, copies="both", **of), gate_up, numbers(BF16), scalar,
        )  # fmt: skip
        yield case(
            f"{backward}, to a tensor, row, and the product", 2 * of_16 + 5,
            scaled(k.gated_grad, product_scale=jnp.float32(1), **of),
            gate_up, numbers(BF16), scalar,
        )  # fmt: skip
        yield case(
            f"{activation} without a product, to rows, keeping groups", 3 + of_16,
            alone(k.gated, scale="row", keep_groups=True, **of), numbers(BF16),
        )  # fmt: skip
        yield case(
            f"{activation} without a product, backward, and its output", 5 + of_16,
            alone(k.gated_grad, product_scale=jnp.float32(1), **of),
            groups, numbers(BF16),
        )  # fmt: skip

    def heads(key):
        four = 4, shape[0] // 4, shape[1] // 128, 128
        return jax.random.normal(key, four, BF16)

    def angles(key):
        return jax.random.uniform(key, (shape[0] // 4, 64))

    yield case("heads, both", 12, k.join_heads, *3 * [heads], *2 * [angles], scalar)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixProduct:
    """A matmul with the sizes and dtypes that it has in a model.

    Attributes:
      name: The model, layer, number of tokens and pass.
      layer: The layer; None if the matmul belongs to no layer.
      shape: The sizes m, n and k.
      dtypes: The dtypes of the operands a and b; E5M2 for gradients.
    """

    name: str
    layer: str | None = None
    shape: tuple[int, int, int]
    dtypes: tuple[Any, Any] = (E4M3, E4M3)

    def is_of(self, kernel: str) -> bool:
        """Returns whether the kernel named `kernel` is measured on this matmul."""
        forward = self.name.endswith("forward")
        layers = OF_LAYERS.get(kernel, (self.layer,))
        return kernel == "product" or (forward and self.layer in layers)


def model_products(
    tokens: Sequence[int] = TOKENS, models: Sequence[str] = tuple(MODELS)
) -> list[MatrixProduct]:
    """Returns the matmuls of all layers of `models`, for each number of tokens.

    They are the matmuls of the forward pass, of input gradients (dx) and of weight
    gradients (dw).
    """
    products = []
    for model in models:
        h, f = TUNED[model]
        layers = {"qkv": (h, 3 * h), "out": (h, h), "gate_up": (h, 2 * f)}
        layers["down"] = (f, h)
        for t in tokens:
            for layer, (i, o) in layers.items():
                name = f"{model} {layer}, {t} tokens"
                passes = {
                    "forward": ((t, o, i), (E4M3, E4M3)),
                    "dx": ((t, i, o), (E5M2, E4M3)),
                    "dw": ((o, i, t), (E5M2, E4M3)),
                }
                products += [
                    MatrixProduct(
                        name=f"{name}, {each}", layer=layer, shape=shape, dtypes=dtypes
                    )
                    for each, (shape, dtypes) in passes.items()
                ]
    return products


PRODUCTS = {
    "product": Product(out_dtype=jnp.dtype(BF16)),
    "promoted": Product(out_dtype=jnp.dtype(BF16), promote=256),
    "blocks": Product(out_dtype=jnp.dtype(BF16), promote=128, scaling="blocks"),
    "added": Product(out_dtype=jnp.dtype(BF16), scaling="rows", accumulate=True),
    "heads": Product(
        out_dtype=jnp.dtype(BF16), scaling="rows", heads=Heads(size=128, queries=1)
    ),
}
# Kernels that are measured only on forward matmuls, with the layers that use them.
OF_LAYERS = {"added": ("out", "down"), "heads": ("qkv",)}


def operands(
    kernel: str, shape: tuple[int, int, int], dtypes: tuple[Any, Any] = (E4M3, E4M3)
) -> tuple[Array, ...]:
    """Draws the arguments of a kernel in `PRODUCTS`.

    Per-tensor scales are constant powers of two.

    Args:
      kernel: The kernel's name.
      shape: The sizes m, n and k of the matmul.
      dtypes: The dtypes of both operands.
    """
    m, n, k = shape
    product = PRODUCTS[kernel]
    keys = jax.random.split(jax.random.key(m + n + k), 4)
    a, b = (
        jax.random.normal(key, (rows, k), BF16).astype(dtype)
        for key, rows, dtype in zip(keys[:2], (m, n), dtypes, strict=True)
    )
    if product.scaling == "tensor":
        return a, b, jnp.float32(0.5), jnp.float32(2.0**-6)
    b_shape = (n // 128, k // 128) if product.scaling == "blocks" else (n,)
    a_scale, b_scale = (
        jax.random.uniform(key, s, minval=0.5)
        for key, s in zip(keys[2:], ((m, *b_shape[1:]), b_shape), strict=True)
    )
    scaled = a, b, a_scale, b_scale
    if product.accumulate:
        return *scaled, jax.random.normal(keys[2], (m, n), BF16)
    if product.heads is not None:
        s = min(m, 2048)
        angles = jax.random.uniform(keys[2], (2, s, product.heads.size // 2))
        return a.reshape(-1, s, k), b, a_scale.reshape(-1, s), b_scale, *angles
    return scaled


def draws(*product: Any) -> list[tuple[Array, ...]]:
    """Draws several sets of `operands`, which together exceed the L2 cache.

    Calls that take the sets one after another never find their operands in the cache.
    The arguments are the arguments of `operands`.
    """
    draw = functools.partial(operands, *product)
    size = sum(x.size * x.dtype.itemsize for x in jax.eval_shape(draw))
    return [draw() for _ in range(math.ceil(_CACHE / size))]


def kv_heads(b: Array) -> int:
    """Returns the number of key heads that the kernel "heads" makes of weights `b`."""
    size, queries = PRODUCTS["heads"].heads
    return b.shape[0] // (size * (queries + 2))


def run_product(kernel: str, *arguments: Array, **options: Any) -> Any:
    """Runs a kernel in `PRODUCTS`; `options` are keyword arguments such as `tuning`."""
    if kernel == "heads":
        options["num_kv_heads"] = kv_heads(arguments[1])
        return pallas_kernels.matmul_heads(*arguments, **options)
    if kernel == "promoted":
        options["promote"] = PRODUCTS[kernel].promote
    return pallas_kernels.matmul(*arguments, **options)
