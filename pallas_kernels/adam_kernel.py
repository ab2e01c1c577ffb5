"""How the kernel of Adam's step goes over memory: everything once, in place."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import mosaic
from pallas_kernels.adam_tile import (
    TILE,
    Factors,
    Inputs,
    State,
    Step,
    load,
)
from pallas_kernels.reference.adam import GROUP, Moments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the kernel is laid over the GPU.

    Attributes:
      tiles: Tiles of 16 groups a pipeline step.
      stages: Pipeline steps in flight.
      ctas: Thread blocks for each multiprocessor, at most: far more than run at once,
        so that one that is done early has another to begin.
      sms: Multiprocessors.
    """

    tiles: int = 2
    stages: int = 2
    ctas: int = 48
    sms: int = 132


# Jitted, so that a model's many parameters of one shape are compiled once.
@functools.partial(jax.jit, static_argnames=("step", "tuning"))
def run(
    step: Step,
    params: Array | None,
    moments: Moments,
    grads: Array,
    noise: Array | None,
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
    tiles, rest = divmod(rows, TILE)
    tiles -= rest > 0  # The last one overlaps with what is left.

    def launch(body, ctas, *arrays):
        def kernel(refs, grads, noise, factors):
            factors = Factors(*(factors[j] for j in range(len(Factors._fields))))
            inputs = Inputs.of(refs, grads, noise, step.with_params)
            body(inputs, functools.partial(step.tile, factors), refs)

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
        )(*arrays)

    def launches(*arrays):
        direct = functools.partial(_direct, columns=n // width)
        if tiles and n == width:
            ctas = min(-(-tiles // tuning.tiles), tuning.ctas * tuning.sms)
            body = functools.partial(_pipeline, tiles=tiles, ctas=ctas, tuning=tuning)
            launch(body, ctas, *arrays)
        elif tiles:
            launch(direct, tiles * (n // width), *arrays)
        if rest:
            starts = (tiles * TILE, rows - TILE)
            body = functools.partial(direct, starts=starts)
            launch(body, n // width, *arrays)

    @jax.custom_batching.sequential_vmap
    def in_place(*arrays):
        # Without barriers XLA's fusion of slices with what reads or writes them takes
        # in a kernel in a loop, and forgets there which operands are its results.
        state, *reads = lax.optimization_barrier(arrays)
        state = pl.run_state(lambda refs: launches(refs, *reads))(state)
        return lax.optimization_barrier(state)

    result = lax.empty(grads.shape, grads.dtype) if params is None else params
    return in_place(State(result, **moments._asdict()), grads, noise, factors)


def _pipeline(inputs: Inputs, update, refs: State, *, tiles, ctas, tuning) -> None:
    """Strides over blocks of tiles, the next ones' loads ahead; stores are direct."""
    block = tuning.tiles * TILE
    blocks = -(-tiles // tuning.tiles)
    cta = lax.axis_index("cta")
    width = inputs.mu.shape[1]

    def array_spec(_):
        return pl.BlockSpec((block, width), lambda j: (cta + j * ctas, 0))

    def group_spec(ref):
        # The copy engine writes 128 bytes or more.
        length = max(block, 128 // jnp.dtype(ref.dtype).itemsize)

        def index(j):
            return (lax.div((cta + j * ctas) * block, length),)

        return pl.BlockSpec((length,), index)

    def body(indices, *smem):
        smem = jax.tree.unflatten(jax.tree.structure(inputs), smem)
        start = (cta + indices[0] * ctas) * block
        for tile in range(tuning.tiles):

            def loads(ref, at=0, tile=tile):
                rows = pl.ds(at + tile * TILE, TILE)
                return functools.partial(load, ref.at[rows], width)

            def group_loads(ref):
                return loads(ref, lax.rem(start, ref.shape[0]))

            values = smem.map(loads, group_loads)
            if tile == tuning.tiles - 1:
                # All warps have to have read the stage before it is filled again; to
                # wait after the stores would be to wait for the stores.
                values = values.loaded()
                plgpu.commit_smem()
            at = start + tile * TILE
            to = State(*(ref.at[pl.ds(at, TILE)] for ref in refs))
            store = functools.partial(update, to, values)
            if tiles % tuning.tiles:
                pl.when(at < tiles * TILE)(store)
            else:
                store()

    plgpu.emit_pipeline(
        body,
        grid=((blocks - cta + ctas - 1) // ctas,),
        in_specs=jax.tree.leaves(inputs.map(array_spec, group_spec)),
        out_specs=[],
        max_concurrent_steps=tuning.stages,
    )(*jax.tree.leaves(inputs))


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
        update(refs.map(*at), values)
