"""The kernel of Adam's step reads and writes all memory once, in place.

One warpgroup of a thread block keeps the copy engine busy; the others find rows of
groups in shared memory, and write results directly.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import dispatch
from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.ops.adam.reference import GROUP, Moments
from pallas_kernels.ops.adam.tile import (
    TALL,
    TILE,
    Factors,
    Inputs,
    State,
    Step,
    load,
)

_SHARED = 223 * 1024  # Bytes of shared memory that a thread block may fill.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """The sizes of thread blocks and of the pipeline.

    Attributes:
      warpgroups: Of a thread block that compute: 1, 2 or 4; fewer where shared memory
        is short.
      stages: Steps in flight, in each of which these have a tile each.
      sms: Multiprocessors, each with one thread block; None for all.

    Raises:
      ValueError: If warpgroups are not so many, whose tiles would cut what is copied.
    """

    warpgroups: int = 4
    stages: int = 2
    sms: int | None = None

    def __post_init__(self):
        if self.warpgroups not in (1, 2, 4):
            raise ValueError(f"warpgroups must be 1, 2 or 4, got {self.warpgroups}")

    @property
    def rows(self) -> int:
        """The rows of a pipeline step."""
        return self.warpgroups * TALL


# Jitted, so that a model's many parameters of one shape are compiled once.
@functools.partial(jax.jit, static_argnames=("step", "tuning"))
def run(
    step: Step,
    params: Array | None,
    moments: Moments,
    grads: Array,
    seeds: tuple[Array, Array, Array | None],
    factors: Array,
    tuning: Tuning,
) -> State:
    """Updates parameters and moments in place: as refs they are the kernel's outputs.

    Arrays are [groups, width] with one number a group in [groups], or they are
    [rows, n] and [rows, ceil(n / 128)]. Of the latter a short last group is left as it
    is.
    """
    rows, n = grads.shape
    width = min(n, GROUP)

    def launch(body, ctas, *arrays, **how):
        def kernel(refs, grads, seeds, factors, **scratch):
            factors = Factors(*(factors[j] for j in range(len(Factors._fields))))
            seed, stream, salt = seeds
            seed = seed[0] + stream[0]
            salt = jnp.uint32(0) if salt is None else salt[0]

            def update(to, values, start, column):
                words = functools.partial(step.words, seed, start, column, to.mu)
                step.tile(factors, salt, to, values, words)

            inputs = Inputs.of(refs, grads, step.with_params)
            body(inputs, update, refs, **scratch)

        mosaic.kernel(
            kernel,
            out_type=(),
            kernel_name="adam",
            grid=(ctas,),
            grid_names=("cta",),
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                lowering_semantics=plgpu.LoweringSemantics.Lane,
                # A lane writes what it has read itself; `_direct` says where else.
                unsafe_no_auto_barriers=True,
            ),
            **how,
        )(*arrays)

    def launches(*arrays):
        direct = functools.partial(_direct, columns=n // width)
        pipelined = n == GROUP
        tile = TALL if pipelined else TILE
        done = rows // tile * tile
        # The rest begins one tile earlier if it is smaller than the small tile.
        done -= tile if 0 < rows - done < TILE else 0
        if done and pipelined:
            inputs = Inputs.of(*arrays[:2], step.with_params)
            fit = _fitting(inputs, tuning)
            steps = -(-done // fit.rows)
            body = functools.partial(_pipeline, rows=done, steps=steps, tuning=fit)
            ctas = min(steps, fit.sms or dispatch.multiprocessors())
            launch(body, ctas, *arrays, **_warpgroups(inputs, fit))
        elif done:
            launch(direct, done // TILE * (n // width), *arrays)
        if done < rows:
            starts = [*range(done, rows - TILE, TILE), rows - TILE]
            launch(functools.partial(direct, starts=starts), n // width, *arrays)

    @jax.custom_batching.sequential_vmap
    def in_place(*arrays):
        # Without barriers XLA's fusion of slices with what reads or writes them takes
        # in a kernel in a loop, and forgets there which operands are its results.
        state, *reads = lax.optimization_barrier(arrays)
        state = pl.run_state(lambda refs: launches(refs, *reads))(state)
        return lax.optimization_barrier(state)

    result = lax.empty(grads.shape, grads.dtype) if params is None else params
    seeds = jax.tree.map(lambda x: x.reshape(1), seeds)
    return in_place(State(result, **moments._asdict()), grads, seeds, factors)


def _warpgroups(inputs: Inputs, tuning: Tuning) -> dict[str, Any]:
    """Returns the warpgroups of a thread block and their shared memory."""
    barrier = functools.partial(plgpu.Barrier, num_barriers=tuning.stages)
    scratch = dict(
        smem=_staged(inputs, tuning),
        filled=barrier(num_arrivals=len(jax.tree.leaves(inputs))),
        free=barrier(num_arrivals=tuning.warpgroups),
    )
    count = tuning.warpgroups + 1
    return dict(num_threads=count, thread_name="warpgroup", scratch_types=scratch)


def _staged(inputs: Inputs, tuning: Tuning) -> Inputs:
    """Shared memory for what is read: [stages, rows, ...] of each array."""

    def smem(x):
        # The copy engine writes 128 bytes or more.
        rows = max(tuning.rows, 128 // jnp.dtype(x.dtype).itemsize)
        return plgpu.SMEM((tuning.stages, rows, *x.shape[1:]), x.dtype)

    return inputs.map(smem, smem)


def _fitting(inputs: Inputs, tuning: Tuning) -> Tuning:
    """Returns a tuning with as many warpgroups as shared memory allows."""
    staged = jax.tree.leaves(_staged(inputs, tuning))
    size = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in staged)
    if size <= _SHARED or tuning.warpgroups == 1:
        return tuning
    fewer = dataclasses.replace(tuning, warpgroups=tuning.warpgroups // 2)
    return _fitting(inputs, fewer)


def _pipeline(
    inputs: Inputs, update, refs: State, *, rows, steps, tuning, smem, filled, free
) -> None:
    """Strides over steps; each warpgroup that computes has a tile of one."""
    cta, ctas = lax.axis_index("cta"), lax.axis_size("cta")
    own = lax.div(steps - cta + ctas - 1, ctas)
    warpgroup = lax.axis_index("warpgroup")
    of_loads, of_computing = mosaic.registers(tuning.warpgroups)
    width = inputs.mu.shape[1]

    @pl.when(warpgroup == tuning.warpgroups)
    def _():
        plgpu.set_max_registers(of_loads, action="decrease")

        @pl.loop(0, own)
        def _(step):
            stage = lax.rem(step, tuning.stages)

            @pl.when(step >= tuning.stages)
            def _():
                plgpu.barrier_wait(free.at[stage])

            first = (cta + step * ctas) * tuning.rows
            for ref, to in zip(*map(jax.tree.leaves, (inputs, smem)), strict=True):
                length = to.shape[1]
                at = pl.ds(lax.div(first, length) * length, length)
                plgpu.copy_gmem_to_smem(ref.at[at], to.at[stage], filled.at[stage])

        # Nothing may arrive at a barrier of a thread block that has ended.
        @pl.loop(lax.max(own - tuning.stages, 0), own)
        def _(step):
            plgpu.barrier_wait(free.at[lax.rem(step, tuning.stages)])

    @pl.when(warpgroup < tuning.warpgroups)
    def _():
        plgpu.set_max_registers(of_computing, action="increase")

        @pl.loop(0, own)
        def _(step):
            stage = lax.rem(step, tuning.stages)
            start = (cta + step * ctas) * tuning.rows + warpgroup * TALL

            def loads(ref):
                at = pl.ds(lax.rem(start, ref.shape[1]), TALL)
                return functools.partial(load, ref.at[stage, at], width)

            plgpu.barrier_wait(filled.at[stage])
            values = smem.map(loads, loads).loaded()
            plgpu.barrier_arrive(free.at[stage])
            to = State(*(ref.at[pl.ds(start, TALL)] for ref in refs))
            column = jnp.int32(0)
            pl.when(start < rows)(lambda: update(to, values, start, column))


def _direct(inputs: Inputs, update, refs: State, *, columns, starts=None) -> None:
    """A thread block for each tile of 16 rows of one group, or of rows from `starts`.

    Tiles may overlap: all are read before one is written, alike where they are shared,
    though not by the same lanes.
    """
    cta = lax.axis_index("cta")
    column = lax.rem(cta, columns)
    width = min(inputs.mu.shape[1], GROUP)
    starts = starts or [lax.div(cta, columns) * TILE]

    def array_at(ref, start):
        return ref.at[pl.ds(start, TILE), pl.ds(column * width, width)]

    def group_at(ref, start):
        rows = pl.ds(start, TILE)
        return ref.at[rows] if len(ref.shape) == 1 else ref.at[rows, column]

    def loads(start):
        return inputs.map(
            lambda ref: functools.partial(load, array_at(ref, start), width),
            lambda ref: functools.partial(load, group_at(ref, start), width),
        ).loaded()

    loaded = [(start, loads(start)) for start in starts]
    if len(starts) > 1:
        plgpu.commit_smem()  # All warps have read.
    for start, values in loaded:
        at = (functools.partial(f, start=start) for f in (array_at, group_at))
        update(refs.map(*at), values, jnp.int32(start), column)
