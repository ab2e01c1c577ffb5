"""Reads custom calls to kernels from a lowered program, and emits them again.

Line numbers, paths, and JAX's count of kernels, which differ between equal kernels and
between checkouts, are removed from the bytecode. It is not documented how Pallas emits
custom calls. A form that is not expected here raises `UnexpectedError`.
"""

import dataclasses
import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

_TARGET = "mosaic_gpu_v2"
# The attributes that a custom call to a kernel has, and flags of its configuration. All
# flags are for kernels that communicate between GPUs; none of the package's kernels do.
_ATTRIBUTES = {
    "api_version",
    "backend_config",
    "call_target_name",
    "called_computations",
    "has_side_effect",
    "mhlo.backend_config",
    "operand_layouts",
    "output_operand_aliases",
    "result_layouts",
}
_METADATA = "mhlo.frontend_attributes"
_FLAGS = {"skip_device_barrier", "use_custom_barrier", "uses_xla_collective_metadata"}
_DTYPES = {
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "f32": jnp.float32,
    "f8E4M3FN": jnp.float8_e4m3fn,
    "f8E5M2": jnp.float8_e5m2,
    "i8": jnp.int8,
    "i32": jnp.int32,
    "ui8": jnp.uint8,
    "ui16": jnp.uint16,
    "ui32": jnp.uint32,
}
# JAX 0.11 counts kernels in the name of files that they are dumped to.
_COUNTED = "mosaic_gpu.dump_basename"


class UnexpectedError(Exception):
    """Raised where a lowered kernel has another form than this file expects."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A custom call to a kernel.

    Attributes:
      operands: The positions of its operands among the values of the program, which
        are the program's operands, then the results of the program's calls.
      takes: The types of its operands.
      returns: The types of its results.
      aliases: A mapping from the position of each overwritten operand to the position
        of the result that takes its memory.
      kernel: The kernel, as bytecode.
    """

    operands: tuple[int, ...]
    takes: tuple[jax.core.ShapedArray, ...]
    returns: tuple[jax.core.ShapedArray, ...]
    aliases: Mapping[int, int]
    kernel: bytes

    def emit(
        self, ctx: Any, values: Sequence[Any], avals: Sequence[Any], returns: Sequence
    ) -> Sequence[Any]:
        """Writes the call into the module that is being lowered; returns its results.

        `avals` are the types of the program's `values`, and `returns` the types of the
        call's results. They may differ from the kernel's types, because a kernel only
        gets addresses.
        """
        operands = [values[j] for j in self.operands]
        takes = [avals[j] for j in self.operands]
        for j, result in self.aliases.items():
            operands[j] = _viewed_in(ctx, operands[j], takes[j], returns[result])
            takes[j] = returns[result]
        rule = jax.ffi.ffi_lowering(
            _TARGET, operand_output_aliases=dict(self.aliases), has_side_effect=False
        )
        types = {"avals_in": takes, "avals_out": returns}
        config = {"kernel_hash": hashlib.sha256(self.kernel).digest()}
        config |= {"module": self.kernel} | dict.fromkeys(sorted(_FLAGS), False)
        return rule(ctx.replace(**types), *operands, **config)


@dataclasses.dataclass(frozen=True)
class Calls:
    """The custom calls of a launch, a program that does nothing but run kernels.

    Attributes:
      calls: The custom calls, in the order in which they run.
      results: The positions of the launch's results among its values, which are
        numbered as for `Call.operands`.
    """

    calls: tuple[Call, ...]
    results: tuple[int, ...]

    def emit(self, ctx: Any, operands: Sequence[Any]) -> list[Any]:
        """Writes all calls into the module that is being lowered.

        Returns the launch's results.
        """
        values, avals = list(operands), list(ctx.avals_in)
        types = dict(zip(self.results, ctx.avals_out, strict=True))
        for call in self.calls:
            positions = enumerate(call.returns, len(values))
            returns = [types.get(j, aval) for j, aval in positions]
            values += call.emit(ctx, values, avals, returns)
            avals += returns
        results = zip(self.results, ctx.avals_out, strict=True)
        return [_viewed_in(ctx, values[j], avals[j], aval) for j, aval in results]


def read_calls(module: ir.Module) -> Calls:
    """Returns the custom calls of a lowered launch.

    Raises:
      UnexpectedError: If the launch has other operations, or a call of another form.
    """
    functions = {op.attributes["sym_name"].value: op for op in module.body.operations}
    calls: list[Call] = []
    count = len(functions["main"].regions[0].blocks[0].arguments)

    def results(function: str, operands: Sequence[int]) -> list[int]:
        """Reads a function, and returns the positions of its results.

        `operands` are the positions of its arguments.
        """
        (block,) = functions[function].regions[0].blocks
        positions = dict(zip(block.arguments, operands, strict=True))
        for op in block.operations:
            at = tuple(positions[x] for x in op.operands)
            match op.operation.name:
                case "func.return":
                    return list(at)
                case "func.call":
                    out = results(op.attributes["callee"].value, at)
                case "stablehlo.custom_call":
                    calls.append(_call(op, at))
                    first = count + sum(len(call.returns) for call in calls[:-1])
                    out = range(first, first + len(op.results))
                case name:
                    raise UnexpectedError(f"{name} stands beside a kernel")
            positions |= dict(zip(op.results, out, strict=True))
        raise UnexpectedError("a function has no end")

    positions_of_results = tuple(results("main", range(count)))
    return Calls(tuple(calls), positions_of_results)


def _call(op: Any, operands: tuple[int, ...]) -> Call:
    """Reads a custom call to a kernel, so that it can be emitted again."""
    attributes = {name: op.attributes[name] for name in op.attributes}
    # A caller's metadata. JAX attaches it to what is emitted, too.
    attributes.pop(_METADATA, None)
    if attributes.keys() != _ATTRIBUTES:
        raise UnexpectedError(f"a custom call has attributes {sorted(attributes)}")
    target = attributes["call_target_name"].value
    if target != _TARGET or attributes["has_side_effect"].value:
        raise UnexpectedError(f"a kernel is a custom call to {target}")
    takes, returns = (tuple(map(_aval, values)) for values in (op.operands, op.results))
    for name, types in (("operand_layouts", takes), ("result_layouts", returns)):
        layouts = [[int(axis) for axis in layout] for layout in attributes[name]]
        if layouts != [list(range(x.ndim))[::-1] for x in types]:
            raise UnexpectedError(f"{name} of a kernel are {layouts}")
    kernel = _kernel(attributes["mhlo.backend_config"])
    aliases = dict(map(_alias, attributes["output_operand_aliases"]))
    return Call(operands, takes, returns, aliases, kernel)


def _aval(value: Any) -> jax.core.ShapedArray:
    shape, dtype = value.type.shape, str(value.type.element_type)
    if dtype not in _DTYPES:
        raise UnexpectedError(f"a kernel has an array of {dtype}")
    return jax.core.ShapedArray(shape, _DTYPES[dtype])


def _alias(attribute: ir.Attribute) -> tuple[int, int]:
    """Returns the positions of an overwritten operand and of the result there."""
    alias = stablehlo.OutputOperandAlias(attribute)
    # JAX writes no position if there is only one result.
    (result,) = alias.output_tuple_indices or [0]
    return alias.operand_index, result


def _kernel(config: ir.DictAttr) -> bytes:
    """Returns the kernel of a configuration, without locations and counted names."""
    attributes = {entry.name: entry.attr for entry in config}
    if attributes.keys() != _FLAGS | {"kernel_hash", "module"}:
        raise UnexpectedError(f"a kernel has attributes {sorted(attributes)}")
    if any(attributes[name].value for name in _FLAGS):
        raise UnexpectedError("a kernel communicates")
    kernel, digest = (
        attributes[name].value_bytes for name in ("module", "kernel_hash")
    )
    if hashlib.sha256(kernel).digest() != digest:
        raise UnexpectedError("a kernel's hash is not the SHA-256 of its bytes")
    return _stripped(kernel, config.context)


def _stripped(kernel: bytes, context: ir.Context) -> bytes:
    """Returns the bytecode of a kernel without locations and counted names.

    `context` is an MLIR context that knows Mosaic's types.
    """
    context.allow_unregistered_dialects = True  # Bytecode has operations of no dialect.
    written = io.BytesIO()
    with context:
        module = ir.Module.parse(kernel).operation
        if isinstance(module.attributes.get(_COUNTED), ir.StringAttr):
            module.attributes[_COUNTED] = module.attributes["sym_name"]
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module)
        module.write_bytecode(written, desired_version=0)
    return written.getvalue()


def viewed(x: jax.Array, like: Any) -> jax.Array:
    """Reinterprets an array's memory with the shape and the dtype of `like`."""
    if x.dtype != like.dtype:
        x = lax.bitcast_convert_type(x, like.dtype)
    return x if x.shape == like.shape else x.reshape(like.shape)


def _viewed_in(ctx: Any, value: Any, aval: Any, like: Any) -> Any:
    """Writes `viewed(value, like)` into the module that is being lowered.

    `aval` is the type of `value`. Returns the new value.
    """
    if (aval.shape, aval.dtype) == (like.shape, like.dtype):
        return value
    rule = mlir.lower_fun(lambda x: viewed(x, like), multiple_results=False)
    (value,) = rule(ctx.replace(avals_in=[aval], avals_out=[like]), value)
    return value
