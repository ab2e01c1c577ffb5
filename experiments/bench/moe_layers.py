"""Measures layers of experts, forward and backward, for `experiments.bench.moe`.

A layer is a norm, a router, its experts and the residual sum, with BF16 parameters. It
is compared with the same layer in BF16 in several ways: with this library's grouped
matmuls, with a batched einsum, and with `jax.lax.ragged_dot`. The einsum gives equally
many rows to all experts, regardless of the router.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import coat_jax as coat
from coat_jax.layers import recipes
from coat_jax.layers.experts.products import Product, merged
from coat_jax.layers.experts.routing import Experts, Routing
from coat_jax.layers.experts.rows import Rows
from coat_jax.layers.parts import Norm
from experiments.common import profiling
from experiments.common.grouped_cases import BF16, drawn
from experiments.common.results import Bar
from experiments.common.timing import Program, timed

NORM = Norm(kind="rms", eps=1e-6)


class LayerShape(NamedTuple):
    """The shape of a layer of experts, and the number of its tokens.

    Attributes:
      tokens: The number of tokens.
      experts: The number of experts.
      top_k: The number of experts that the router chooses for each token.
      hidden: The size of the residual stream.
      inner: The size of an expert's hidden layer.
    """

    tokens: int
    experts: int
    top_k: int
    hidden: int
    inner: int


QWEN3 = LayerShape(32_768, 128, 8, 2048, 768)
MIXTRAL = LayerShape(16_384, 8, 2, 4096, 14_336)
SMALL = LayerShape(128, 4, 2, 128, 128)
# The targets: the speed and the saved bytes relative to the fastest BF16 layer, and the
# speed of a user's layer with `coat.fp8`.
FASTER = {QWEN3: 1.3, MIXTRAL: 1.4}
NAMES = {"qwen3": QWEN3, "mixtral": MIXTRAL}
SAVED = 0.35
IN_TWO_LINES = {QWEN3: 1.2, MIXTRAL: 1.3}
PROFILED = "coat", "two_lines"
# The most experts with which `jax.lax.ragged_dot` is timed.
_FEW_EXPERTS = 8

Row = dict[str, Any]
Layer = Callable[[Any, jax.Array], tuple[jax.Array, Routing]]


def layers(shape: LayerShape) -> Iterator[tuple[str, Layer]]:
    """Yields the names and functions of layers of one shape, this library's first."""
    experts = Experts(num_experts=shape.experts, top_k=shape.top_k)
    for name in ("coat", "te", "bf16"):
        yield name, functools.partial(of_recipe, recipes.RECIPES[name], experts)
    bf16 = functools.partial(recipes.PlainRecipe, linear=jnp.matmul)
    products: dict[str, Product] = {"batched_einsum": _batched}
    if shape.experts <= _FEW_EXPERTS:
        products["ragged_dot"] = _ragged
    for name, product in {**products, "grouped": recipes.UNQUANTIZED.product}.items():
        # Gates are recomputed, so that little more than matmuls' operands is saved.
        recipe = bf16(product=product, pointwise=jax.checkpoint)
        layer = functools.partial(of_recipe, recipe, experts)
        yield f"bf16_{name}_gates_recomputed", layer


def of_recipe(
    recipe: recipes.Recipe,
    experts: Experts,
    params: Any,
    x: jax.Array,
    batch_axes: str | None = None,
) -> tuple[jax.Array, Routing]:
    """Applies a layer of experts with a recipe.

    Args:
      recipe: The recipe.
      experts: The router's options.
      params: The layer's parameters, as `Recipe.experts` takes them.
      x: The input [b, s, h].
      batch_axes: The mesh axes that the batch is sharded over.

    Returns:
      The output [b, s, h], and the routing: loads and auxiliary losses.
    """
    options = {"norm": NORM, "gate": "silu", "experts": experts}
    params = {**params, "router_bias": None}
    x = recipe.enter(x, batch_axes)
    y, shares = recipe.experts(params, x, **options, batch_axes=batch_axes)
    return recipe.leave(y), Routing.of(shares)


def _batched(x: jax.Array, w: jax.Array, rows: Rows, of_tokens: bool) -> jax.Array:
    """Multiplies equal parts of the rows, instead of groups, by experts' weights."""
    x, w = rows.of_tokens(x) if of_tokens else x, merged(w)
    equal = x.reshape(len(w), -1, x.shape[-1])
    return jnp.einsum("erk,enk->ern", equal, w).reshape(len(x), -1)


def _ragged(x: jax.Array, w: jax.Array, rows: Rows, of_tokens: bool) -> jax.Array:
    x, w = rows.of_tokens(x) if of_tokens else x, merged(w)
    return lax.ragged_dot(x, w.swapaxes(1, 2), rows.sizes)


def arguments(shape: LayerShape) -> tuple[Any, jax.Array, jax.Array]:
    """Draws BF16 parameters, the residual stream and the output's gradient."""
    tokens, count, _, hidden, inner = shape
    shapes = {
        "router": (count, hidden),
        "gate_up": (count, 2 * inner, hidden),
        "down": (count, hidden, inner),
    }
    params = {
        name: drawn(i, of, BF16) * jnp.bfloat16(0.02)
        for i, (name, of) in enumerate(shapes.items())
    }
    params["gate_up"] = params["gate_up"].reshape(count, 2, inner, hidden)
    params["norm"] = jnp.ones(hidden, BF16)
    stream = 1, tokens, hidden
    return params, drawn(5, stream, BF16), drawn(6, stream, BF16)


def passes(layer: Layer, params: Any, x: jax.Array, dy: jax.Array) -> Any:
    """Runs a layer forward and backward; returns the output and all gradients.

    `dy` is the gradient of the output. The gradients include those from the auxiliary
    losses.
    """
    (y, routing), vjp = jax.vjp(layer, params, x)
    zero = jax.tree.map(jnp.zeros_like, routing)
    of_losses = zero._replace(balance=jnp.float32(0.01), z=jnp.float32(0.001))
    return y, vjp((dy, of_losses))


def users_layer(top_k: int, params: Any, x: jax.Array) -> tuple[jax.Array, Routing]:
    """Computes a layer as users write it, with `jax.lax.ragged_dot`.

    `params` are as `users_params` returns them. There are no auxiliary losses.
    """
    wide = x.astype(jnp.float32)
    rate = lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + NORM.eps)
    h = (wide * rate).astype(x.dtype) * params["norm"]
    h = h.reshape(-1, x.shape[-1])
    logits = h.astype(jnp.float32) @ params["router"].astype(jnp.float32)
    weights, ids = lax.top_k(jax.nn.softmax(logits), top_k)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    count = params["router"].shape[-1]
    order, sizes = jnp.argsort(ids.ravel()), jnp.bincount(ids.ravel(), length=count)
    of_rows = lax.ragged_dot(h[order // top_k], params["gate_up"], sizes)
    gate, up = jnp.split(of_rows, 2, axis=-1)
    y = lax.ragged_dot(jax.nn.silu(gate) * up, params["down"], sizes)
    y = y[jnp.argsort(order)].reshape(*ids.shape, -1)
    y = jnp.sum(y * weights[..., None].astype(y.dtype), axis=1)
    nothing = jnp.float32(0)
    return x + y.reshape(x.shape), Routing(jnp.zeros(count), nothing, nothing)


@jax.jit
def users_params(params: Any) -> Any:
    """Returns parameters for `users_layer`, with weights [experts, inputs, outputs]."""
    matrices = {
        name: merged(params[name]).swapaxes(1, 2) for name in ("gate_up", "down")
    }
    return params | matrices | {"router": params["router"].T}


def saved_bytes(layer: Layer, params: Any, x: jax.Array) -> int:
    """Returns the bytes that a layer saves for its backward pass."""
    return coat.residual_report(layer, params, x).nbytes


def best_bf16(row: dict[str, Any]) -> tuple[str, float] | None:
    """Returns the name and milliseconds of a row's fastest BF16 layer, or None."""
    times = {
        name.removesuffix("_ms"): value
        for name, value in row.items()
        if name.startswith("bf16") and name.endswith("_ms")
    }
    return min(times.items(), key=lambda item: item[1], default=None)


def rows(
    shapes: Sequence[LayerShape], end: float, options: dict[str, Any]
) -> Iterator[Row]:
    """Yields a row for each shape, with milliseconds and saved MiB of all layers.

    Args:
      shapes: The shapes.
      end: A time of `time.monotonic`, after which shapes are skipped.
      options: The options of `timed`.
    """
    for shape in shapes:
        row: Row = {"case": "layers", **shape._asdict()}
        if time.monotonic() > end:
            yield row | {"skipped": "time is up"}
            continue
        cases, x, dy = _cases(shape)
        programs = [
            Program(name, functools.partial(passes, layer), (own_params, x, dy))
            for name, (layer, own_params) in cases.items()
        ]
        times, errors = timed(programs, options)
        row |= {f"{program.name}_ms": 1e3 * s for program, s in times.items()} | errors
        row |= {
            f"{program.name}_saved_mib": saved_bytes(*cases[program.name], x) / 2**20
            for program in times
        }
        yield row


def _cases(
    shape: LayerShape,
) -> tuple[dict[str, tuple[Layer, Any]], jax.Array, jax.Array]:
    """Returns the layers and their parameters by name, an input, and its `dy`.

    `dy` is the gradient of the output.
    """
    params, x, dy = arguments(shape)
    cases: dict[str, tuple[Layer, Any]] = {
        name: (layer, params) for name, layer in layers(shape)
    }
    two_lines = coat.fp8(functools.partial(users_layer, shape.top_k))
    cases["two_lines"] = two_lines, users_params(params)
    return cases, x, dy


def kernel_rows(
    shapes: Sequence[LayerShape], calls: int, names: Sequence[str] = PROFILED
) -> Iterator[Row]:
    """Yields a row for each GPU kernel of each layer, with its milliseconds per call.

    Rows of a layer are in descending order of time. The last row of each layer is
    "gaps", the time in which no kernel ran.
    """
    for shape in shapes:
        cases, x, dy = _cases(shape)
        for name in names:
            layer, params = cases[name]
            run = jax.jit(functools.partial(passes, layer))
            run = functools.partial(run, params, x, dy)
            of_kernels = profiling.kernel_ms(run, calls=calls, named=True)
            row = {"case": "kernels", "layer": name, **shape._asdict()}
            for kernel, ms in of_kernels.items():
                yield row | {"kernel": kernel, "ms": ms}


def bars(rows: list[Row]) -> Iterator[Bar]:
    """Yields the targets for layers of experts, relative to the fastest BF16 layer."""
    for row in rows:
        best = best_bf16(row)
        if row["case"] != "layers" or best is None or "coat_ms" not in row:
            continue
        shape = LayerShape(*map(row.get, LayerShape._fields))
        (name, time_of_best), title = best, " x ".join(map(str, shape))
        if shape not in FASTER:
            continue
        ratio = time_of_best / row["coat_ms"]
        faster = FASTER[shape]
        if "two_lines_ms" in row:
            of_user = time_of_best / row["two_lines_ms"]
            bar = f"a user's layer, {title}, best BF16 / in two lines"
            yield Bar.of(bar, ">=", IN_TWO_LINES[shape], of_user)
        yield Bar.of(f"layer, {title}, best BF16 / coat", ">=", faster, ratio)
        share = row["coat_saved_mib"] / row[f"{name}_saved_mib"]
        limit = SAVED
        yield Bar.of(f"layer, {title}, saved / best BF16", "<=", limit, share)
