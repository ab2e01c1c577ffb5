"""Reads values of a config.json by key, and checks them."""

from collections.abc import Mapping
from typing import Any

from coat_jax.models.hf.safetensors import shown

# The largest size of anything; a config.json must not make the library loop for long.
_LARGEST = 2**31


class Keys:
    """Values of a config.json or of an object in it, checked as they are read.

    A value that is null counts as missing.

    Args:
      values: The values by key.
      defaults: The values of keys that are missing in `values`.
    """

    def __init__(
        self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.values = {**(defaults or {}), **values}

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key, or the default."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer, or the default."""
        value = self.get(key, default)
        if type(value) is not int or not 0 < value < _LARGEST:
            raise error(key, "a positive integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a positive number, or the default."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise error(key, "a positive number", value)
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """Returns a positive number, or None if the key is missing."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        """Returns a boolean, False if the key is missing."""
        value = self.get(key, False)
        if type(value) is not bool:
            raise error(key, "true or false", value)
        return value

    def object(self, key: str) -> "Keys":
        """Returns the values of an object, empty if the key is missing."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise error(key, "an object", value)
        return Keys(value)


def error(key: str, rule: str, value: object) -> ValueError:
    """Returns the error that a value of config.json breaks a rule."""
    return ValueError(f"{key} in config.json must be {rule}, got {shown(value)}")
