"""Gate and up as operands: one array of both, or an array of each."""

from typing import Any, get_args

import jax
from jaxtyping import Array

from pallas_kernels.checks import check_shape
from pallas_kernels.dispatch.axes import Axes, tokens, transposed_tokens
from pallas_kernels.numerics import Scaled
from pallas_kernels.ops.gate.reference import Activation, Apart, Gated, Operands


def check_activation(activation: Activation) -> None:
    """Raises ValueError unless `activation` is the name of an activation."""
    if activation not in get_args(Activation):
        names = ", ".join(get_args(Activation))
        raise ValueError(f"activation must be one of {names}, got {activation!r}")


def is_apart(gate_up: Scaled | Array | Apart) -> bool:
    """Returns whether gate and up are given as a tuple of separate arrays."""
    return isinstance(gate_up, tuple) and not isinstance(gate_up, Scaled)


def as_operands(gate_up: Scaled | Array | Apart) -> Operands:
    """Returns gate and up as a tuple of arrays [..., parts, f]; checks their shapes.

    One array of both has two parts. Separate arrays have one part each.
    """
    if not is_apart(gate_up):
        values = jax.tree.leaves(gate_up)[0]
        if values.ndim < 2 or values.shape[-2] != 2:
            raise ValueError(f"gate and up must be [..., 2, f], got {values.shape}")
        return (gate_up,)
    if len(gate_up) not in (1, 2):
        raise ValueError(
            f"gate and up must be a pair, or the gate alone, got {len(gate_up)} arrays"
        )
    if len({isinstance(x, Scaled) for x in gate_up}) > 1:
        raise ValueError("gate and up must both be codes, or neither")
    gate, *up = (jax.tree.leaves(x)[0] for x in gate_up)
    if not gate.ndim:
        raise ValueError(f"the gate must be [..., f], got {gate.shape}")
    for x in up:
        check_shape("up", x, gate.shape)
    return tuple(
        jax.tree.map(lambda x: x.reshape(*x.shape[:-1], 1, x.shape[-1]), own)
        for own in gate_up
    )


def number_of_parts(operands: Operands) -> int:
    """Returns 2 for gate and up, and 1 for the gate alone."""
    return sum(jax.tree.leaves(x)[0].shape[-2] for x in operands)


def in_given_form(arrays: Apart | None, gate_up: Any) -> Any:
    """Returns `arrays`, as a tuple only if gate and up were given as a tuple."""
    if arrays is None or not is_apart(gate_up):
        return arrays and arrays[0]
    return tuple(
        jax.tree.map(lambda x: x.reshape(*x.shape[:-2], x.shape[-1]), own)
        for own in arrays
    )


def axes_of_parts(operands: Operands) -> Axes:
    """Returns the axes of gate and up."""
    return Axes(f"{tokens(jax.tree.leaves(operands)[0].ndim - 2)} _ _")


def axes_of_results(operands: Operands, values: str) -> Gated:
    """Returns the axes of results; `values` names the axes of values after tokens."""
    count = jax.tree.leaves(operands)[0].ndim - 2
    token, transposed = tokens(count), Axes(f"_ {transposed_tokens(count)}")
    return Gated(
        values=Axes(f"{token} {values}"),
        transposed=transposed,
        scale=Axes(token),
        groups=axes_of_parts(operands),
        largest_scale=Axes(token),
        largest=Axes("_", reduced="max"),
        product=transposed,
    )


def with_one_axis(operands: Operands, count: int) -> Operands:
    """Returns gate and up as arrays [count, parts, f], with one axis of tokens."""
    return jax.tree.map(lambda x: x.reshape(count, *x.shape[-2:]), operands)
