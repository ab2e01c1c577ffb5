"""The kernel of Adam's step, which reads and writes every array once, in place.

All warpgroups of a thread block read rows of groups from shared memory, and write
results directly to global memory. The first warpgroup also starts the copies to shared
memory (TMA).
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

from pallas_kernels.dispatch import devices, lowering
from pallas_kernels.mosaic import core as mosaic
from pallas_kernels.ops.adam.reference import GROUP, Moments
from pallas_kernels.ops.adam.tile import TALL, TILE, Factors, Inputs, State, Step, load

_SHARED = 223 * 1024  # Bytes of shared memory that a thread block may use.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """The sizes of thread blocks and of their pipeline.

    Attributes:
      warpgroups: The number of computing warpgroups per thread block: 1, 2 or 4. The
        kernel uses fewer if shared memory is too small.
      stages: The number of steps in flight. In each step every computing warpgroup has
        one tile.
      sms: The number of multiprocessors, each with one thread block; None for all.

    Raises:
      ValueError: If `warpgroups` is not 1, 2 or 4. With other numbers a copy to shared
        memory could end inside a tile.
    """

    warpgroups: int = 4
    stages: int = 2
    sms: int | None = None

    def __post_init__(self) -> None:
        if self.warpgroups not in (1, 2, 4):
            raise ValueError(f"warpgroups must be 1, 2 or 4, got {self.warpgroups}")

    @property
    def rows(self) -> int:
        """The number of rows of a step; each row is one group."""
        return self.warpgroups * TALL


# `jit` compiles the kernel once for all parameters of the same shape.
@functools.partial(jax.jit, static_argnames=("step", "tuning"))
def run(
    step: Step,
    params: Array | None,
    moments: Moments,
    grads: Array,
    seeds: tuple[Array, Array, Array | None],
    first: Array | None,
    factors: Array,
    tuning: Tuning,
) -> State:
    """Updates parameters and moments in place, and returns them.

    Arrays of elements have one of two shapes. With the shape [groups, width], where
    width is at most 128, arrays with a number per group have the shape [groups]. With
    rows [rows, n] of n > 128 elements they have the shape [rows, ceil(n / 128)], and a
    short last group of each row is left unchanged.

    Args:
      step: The compile-time properties of the step.
      params: The parameters. If None, the update is returned in their place.
      moments: The moments.
      grads: The gradients.
      seeds: The seed, the stream, and the salt or None, as for `adam`.
      first: The first row of the layer to step, if parameters and moments are stacks of
        layers, which have more groups than the gradients. None means no stacks.
      factors: The numbers of `Factors`.
      tuning: Settings of the kernel.
    """
    rows, n = grads.shape
    width = min(n, GROUP)

    def launch(body, ctas, *arrays, **options):
        def kernel(refs, grads, seeds, first, factors, **scratch):
            if first is not None:
                layer = pl.ds(first[0], rows)
                refs = State(*(ref.at[layer] for ref in refs))
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
                # A lane writes only elements that it has read itself. `_direct` has
                # the only exception.
                unsafe_no_auto_barriers=True,
            ),
            **options,
        )(*arrays)

    def launches(*arrays):
        direct = functools.partial(_direct, columns=n // width)
        pipelined = n == GROUP
        tile = TALL if pipelined else TILE
        done = rows // tile * tile
        # At least TILE rows must remain. If fewer do, a tile is added to them.
        done -= tile if 0 < rows - done < TILE else 0
        if done and pipelined:
            inputs = Inputs.of(*arrays[:2], step.with_params)
            fit = _fitting(inputs, tuning)
            steps = -(-done // fit.rows)
            body = functools.partial(_pipeline, rows=done, steps=steps, tuning=fit)
            ctas = min(steps, fit.sms or devices.multiprocessors())
            launch(body, ctas, *arrays, **_warpgroups(inputs, fit))
        elif done:
            launch(direct, done // TILE * (n // width), *arrays)
        if done < rows:
            starts = [*range(done, rows - TILE, TILE), rows - TILE]
            launch(functools.partial(direct, starts=starts), n // width, *arrays)

    def updated(state, reads):
        return pl.run_state(lambda refs: launches(refs, *reads))(state)

    @jax.custom_batching.sequential_vmap
    def in_place(*arrays):
        # XLA fuses slices with the operations that read or write them. In a loop it
        # would fuse a kernel, too, and forget which operands alias its results. The
        # barriers prevent that.
        state, *reads = lax.optimization_barrier(arrays)
        state = lowering.once(updated, "adam")(state, reads)
        return lax.optimization_barrier(state)

    result = lax.empty(grads.shape, grads.dtype) if params is None else params
    seeds, first = jax.tree.map(lambda x: x.reshape(1), (seeds, first))
    return in_place(State(result, **moments._asdict()), grads, seeds, first, factors)


def _warpgroups(inputs: Inputs, tuning: Tuning) -> dict[str, Any]:
    """Returns the launch options for a thread block's warpgroups and shared memory."""
    barrier = functools.partial(plgpu.Barrier, num_barriers=tuning.stages)
    scratch = dict(
        smem=_staged(inputs, tuning),
        filled=barrier(num_arrivals=len(jax.tree.leaves(inputs))),
        free=barrier(num_arrivals=tuning.warpgroups),
    )
    return dict(
        num_threads=tuning.warpgroups, thread_name="warpgroup", scratch_types=scratch
    )


def _staged(inputs: Inputs, tuning: Tuning) -> Inputs:
    """Returns the shared memory for the inputs: [stages, rows, ...] for each array."""

    def smem(x):
        # The copy engine writes at least 128 bytes.
        rows = max(tuning.rows, 128 // jnp.dtype(x.dtype).itemsize)
        return plgpu.SMEM((tuning.stages, rows, *x.shape[1:]), x.dtype)

    return inputs.map(smem, smem)


def _fitting(inputs: Inputs, tuning: Tuning) -> Tuning:
    """Returns `tuning`, with fewer warpgroups if shared memory is too small for it."""
    staged = jax.tree.leaves(_staged(inputs, tuning))
    size = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in staged)
    if size <= _SHARED or tuning.warpgroups == 1:
        return tuning
    fewer = dataclasses.replace(tuning, warpgroups=tuning.warpgroups // 2)
    return _fitting(inputs, fewer)


def _pipeline(
    inputs: Inputs, update, refs: State, *, rows, steps, tuning, smem, filled, free
) -> None:
    """Computes a thread block's steps; each warpgroup has one tile of a step.

    The first warpgroup also starts the copies to shared memory.

    Args:
      inputs: Refs to the inputs in global memory.
      update: A function that computes a tile from its inputs, and stores the results.
      refs: Refs to the results in global memory.
      rows: The number of rows of all tiles.
      steps: The number of steps of all thread blocks.
      tuning: Settings of the kernel.
      smem: The inputs in shared memory, [stages, rows, ...].
      filled: Barriers that complete when a step's inputs have arrived.
      free: Barriers that complete when all warpgroups have read a step's inputs.
    """
    cta, ctas = lax.axis_index("cta"), lax.axis_size("cta")
    own = lax.div(steps - cta + ctas - 1, ctas)
    warpgroup = lax.axis_index("warpgroup")
    width = inputs.mu.shape[1]

    def fill(step):
        stage = lax.rem(step, tuning.stages)
        first = (cta + step * ctas) * tuning.rows
        for ref, to in zip(*map(jax.tree.leaves, (inputs, smem)), strict=True):
            length = to.shape[1]
            at = pl.ds(lax.div(first, length) * length, length)
            plgpu.copy_gmem_to_smem(ref.at[at], to.at[stage], filled.at[stage])

    @pl.when(warpgroup == 0)
    def _():
        pl.loop(0, lax.min(own, tuning.stages))(fill)

    @pl.loop(0, own)
    def _(step):
        stage = lax.rem(step, tuning.stages)
        start = (cta + step * ctas) * tuning.rows + warpgroup * TALL

        def loads(ref):
            at = pl.ds(lax.rem(start, ref.shape[1]), TALL)
            return functools.partial(load, ref.at[stage, at], width)

        plgpu.barrier_wait(filled.at[stage])
        values = smem.map(loads, loads).loaded()
        # All inputs are in registers now, so that the stage can be filled again.
        plgpu.barrier_arrive(free.at[stage])

        @pl.when(warpgroup == 0)
        def _():
            # After the last step, too: a thread block must not end before the last
            # arrival at its barriers.
            plgpu.barrier_wait(free.at[stage])
            following = step + tuning.stages
            pl.when(following < own)(lambda: fill(following))

        to = State(*(ref.at[pl.ds(start, TALL)] for ref in refs))
        column = jnp.int32(0)
        pl.when(start < rows)(lambda: update(to, values, start, column))


def _direct(inputs: Inputs, update, refs: State, *, columns, starts=None) -> None:
    """Computes tiles of 16 rows, each with one group of these rows.

    A thread block computes one tile. If `starts` is given, it computes one tile for
    each row in `starts`, where the tile begins. These tiles may overlap. Different
    lanes then write the same values to the shared rows, so all tiles are read before
    one is written.

    Args:
      inputs: Refs to the inputs in global memory.
      update: A function that computes a tile from its inputs, and stores the results.
      refs: Refs to the results in global memory.
      columns: The number of groups in a row.
      starts: The first row of each tile, or None.
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
        plgpu.commit_smem()  # Waits until all warps have read.
    for start, values in loaded:
        at = (functools.partial(f, start=start) for f in (array_at, group_at))
        update(refs.map(*at), values, jnp.int32(start), column)
