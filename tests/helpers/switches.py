"""The library's functions under JAX's switches and transformations.

    cd tests && uv run python -m helpers.switches

writes docs/pages/switches.md. tests/test_switches.py compares the page with the actual
results. The plain twin of a library function is the function of optax, JAX or Flax that
it replaces: where the twin works, the library function must work.
"""

import contextlib
import functools
import gc
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import checkify

import coat_jax as coat
from coat_jax.layers.decoder import DecoderLayer

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "switches.md"
_HEAD = """\
# JAX's switches

The functions of this library under the switches of JAX, in JAX's transformations. Every
function was tried with every switch against a plain twin, such as `optax.adamw`,
`jax.checkpoint` or `jax.lax.dot_general`. The functions are

{names}.

"All" means that eager execution, jit, grad, vmap, scan, `jax.checkpoint` (remat) and
`shard_map` work with each of them; in rows with a star, that jit and grad do. "As
plain" means that what works with the twin works; after it stands what works with
neither. Optimizers take their gradient inside, without one of the whole step.

"""
_SHAPE = (2, 16, 128)  # Activations: 4,096 elements are enough to be quantized.
_WIDTH = _SHAPE[-1]


class Case(NamedTuple):
    """A function of the library and its plain twin, of (params, x, key).

    Attributes:
      ours: The function of the library.
      plain: The function of optax, JAX or Flax that it replaces.
      params: The parameters.
      differentiable: Whether the gradient of a transformed function is computed.
    """

    ours: Callable
    plain: Callable
    params: Any
    differentiable: bool = True


def _training(tx: optax.GradientTransformation, fused: bool = False) -> Callable:
    """Returns a function that starts training and makes one step."""

    def step(params, x, key):
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(params)
        state = tx.init(params)
        if fused:
            return coat.fused_update(tx, grads, state, params, key=key)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def _mlp(w, x):
    return jnp.tanh(x @ w["up"]) @ w["down"]


def _layer(recipe: str) -> tuple[Callable, Any]:
    layer = DecoderLayer(_WIDTH, 128, 2, 2, 64, recipe=recipe, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    return lambda state, x, key: nnx.merge(graph, state)(x), state


def _plain_layer() -> tuple[Callable, Any]:
    """Returns a function of a layer in plain Flax and JAX, and the layer's state."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.RMSNorm(_WIDTH, rngs=rngs)
            self.qkv = nnx.Linear(_WIDTH, 3 * _WIDTH, rngs=rngs)
            self.out = nnx.Linear(_WIDTH, _WIDTH, rngs=rngs)

        def __call__(self, x):
            q, k, v = jnp.split(self.qkv(self.norm(x)), 3, axis=-1)
            heads = (y.reshape(*y.shape[:-1], 2, 64) for y in (q, k, v))
            y = jax.nn.dot_product_attention(*heads, is_causal=True)
            return x + self.out(y.reshape(x.shape))

    graph, state = nnx.split(Layer(nnx.Rngs(0)))
    return lambda state, x, key: nnx.merge(graph, state)(x), state


@functools.cache
def cases() -> dict[str, Case]:
    """Returns the cases by name."""
    units = functools.partial(np.full, dtype=np.float32)
    matrix = {"w": units((_WIDTH, _WIDTH), 0.1), "b": units((1, 1, _WIDTH), 0.1)}
    mlp = {"up": units((_WIDTH, _WIDTH), 0.1), "down": units((_WIDTH, _WIDTH), 0.1)}
    adamw = _training(optax.adamw(1e-3))
    dots = jax.checkpoint_policies.dots_saveable
    plain_mlp = jax.checkpoint(_mlp)
    numbers = (((2,), (0,)), ((), ()))

    def step(make, twin=adamw, **options):
        return Case(_training(make, **options), twin, matrix, differentiable=False)

    def remat(light, twin=plain_mlp):
        return Case(lambda w, x, key: light(key)(w, x), lambda w, x, _: twin(w, x), mlp)

    def product(dot_general):
        return lambda w, x, key: dot_general(x, w["up"].astype(x.dtype), numbers)

    def quantized(w, x, key):
        noise = jax.random.bits(key, x.shape, jnp.uint32)
        q = coat.quantize(jax.lax.stop_gradient(x), expand=True, noise=noise)
        return coat.dequantize(q)

    def drawn(w, x, key):
        bits = jax.random.bits(key, x.shape)
        return jnp.where(bits > 0, x, x).astype(jnp.bfloat16).astype(x.dtype)

    def converted(params, x, key):
        state = coat.fp8_adamw(1e-3).init(params)
        return coat.from_optax_state(coat.to_optax_state(state), state)

    def copied(params, x, key):
        return jax.tree.map(jnp.copy, optax.adamw(1e-3).init(params))

    actual = {
        "fp8_adamw": step(coat.fp8_adamw(1e-3)),
        "fused_update": step(coat.fp8_adamw(1e-3), fused=True),
        "with_quantized_state": step(
            coat.with_quantized_state(optax.lion(1e-3)), _training(optax.lion(1e-3))
        ),
        "fp8_remat": remat(lambda _: coat.fp8_remat(_mlp)),
        "fp8_remat, key": remat(lambda key: coat.fp8_remat(_mlp, key=key)),
        "fp8_remat, policy": remat(
            lambda _: coat.fp8_remat(_mlp, policy=dots),
            jax.checkpoint(_mlp, policy=dots),
        ),
        "fp8_dot_general": Case(
            product(coat.fp8_dot_general), product(jax.lax.dot_general), mlp
        ),
        "quantize": Case(quantized, drawn, mlp, differentiable=False),
        "to_optax_state": Case(converted, copied, matrix, differentiable=False),
    }
    (ours, params), (plain, theirs) = _layer("coat"), _plain_layer()
    actual["DecoderLayer, coat"] = Case(
        lambda both, *remaining: ours(both[0], *remaining),
        lambda both, *remaining: plain(both[1], *remaining),
        (params, theirs),
    )
    return actual


def _sum(fn: Callable) -> Callable:
    def total(*args):
        leaves = jax.tree.leaves(fn(*args))
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves)

    return total


def _shard_map(fn: Callable) -> Callable:
    mesh = jax.make_mesh((1,), ("d",))
    return jax.shard_map(fn, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())


def _scan(fn: Callable) -> Callable:
    def several(params, x, key):
        def step(carry, x):
            return carry, fn(params, x, key)

        return jax.lax.scan(step, 0, jnp.stack([x, x]))[1]

    return several


def _vmap(fn: Callable) -> Callable:
    def several(params, x, key):
        return jax.vmap(fn, (None, 0, None))(params, jnp.stack([x, x]), key)

    return several


# Transformations of a function. Except for the first two, the gradient
# of it is taken if the function has one.
TRANSFORMATIONS: dict[str, Callable[[Callable], Callable]] = {
    "eager": lambda fn: fn,
    "jit": jax.jit,
    "grad": lambda fn: fn,
    "vmap": _vmap,
    "scan": _scan,
    "remat": jax.checkpoint,
    "shard_map": _shard_map,
}


def transformed(case: Case, fn: Callable, name: str) -> Callable:
    """Returns a case's function in a transformation, or the gradient of the result."""
    changed = TRANSFORMATIONS[name](fn)
    if name in ("eager", "jit") or not case.differentiable:
        return changed
    return jax.grad(_sum(changed), allow_int=True)


def _inputs(case: Case, key: Callable = jax.random.key) -> tuple[Any, Any, Any]:
    x = jnp.asarray(np.linspace(-1, 1, np.prod(_SHAPE)).reshape(_SHAPE), jnp.float32)
    return jax.tree.map(jnp.asarray, case.params), x, key(0)


def _trace(fn: Callable, args: tuple) -> None:
    jax.eval_shape(fn, *args)


def _run(fn: Callable, args: tuple) -> None:
    for leaf in jax.tree.leaves(jax.jit(fn)(*args)):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()


def _within(context: Callable, run: Callable = _trace, key: Callable | None = None):
    """Returns a switch that makes arguments and runs a function within `context()`."""

    def switch(fn, case):
        with context():
            run(fn, _inputs(case, key or jax.random.key))

    return switch


@contextlib.contextmanager
def _checking_leaks():
    # JAX looks for leaks among all objects of the process that are not frozen.
    gc.collect()
    gc.freeze()
    try:
        with jax.checking_leaks():
            yield
    finally:
        gc.unfreeze()


def _exported(fn: Callable, case: Case) -> None:
    params, x, key = _inputs(case)
    (batch,) = jax.export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)
    jax.export.export(jax.jit(fn))(*jax.eval_shape(lambda *a: a, params, x, key))


def _checked(fn: Callable, case: Case) -> None:
    errors = checkify.float_checks | checkify.index_checks
    _trace(checkify.checkify(fn, errors=errors), _inputs(case))


def _guarded(fn: Callable, case: Case) -> None:
    args = _inputs(case)
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(jax.jit(fn)(*args))


def _keys(implementation: str, key: Callable) -> Callable:
    return _within(lambda: jax.default_prng_impl(implementation), key=key)


# Most switches act when a program is traced, so that nothing is compiled for them. For
# those that act when it runs, or make tracing slow, fewer transformations are tried.
_IN_FEW = ("debug_nans", "transfer guard", "leak checks")
SWITCHES: dict[str, Callable[[Callable, Case], None]] = {
    "none": _within(contextlib.nullcontext),
    "strict promotion": _within(lambda: jax.numpy_dtype_promotion("strict")),
    "no rank promotion": _within(lambda: jax.numpy_rank_promotion("raise")),
    "x64": _within(lambda: jax.enable_x64(True)),
    "debug_nans": _within(lambda: jax.debug_nans(True), _run),
    "disable_jit": _within(jax.disable_jit),
    "matmul precision": _within(lambda: jax.default_matmul_precision("highest")),
    "leak checks": _within(_checking_leaks),
    "symbolic batch": _exported,
    "checkify": _checked,
    "transfer guard": _guarded,
    "keys: rbg": _keys("rbg", jax.random.key),
    "keys: unsafe_rbg": _keys("unsafe_rbg", jax.random.key),
    "keys: threefry2x32, raw": _keys("threefry2x32", jax.random.PRNGKey),
    "keys: rbg, raw": _keys("rbg", jax.random.PRNGKey),
}


def failures(function: str, switch: str, plain: bool = False) -> dict[str, Exception]:
    """Returns the errors of a function under a switch, by transformation."""
    case = cases()[function]
    fn = case.plain if plain else case.ours
    names = ("jit", "grad") if switch in _IN_FEW else TRANSFORMATIONS
    every = {name: transformed(case, fn, name) for name in names}

    def together(*args):
        return [each(*args) for each in every.values()]

    # One program has them all, and they are tried one by one only if it fails.
    actual = {}
    try:
        SWITCHES[switch](together, case)
    except Exception:
        for name, each in every.items():
            try:
                SWITCHES[switch](each, case)
            except Exception as error:
                actual[name] = error
    return actual


def cell(function: str, switch: str) -> tuple[str, dict[str, Exception]]:
    """Returns a cell's text, and the errors where the plain twin works."""
    ours = failures(function, switch)
    if not ours:
        return "all", {}
    plain = failures(function, switch, plain=True)
    wrong = {name: error for name, error in ours.items() if name not in plain}
    if len(plain) == len(TRANSFORMATIONS):
        return "as plain: none", {}
    return "as plain: not " + ", ".join(name for name in ours if name in plain), wrong


def render(cells: dict[tuple[str, str], str]) -> str:
    """Returns the page's text for the texts of cells by function and switch."""
    names = list(cases())
    lines = ["| Switch | What works |", "| --- | --- |"]
    for switch in SWITCHES:
        exceptions: dict[str, list[str]] = {}
        for name in names:
            if (text := cells[name, switch]) != "all":
                exceptions.setdefault(text, []).append(f"`{name}`")
        parts = [f"{', '.join(of)} ({text})" for text, of in exceptions.items()]
        star = " \\*" if switch in _IN_FEW else ""
        texts = f"all but {' and '.join(parts)}" if parts else "all"
        lines.append(f"| {switch}{star} | {texts} |")
    head = _HEAD.format(names="\n".join(f"- `{name}`" for name in names))
    return head + "\n".join(lines) + "\n"


def read_page() -> dict[tuple[str, str], str]:
    """Returns the texts of the cells of the committed page."""
    cells = dict.fromkeys(itertools.product(cases(), SWITCHES), "all")
    for line in PAGE.read_text().splitlines():
        switch = line.split("|")[1].strip() if line.startswith("|") else ""
        exceptions = re.findall(r"((?:, |`[^`]+`)+) \(([^()]+)\)", line)
        for functions, text in exceptions if switch else ():
            for function in re.findall("`([^`]+)`", functions):
                cells[function, switch.removesuffix(" \\*")] = text
    return cells


def main() -> None:
    """Writes the page, and prints each error in a cell where the plain twin works."""
    cells = {}
    for function in cases():
        for switch in SWITCHES:
            cells[function, switch], wrong = cell(function, switch)
            for name, error in wrong.items():
                text = f"{type(error).__name__}: {error}"[:300]
                print(f"{function}, {switch}, {name}: {text}", flush=True)
    PAGE.write_text(render(cells))


if __name__ == "__main__":
    main()
