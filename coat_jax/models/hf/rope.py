"""Reads RoPE's settings from a config.json, in their old and new spellings.

The old spelling is `rope_theta` with `rope_scaling`. The new one is `rope_parameters`,
which Gemma 3 has for each kind of layer. Spellings that disagree are errors, and so are
keys in these objects that have no meaning there.
"""

from typing import Any

from coat_jax.layers.rope import RopeScaling
from coat_jax.models.hf.families import Family
from coat_jax.models.hf.keys import Keys, error

_LENGTH = "original_max_position_embeddings"
_OF_ALL = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# The keys that have a meaning for each type of RoPE.
_KEYS = {
    "default": _OF_ALL,
    "linear": (*_OF_ALL, "factor"),
    "llama3": (*_OF_ALL, "factor", "low_freq_factor", "high_freq_factor", _LENGTH),
}
_KINDS_OF_LAYERS = ("full_attention", "sliding_attention")


def rope_fields(keys: Keys, family: Family) -> dict[str, Any]:
    """Returns the fields of RoPE in a `LlamaConfig`.

    Args:
      keys: The values of a config.json.
      family: The family of the model.

    Raises:
      ValueError: If a value is not supported, a key has no meaning, or spellings
        disagree.
    """
    old, new = keys.object("rope_scaling"), keys.object("rope_parameters")
    fields: dict[str, Any] = {}
    if family.local_rope_theta is not None:
        _check_keys("rope_parameters", new, _KINDS_OF_LAYERS, family.model_type)
        local, new = new.object("sliding_attention"), new.object("full_attention")
        if _scaling("sliding_attention", local, keys) is not None:
            raise error("sliding_attention", "RoPE without scaling", local.values)
        default = keys.number("rope_local_base_freq", family.local_rope_theta)
        fields["local_rope_theta"] = local.number("rope_theta", default)
        _check_agrees(keys, "rope_local_base_freq", fields["local_rope_theta"])
    settings = _settings("rope_parameters", new, keys, family)
    if old.values:
        by_old = _settings("rope_scaling", old, keys, family)
        if new.values and by_old != settings:
            rule = "absent or RoPE as in rope_parameters"
            raise error("rope_scaling", rule, old.values)
        settings = by_old
    return fields | settings


def _settings(name: str, values: Keys, outside: Keys, family: Family) -> dict[str, Any]:
    """Returns the fields of RoPE but the local base; see `_scaling`."""
    default = outside.number("rope_theta", family.rope_theta)
    theta = values.number("rope_theta", default)
    _check_agrees(outside, "rope_theta", theta)
    return {"rope_theta": theta, "rope_scaling": _scaling(name, values, outside)}


def _scaling(name: str, values: Keys, outside: Keys) -> RopeScaling | None:
    """Returns the scaling in the object `name`, or None.

    Args:
      name: The key of the object.
      values: The values in the object.
      outside: The values of the whole config.json, which may have a length of its own.
    """
    kind = values.get("rope_type", values.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KEYS:
        raise error("rope_type", "default, linear or llama3", kind)
    _check_agrees(values, "type", kind)
    _check_keys(name, values, _KEYS[kind], f"RoPE of the type {kind}")
    if (share := values.get("partial_rotary_factor", 1)) != 1:
        raise error("partial_rotary_factor", "1", share)
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=values.number("factor"))
    length = values.integer(_LENGTH, outside.get(_LENGTH))
    _check_agrees(outside, _LENGTH, length)
    return RopeScaling(
        kind="llama3",
        factor=values.number("factor"),
        low_frequency_factor=values.number("low_freq_factor"),
        high_frequency_factor=values.number("high_freq_factor"),
        original_length=length,
    )


def _check_keys(name: str, values: Keys, allowed: tuple[str, ...], case: str) -> None:
    for key in values.values:
        if key not in allowed and values.get(key) is not None:
            rule = f"without keys other than {', '.join(allowed)} for {case}"
            raise error(name, rule, {key: values.get(key)})


def _check_agrees(keys: Keys, key: str, expected: object) -> None:
    """Raises ValueError if a key has another value than the one in another spelling."""
    if (value := keys.get(key)) is not None and value != expected:
        raise error(key, f"{expected}, its value in another spelling", value)
