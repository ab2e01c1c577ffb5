"""Applies `fp8_remat` within each `shard_map` of a function.

JAX differentiates a `shard_map` as one operation, which saves whatever the program
within it saves. This program runs on a device's shards. Here it gets a backward pass
that reads FP8 residuals. The function around the `shard_map` saves these residuals as
they are.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from jax.extend import core

from coat_jax.programs.graph import Graph, inlined, is_plain_call
from coat_jax.programs.primitives import all_eqns, bodies_of, does_work
from coat_jax.programs.shard_maps import is_shard_map, program_of, with_program
from coat_jax.remat.options import Options
from coat_jax.remat.vjp import fp8_function


def with_shard_maps(options: Options) -> Options:
    """Returns options that apply within each `shard_map` of a function, too.

    The options are returned unchanged in three cases. With a key for stochastic
    rounding, all devices would draw the same random bits. The option `where` selects
    full arrays, not shards. A policy of `jax.checkpoint` is asked about operations
    within a `shard_map` anyway.
    """
    if any(x is not None for x in (options.key, options.where, options.policy)):
        return options
    rewrites = *options.rewrites, _WithinShardMaps(options)
    return dataclasses.replace(options, rewrites=rewrites)


@dataclasses.dataclass(frozen=True)
class _WithinShardMaps:
    """The rewrite of a program that applies `fp8_remat` within `shard_map`.

    Attributes:
      options: The options of `fp8_remat` within each `shard_map`.
    """

    options: Options

    def __call__(
        self, program: core.Jaxpr, keys: Sequence[Any], is_param: Sequence[bool]
    ) -> core.Jaxpr:
        """Returns the program with FP8 residuals within each `shard_map`."""
        del keys
        if not any(map(_has_shard_map, program.eqns)):
            return program
        program = inlined(program, lambda e: is_plain_call(e) and _has_shard_map(e))
        params = [v for v, p in zip(program.invars, is_param, strict=True) if p]
        fixed = Graph(program).following(params)
        new = [
            self._anew(eqn, fixed) if _does_work(eqn) else [eqn] for eqn in program.eqns
        ]
        return program.replace(eqns=[eqn for eqns in new for eqn in eqns])

    def _anew(
        self, eqn: core.JaxprEqn, fixed: Collection[core.Var]
    ) -> list[core.JaxprEqn]:
        """Returns the operations of an equal `shard_map` that saves FP8 residuals.

        Args:
          eqn: The `shard_map`.
          fixed: The variables that follow from parameters alone.
        """
        params = [
            position
            for position, v in enumerate(eqn.invars)
            if isinstance(v, core.Literal) or v in fixed
        ]
        program = core.jaxpr_as_fun(core.ClosedJaxpr(program_of(eqn), ()))
        return with_program(eqn, fp8_function(program, params, self.options))


def _has_shard_map(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a `shard_map`, or a call that contains one."""
    if is_shard_map(eqn):
        return True
    inner = (e for body in bodies_of(eqn) for e in body.eqns)
    return is_plain_call(eqn) and any(map(_has_shard_map, inner))


def _does_work(eqn: core.JaxprEqn) -> bool:
    """Returns whether an operation is a `shard_map` with matmuls or other kernels."""
    return is_shard_map(eqn) and any(map(does_work, all_eqns(program_of(eqn).eqns)))
