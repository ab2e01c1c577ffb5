"""The options of `fp8_remat`, which are checked once, before any call."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from coat_jax.quantization.formats import Format
from coat_jax.remat.trace import Residual
from pallas_kernels.checks import check_flags, positive_int, typed_key

# A function that returns a new program for a program. It also takes the paths of the
# program's arguments, and whether each of them is a parameter.
Rewrite = Callable[[core.Jaxpr, list[Any], list[bool]], core.Jaxpr]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `fp8_remat`, which documents them, and rewrites of the program."""

    format: Format
    group: int
    where: Callable[[Residual], Any] | None
    policy: Callable[..., Any] | None
    key: jax.Array | None
    rerun_attention: bool = False
    # Rewrites of a function's program before it is differentiated, in their order.
    rewrites: tuple[Rewrite, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format):
            raise ValueError(
                f"format must be E4M3, E5M2 or DE8 of coat_jax, got {self.format!r}"
            )
        object.__setattr__(self, "group", positive_int("group", self.group))
        for name in ("where", "policy"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ValueError(f"{name} must be a function or None, got {value!r}")
        check_flags(rerun_attention=self.rerun_attention)
        if self.key is not None:
            object.__setattr__(self, "key", self._typed_key())

    def after(self, rewrite: Rewrite) -> "Options":
        """Returns the options with `rewrite` before the other rewrites."""
        return dataclasses.replace(self, rewrites=(rewrite, *self.rewrites))

    def _typed_key(self) -> jax.Array:
        """Returns the typed key; raises ValueError if it cannot round the format."""
        key = typed_key(self.key)
        if self.format.table is not None:
            raise ValueError(
                f"key is for floating formats, got format={self.format!r}: its codes "
                "are not rounded stochastically"
            )
        return key
