"""How long it takes to norm or gate, and to quantize what comes out: figure 4b.

One scale for a whole tensor must be known before the first code is written. *Just in
time* reads the output once more for its maximum; *group scaling* takes it from the
maxima that the operator itself leaves; *delayed* scaling uses an older one. Scales of
rows and groups need no second look. Operators run as they do in training: Pallas
kernels on a Hopper GPU, XLA elsewhere.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

import coat_jax as coat
import pallas_kernels as pk
from experiments.activations.granularity_studies import Row
from experiments.common import timing

Operator = Literal["norm", "gate"]
_E4M3_MAX = 448.0
_DELAYED_SCALE = 0.02
# In turns with other arguments, so that caches are cold.
_DRAWS = 4
# From an operator and its input; it returns its output and maxima, or scales of rows.
Method = Callable[[Callable[..., tuple[Array, Array]], Any], Any]


def _norm(x: Any, **how: Any) -> tuple[Array, Array]:
    out = pk.norm(x, **how)
    return out.y, out.scale if "scale" in how else out.largest


def _gate(x: Any, **how: Any) -> tuple[Array, Array]:
    out = pk.gated(x, **how)
    return out.values, out.scale if "scale" in how else out.largest


def _per_tensor(y: Float[Array, "t n"], largest: Array) -> Any:
    scale = jnp.max(largest).astype(jnp.float32) / _E4M3_MAX
    return pk.quantize_tensor(y, scale), scale


def _just_in_time(operator, x):
    # Behind the barrier nothing of the operator's own is left to fuse with.
    y = lax.optimization_barrier(operator(x)[0])
    return _per_tensor(y, pk.maxima(y))


def _group_scaling(operator, x):
    return _per_tensor(*operator(x))


def _blocks(operator, x):
    q = coat.quantize(operator(x)[0], granularity=coat.PerBlock(4, 4))
    return q.codes, q.scale


METHODS: dict[str, Method] = {
    "BF16": lambda operator, x: operator(x)[0],
    "per tensor, just in time": _just_in_time,
    "per tensor, group scaling": _group_scaling,
    "per tensor, delayed": lambda operator, x: operator(
        x, scale=jnp.float32(_DELAYED_SCALE)
    )[0],
    "per row": lambda operator, x: operator(x, scale="row"),
    "1x16": lambda operator, x: pk.quantize_groups(operator(x)[0]),
    "4x4": _blocks,
}


def _mixed(operator, x):
    del operator
    out = pk.norm(x, keep_groups=True)
    return _per_tensor(out.y, out.largest), out.groups


def _mixed_rows(operator, x):
    del operator
    out = pk.norm(x, scale="row", keep_groups=True)
    return out.y, out.scale, out.groups


# Groups of what the norm reads besides, for its backward pass; gates read groups.
_MIXED = {"mixed": _mixed, "mixed, rows": _mixed_rows}
_OPERATORS: dict[Operator, tuple[Callable, dict[str, Method]]] = {
    "norm": (_norm, METHODS | _MIXED),
    "gate": (_gate, METHODS),
}


def time_rows(shape: tuple[int, int]) -> list[Row]:
    """The time of each operator with each method, for outputs of `shape` in BF16.

    Ratios are to the operator in BF16, quantizing nothing.
    """
    rows = []
    for name, (operator, methods) in _OPERATORS.items():
        draw = jax.jit(partial(_draw, name, shape))
        draws = [(draw(key),) for key in jax.random.split(jax.random.key(0), _DRAWS)]

        def call(method, operator=operator):
            return lambda x: method(operator, x)

        compiled = timing.compile_all([call(m) for m in methods.values()], draws)
        for result in compiled:
            if isinstance(result, Exception):
                raise result
        times = [1e3 * seconds for seconds in timing.seconds(compiled, draws)]
        plain = times[list(methods).index("BF16")]
        rows += [
            {
                "study": "times",
                "operator": name,
                "method": method,
                "shape": "{} x {}".format(*shape),
                "ms": ms,
                "ratio_to_bf16": ms / plain,
            }
            for method, ms in zip(methods, times, strict=True)
        ]
    return rows


def _draw(operator: Operator, shape: tuple[int, int], key: Array) -> Any:
    if operator == "norm":
        return jax.random.normal(key, shape, jnp.bfloat16)
    gate_up = jax.random.normal(key, (shape[0], 2, shape[1]), jnp.bfloat16)
    return pk.quantize_groups(gate_up)
