"""Measures the time of a norm or gate and of quantizing its output: figure 4b.

A per-tensor scale must be known before the first code is written. *Just-in-time*
scaling reads the output once more to find its amax. *Group scaling* computes the scale
from partial amax values that the operator returns with its output. *Delayed* scaling
uses an older scale. Per-token and per-group scales need no second pass. Operators run
as they do in training: as Pallas kernels on a Hopper GPU, and with XLA elsewhere.
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
# The number of random inputs. Calls cycle through them, so that caches are cold.
_DRAWS = 4
# A function of an operator and its input. The operator returns its output, and either
# partial amax values or per-token scales.
Method = Callable[[Callable[..., tuple[Array, Array]], Any], Any]


def _norm(x: Any, **options: Any) -> tuple[Array, Array]:
    out = pk.norm(x, **options)
    return out.y, out.scale if "scale" in options else out.largest


def _gate(x: Any, **options: Any) -> tuple[Array, Array]:
    out = pk.gated(x, **options)
    return out.values, out.scale if "scale" in options else out.largest


def _per_tensor(y: Float[Array, "t n"], largest: Array) -> Any:
    scale = jnp.max(largest).astype(jnp.float32) / _E4M3_MAX
    return pk.quantize_tensor(y, scale), scale


def _just_in_time(operator, x):
    # The barrier keeps XLA from fusing the search for the amax into the operator.
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


# In mixed granularity, a norm also quantizes its input in groups, which it saves for
# its backward pass. A gate needs no such method, because its input is in groups.
_MIXED = {"mixed": _mixed, "mixed, rows": _mixed_rows}
_OPERATORS: dict[Operator, tuple[Callable, dict[str, Method]]] = {
    "norm": (_norm, METHODS | _MIXED),
    "gate": (_gate, METHODS),
}


def time_rows(shape: tuple[int, int]) -> list[Row]:
    """Times each operator with each method of quantizing, and returns a row for each.

    Ratios are relative to the operator that returns BF16 and quantizes nothing.

    Args:
      shape: The numbers of tokens and of features of the output.
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
