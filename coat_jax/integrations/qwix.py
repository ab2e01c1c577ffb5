"""Runs the matmuls that qwix's rules select in FP8, for trainers that use qwix.

MaxText (`use_qwix_quantization`) and tunix hand a model to `qwix.quantize_model` with a
provider, which replaces `jax.lax.dot_general` and `jnp.einsum` in modules of chosen
paths. The provider here multiplies a parameter and an activation by
`coat.fp8_dot_general`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from qwix import QuantizationProvider, QuantizationRule
from qwix._src.utils import flax_util  # The only way to ask which array is a weight.

from coat_jax.fp8.dot_general import fp8_dot_general

_OPERATIONS = ("dot_general", "einsum")


class FP8Provider(QuantizationProvider):
    """A provider for qwix that runs matmuls with `coat.fp8_dot_general`.

    A matmul runs in FP8 if its module's path matches a rule's `module_path`, and
    exactly one of its operands is a parameter of that module. Products of two
    activations, such as attention scores, stay as they are, and so does everything
    without a rule.

    Args:
      rules: The rules. The first rule that matches a module applies. A rule has a
        `module_path`, a regular expression for the whole path such as ".*mlp.*", and
        `op_names`, which may be "dot_general" and "einsum". A rule with
        `weight_qtype=None`, the default, keeps its modules as they are; every other
        rule must have `weight_qtype="float8_e4m3fn"`.
      **options: Further options of `qwix.QuantizationProvider`.

    Raises:
      ValueError: If a rule asks for another dtype, or for anything else that
        `coat.fp8_dot_general` does not support.

    Examples:
      >>> import jax.numpy as jnp, qwix
      >>> from flax import nnx
      >>> from coat_jax.integrations.qwix import FP8Provider
      >>> rule = qwix.QuantizationRule(module_path="", weight_qtype="float8_e4m3fn")
      >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.ones((16, 64))
      >>> qwix.quantize_model(model, FP8Provider([rule]), x)(x).shape
      (16, 32)
    """

    def __init__(self, rules: Sequence[QuantizationRule], **options: Any):
        for rule in rules:
            _check(rule)
        super().__init__(rules, **options)

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        """Returns a dict from names of JAX's functions to their replacements."""
        return super().get_intercept_map() | {
            "jax.lax.dot_general": self.dot_general,
            "jax.numpy.einsum": self.einsum,
        }

    def dot_general(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: lax.DotDimensionNumbers,
        *args: Any,
        **kwargs: Any,
    ) -> jax.Array:
        """Computes `jax.lax.dot_general`, in FP8 if a rule asks for it."""
        fp8 = self._has_rule("dot_general")
        multiply = _of_weight if fp8 else lax.dot_general
        return multiply(lhs, rhs, dimension_numbers, *args, **kwargs)

    def einsum(self, subscripts: Any, *operands: Any, **kwargs: Any) -> jax.Array:
        """Computes `jnp.einsum`, in FP8 if a rule asks for it.

        An einsum of one operand, or of three or more, stays as it is.
        """
        if not self._has_rule("einsum") or len(operands) != 2:
            return jnp.einsum(subscripts, *operands, **kwargs)
        kwargs["_dot_general"] = _of_weight
        with jax.disable_jit():  # A function under jit would hide which is a parameter.
            return jnp.einsum(subscripts, *operands, **kwargs)

    def _has_rule(self, operation: str) -> bool:
        rule, _ = self._get_current_rule_and_op_id(operation)
        return rule is not None and rule.weight_qtype is not None


def _check(rule: QuantizationRule) -> None:
    if rule.weight_qtype is None:
        return
    types = {"weight_qtype": rule.weight_qtype, "act_qtype": rule.act_qtype}
    for name, dtype in types.items():
        if dtype is not None and jnp.dtype(dtype) != jnp.float8_e4m3fn:
            raise ValueError(f"{name} must be float8_e4m3fn or None, got {dtype!r}")
    for name in ("tile_size", "act_static_scale"):
        if value := getattr(rule, name):
            raise ValueError(f"{name} must not be set, got {value!r}")
    if wrong := sorted({*rule.op_names} - {*_OPERATIONS}):
        raise ValueError(f"op_names must be some of {_OPERATIONS}, got {wrong}")


def _of_weight(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """Computes a matmul in FP8 if exactly one of its operands is a parameter."""
    of_lhs, of_rhs = (flax_util.find_param(x) is not None for x in (lhs, rhs))
    options = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "out_sharding": out_sharding,
    }
    with jax.disable_jit(False):
        if of_lhs == of_rhs:
            return lax.dot_general(lhs, rhs, dimension_numbers, **options)
        if of_rhs:
            return fp8_dot_general(lhs, rhs, dimension_numbers, **options)
        if out_sharding is not None:
            raise ValueError(
                "out_sharding needs the weights as the second operand, got them as the "
                "first"
            )
        (contract, batch), ndims = dimension_numbers, (lhs.ndim, rhs.ndim)
        swapped = contract[::-1], batch[::-1]
        y = fp8_dot_general(rhs, lhs, swapped, **options)
        shared = len(batch[0])
        ours, theirs = (n - shared - len(contract[0]) for n in ndims)
        first = range(shared + theirs, shared + theirs + ours)
        order = (*range(shared), *first, *range(shared, shared + theirs))
        return lax.transpose(y, order)
