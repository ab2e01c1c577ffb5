"""A report of the matmuls that `coat.fp8` converts."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from coat_jax.convert.matmuls import Conversion
from coat_jax.convert.objects import (
    LABEL,
    conversion_of,
    has_arrays,
    objects_of,
    with_blocks,
    with_conversion,
)
from coat_jax.convert.record import Label, Matmul, ModelRecord, Records, current
from coat_jax.fp8.dot_general import FEWEST_ROWS
from coat_jax.remat.modules import is_node, unbound
from coat_jax.remat.report import check_callable
from pallas_kernels.dispatch import operations


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulReport:
    """A list of the matmuls in a model's blocks, which prints as a table.

    Attributes:
      rows: One entry per matmul, block by block, in the order of the program.
      blocks: The paths of all blocks.
      called: The paths of the blocks that the call runs. Other blocks have no rows.
    """

    rows: tuple[Matmul, ...]
    blocks: tuple[str, ...]
    called: tuple[str, ...]

    def __str__(self) -> str:
        table = [("block", "parameter", "operands", "runs in FP8")]
        for block in self.blocks:
            rows = [row for row in self.rows if row.block == block]
            table += [_cells(row) for row in rows]
            if not rows:
                why = "it has no matmul" if block in self.called else "it is not called"
                table.append((block or "(all)", "", "", f"no: {why}"))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        padded = [
            [cell.ljust(n) for cell, n in zip(line, widths, strict=True)]
            for line in table
        ]
        lines = ["  ".join(line).rstrip() for line in padded]
        count = sum(row.runs_in_fp8 for row in self.rows)
        return "\n".join([*lines, f"{count} of {len(self.rows)} matmuls in FP8"])


def _cells(row: Matmul) -> tuple[str, str, str, str]:
    lhs, rhs = (str(list(shape)).replace(" ", "") for shape in (row.left, row.right))
    runs = "yes" if row.converted else f"no: {row.reason}"
    if row.converted and not row.runs_in_fp8:
        runs = f"no: {row.rows} rows here, yes from {FEWEST_ROWS} on"
    return row.block or "(all)", row.parameter or "-", f"{lhs} x {rhs}", runs


def fp8_report(
    model: Callable[..., Any] | nn.Module, *args: Any, **kwargs: Any
) -> MatmulReport:
    """Lists the matmuls of a converted model's blocks, and whether they run in FP8.

    The call is traced and nothing is computed. Matmuls that stay as they are come with
    the reason: the size, the rule `matmuls=`, a loop around the matmul, or two operands
    that are activations. "no: 8 rows here, yes from 16 on" means that a larger batch
    runs in FP8. Under `jax.vmap` only the rows of one example count. A block that is
    called several times with the same shapes is listed once.

    Args:
      model: What `coat.fp8` returned, or a function that calls it, such as a loss. A
        Linen module is applied to the variables, which come first.
      *args: The arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`.
      **kwargs: The keyword arguments.

    Returns:
      The matmuls, as a report that prints as a table.

    Raises:
      TypeError: If `model` is neither a function nor a module.
      ValueError: If the call runs nothing that `coat.fp8` has converted.

    Examples:
      >>> import coat_jax as coat, jax, jax.numpy as jnp
      >>> def mlp(params, x):
      ...     return jnp.tanh(x @ params["up"]) @ params["router"]
      >>> params = {"up": jnp.ones((128, 256)), "router": jnp.ones((256, 8))}
      >>> print(coat.fp8_report(coat.fp8(mlp), params, jnp.ones((32, 128))))
      block  parameter  operands              runs in FP8
      (all)  up         [32,128] x [128,256]  yes
      (all)  router     [32,256] x [256,8]    no: 8 outputs are fewer than 128
      1 of 2 matmuls in FP8
    """
    fn = model.apply if isinstance(model, nn.Module) else model
    check_callable("fp8_report", fn)
    records = Records()
    token = current.set(records)
    try:
        with operations.traced_anew():
            _trace(fn, args, kwargs, records)
    finally:
        current.reset(token)
    if not records.blocks:
        raise ValueError(
            "fp8_report takes a model that coat.fp8 has converted, or a function that "
            f"calls one, got {fn!r}, which calls none"
        )
    matmuls = dict.fromkeys((log.block, log.matmuls) for log in records.logs)
    return MatmulReport(
        rows=tuple(
            row
            for block in records.blocks
            for of_block, rows in matmuls
            for row in rows
            if of_block == block
        ),
        blocks=tuple(records.blocks),
        called=tuple(dict.fromkeys(log.block for log in records.logs)),
    )


def _trace(fn: Callable, args: Any, kwargs: Any, records: Records) -> None:
    """Traces a call of `fn`, and adds the blocks and matmuls of the call to `records`.

    NNX objects may change in the call, so it is traced with copies of them.
    """
    function, bound, keywords = unbound(fn)
    call = function, (*bound, *args), keywords | kwargs
    leaves, tree = jax.tree.flatten(_with_own_paths(call, records), is_leaf=is_node)
    positions = [i for i, x in enumerate(leaves) if not is_node(x) and has_arrays(x)]
    graph, state = nnx.split({i: x for i, x in enumerate(leaves) if is_node(x)})

    def run(state, arrays):
        inner = dict(enumerate(leaves)) | nnx.merge(graph, state)
        inner |= dict(zip(positions, arrays, strict=True))
        inner_fn, inner_args, inner_kwargs = jax.tree.unflatten(tree, inner.values())
        inner_fn(*inner_args, **inner_kwargs)

    jax.eval_shape(run, state, [leaves[i] for i in positions])


def _with_own_paths(call: Any, records: Records) -> Any:
    """Returns a call in which each converted pytree block knows its own path.

    Equal blocks of a pytree share a class, and so a conversion with the path of one
    block. In the returned call each block has its own conversion. The paths of all
    blocks are added to `records`.
    """
    function, args, kwargs = call
    return (
        _of_argument(function, records),
        tuple(_of_argument(x, records) for x in args),
        {name: _of_argument(x, records) for name, x in kwargs.items()},
    )


def _of_argument(argument: Any, records: Records) -> Any:
    blocks = {}
    for path, x in objects_of(argument):
        if isinstance(label := getattr(x, LABEL, None), Label):
            records.blocks.setdefault(label.path)
        elif isinstance(conversion := conversion_of(x), Conversion):
            blocks[path] = conversion
            records.blocks.setdefault(path)

    def light(x: Any, path: str) -> Any:
        conversion = dataclasses.replace(
            blocks[path], where=path, model=ModelRecord("a report")
        )
        return with_conversion(x, conversion)

    return with_blocks(argument, blocks, light) if blocks else argument
