"""Quantized arrays and optimizer states in `flax.serialization`.

Importing this registers them: `to_bytes`, `from_bytes` and state dicts then keep every
bit, and refuse a target that would read the codes otherwise than they were written.
"""

from typing import Any

import numpy as np
from flax import serialization
from jax.typing import ArrayLike

from coat_jax.quantized import QuantizedArray
from coat_jax.state import MuScaling

_ARRAYS = ("codes", "scale", "exponent")


def _array_to_dict(q: QuantizedArray) -> dict[str, Any]:
    return {name: getattr(q, name) for name in _ARRAYS} | {"power": q.power}


def _array_from_dict(target: QuantizedArray, state: dict[str, Any]) -> QuantizedArray:
    if not isinstance(state, dict) or state.keys() != {*_ARRAYS, "power"}:
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        _refuse(f"{[*_ARRAYS, 'power']}, found {found}")
    for name in _ARRAYS:
        expected, found = _describe(getattr(target, name)), _describe(state[name])
        if expected != found:
            _refuse(f"{name} {expected}, found {found}")
    if target.power != float(state["power"]):
        _refuse(f"power {target.power}, found {state['power']}")
    return QuantizedArray(
        **{name: state[name] for name in _ARRAYS},
        format=target.format,
        granularity=target.granularity,
        dtype=target.dtype,
        power=target.power,
    )


def _scaling_to_dict(scaling: MuScaling) -> dict[str, Any]:
    return {"normalized": scaling.normalized}


def _scaling_from_dict(target: MuScaling, state: dict[str, Any]) -> MuScaling:
    if bool(state["normalized"]) != target.normalized:
        _refuse(f"normalize_mu={target.normalized}, found {state['normalized']}")
    return target


def _describe(array: ArrayLike | None) -> str:
    if array is None:
        return "None"
    return f"{np.dtype(array.dtype).name}{list(array.shape)}"


def _refuse(what: str) -> None:
    raise ValueError(f"at {serialization.current_path()} the target has {what}")


serialization.register_serialization_state(
    QuantizedArray, _array_to_dict, _array_from_dict
)
serialization.register_serialization_state(
    MuScaling, _scaling_to_dict, _scaling_from_dict
)
