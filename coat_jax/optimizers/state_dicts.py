"""State dicts of quantized arrays and states, for `flax.serialization`.

Importing this module registers the conversions; `coat_jax.serialization` imports it.
`to_bytes`, `from_bytes` and state dicts preserve every bit. Restoring raises ValueError
if the target would decode the codes differently.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import serialization

from coat_jax.optimizers.checkpoint import ARRAYS, describe, described, wrong_value
from coat_jax.optimizers.state import Layout
from coat_jax.optimizers.trees import boxed, unboxed
from coat_jax.quantization.array import QuantizedArray


def _array_to_dict(q: QuantizedArray) -> dict[str, Any]:
    arrays = {name: getattr(unboxed(q), name) for name in ARRAYS}
    return arrays | {"power": q.power, "format": q.format.name}


def _array_from_dict(like: QuantizedArray, state: dict[str, Any]) -> QuantizedArray:
    target = unboxed(like)
    if not isinstance(state, dict):
        _refuse(f"{[*ARRAYS, 'power', 'format']}, found {describe(state)}")
    if state.keys() != {*ARRAYS, "power", "format"}:
        _refuse(f"{[*ARRAYS, 'power', 'format']}, found {sorted(map(str, state))}")
    if not _same(state["format"], target.format.name):
        _refuse(f"format {target.format}, found {described(state['format'])}")
    for name in ARRAYS:
        expected, found = describe(getattr(target, name)), describe(state[name])
        if expected != found:
            _refuse(f"{name} {expected}, found {found}")
    if not _same(state["power"], target.power):
        _refuse(f"power {target.power}, found {described(state['power'])}")
    if wrong := wrong_value(state["scale"], state["exponent"]):
        raise ValueError(f"at {serialization.current_path()} {wrong}")
    arrays = {name: state[name] for name in ARRAYS}
    return boxed(dataclasses.replace(target, **arrays), like)


def _layout_from_dict(target: Layout, state: Any) -> Layout:
    expected = target.as_dict()
    if not _same(state, expected):
        _refuse(
            f"moments {expected}, found {described(state)}: was it saved with other "
            "options?"
        )
    return target


def _same(found: Any, expected: Any) -> bool:
    """Returns whether a restored value equals a number, a string or a dict of these."""
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(_same(found[key], value) for key, value in expected.items())
        )
    if isinstance(found, np.ndarray | jax.Array) and found.shape == ():
        found = found.item()
    scalar = isinstance(found, str | bool | int | float | np.generic)
    return bool(scalar and found == expected)


def _refuse(what: str) -> None:
    raise ValueError(f"at {serialization.current_path()} the target has {what}")


for _kind, _to_dict, _from_dict in (
    (QuantizedArray, _array_to_dict, _array_from_dict),
    (Layout, Layout.as_dict, _layout_from_dict),
):
    serialization.register_serialization_state(_kind, _to_dict, _from_dict)
