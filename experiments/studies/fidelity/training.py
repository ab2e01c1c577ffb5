"""Compiles the programs of a variant, and trains it with one seed."""

import contextlib
import dataclasses
import functools
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int32, UInt16

import coat_jax as coat
from experiments.common.results import device
from experiments.common.timing import OPTIONS
from experiments.studies.fidelity import model, texts
from experiments.studies.fidelity.variants import REFERENCE, VARIANTS, Forward, Variant
from experiments.training.optimizer import Optimizer, OptimizerSettings

Regime = Literal["text", "memorize"]
_WAIT = 20  # Steps that may be queued on the device.
_TRACING = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup(OptimizerSettings):
    """The settings that all compared trainings have in common.

    Attributes:
      regime: "text" for one pass over text and a loss on other text, or "memorize" for
        many passes over a small set and the loss on that set.
      shape: The model's shape.
      seq_len: The number of tokens to predict in a window.
      test_windows: The number of windows to measure the loss on, in "text".
      set_windows: The number of windows in the set that is memorized.
      average: The time constant of the exponential moving average of weights, as a
        fraction of the steps.
      shared: The fraction of the steps after which variants continue from the
        reference's state. Trainings that differ from the start drift as far apart as
        trainings with different seeds. Over fewer steps they drift less, so fewer seeds
        suffice to measure what a change costs in the last part of a training.
    """

    regime: Regime
    shape: model.Shape
    seq_len: int
    test_windows: int
    set_windows: int
    average: float = 0.05
    end_lr: float = 0.0
    warmup_steps: int = 100
    shared: float = 0.0

    @property
    def shared_steps(self) -> int:
        """The number of shared steps."""
        return round(self.shared * self.steps)

    def windows(self) -> texts.Windows:
        """Returns the windows to train and to test on.

        Raises:
          ValueError: If the installed Python files are too short.
        """
        text = self.regime == "text"
        read = self.steps * self.batch_size
        windows = texts.windows(
            texts.python_files(),
            train=read if text else self.set_windows,
            test=self.test_windows if text else 1,
            length=self.seq_len,
        )
        return windows if text else windows._replace(test=windows.train)

    def id(self, windows: texts.Windows) -> str:
        """Returns a hash of the settings, the data and the kind of device."""
        parts = repr(self), windows.fingerprint, device()["name"]
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


class State(NamedTuple):
    """The state of a training between steps.

    Attributes:
      params: The parameters.
      average: The moving average of the parameters, in float32.
      opt_state: The optimizer's state.
      step: The number of steps so far.
      seed: The seed of stochastic rounding of parameters.
    """

    params: model.Params
    average: model.Params
    opt_state: optax.OptState
    step: Int32[Array, ""]
    seed: Int32[Array, ""]


class Programs(NamedTuple):
    """The compiled programs of a variant.

    Attributes:
      init: A function of the seed that returns a state.
      begin: A function of the reference's state that returns the variant's state to
        continue with; None without shared steps.
      step: A function of a state, all windows and their order that returns the next
        state and the loss. The state is donated.
      late_step: The function for the steps of the variant's late recipe, if it has one.
      early_steps: The number of steps of a training before `late_step` runs.
      losses: Functions of float32 parameters, all windows and a batch's first row that
        return the batch's loss: "own" with the variant's forward pass, and "in_bf16"
        with `bf16`'s.
    """

    init: Callable[..., State]
    begin: Callable[..., State] | None
    step: Callable[..., tuple[State, Float32[Array, ""]]]
    late_step: Callable[..., tuple[State, Float32[Array, ""]]] | None
    early_steps: int
    losses: dict[str, Callable[..., Float32[Array, ""]]]


def compiled(setup: Setup, variant: Variant, train: int, test: int) -> Programs:
    """Compiles and returns the programs of a variant.

    `train` and `test` are the numbers of windows to train and to test on.
    """
    seed = jax.ShapeDtypeStruct((), jnp.int32)
    order = jax.ShapeDtypeStruct((setup.steps * setup.batch_size,), jnp.int32)
    init = partial(_init, setup=setup, variant=variant)
    with _TRACING:
        state = jax.eval_shape(init, seed)
    arguments = state, _windows(setup, train), order

    def step(forward):
        run = partial(_step, setup=setup, variant=variant, forward=forward)
        return _program(run, *arguments, donate_argnums=0)

    return Programs(
        init=_program(init, seed),
        begin=_begin_program(setup, variant) if setup.shared_steps else None,
        step=step(variant.forward),
        late_step=step(variant.last_forward) if variant.late else None,
        early_steps=setup.steps - variant.late_steps(setup.steps),
        losses={
            "own": _loss_program(setup, variant.last_forward, test),
            "in_bf16": _loss_program(setup, VARIANTS[REFERENCE].forward, test),
        },
    )


def _begin_program(setup: Setup, variant: Variant) -> Callable[..., State]:
    reference = partial(_init, setup=setup, variant=VARIANTS[variant.reference])
    with _TRACING:
        state = jax.eval_shape(reference, jax.ShapeDtypeStruct((), jnp.int32))
    return _program(partial(_begin, setup=setup, variant=variant), state)


@functools.cache
def _loss_program(setup: Setup, forward: Forward, test: int) -> Callable[..., Array]:
    """Returns a program for the test loss, which variants with one forward pass share.

    `test` is the number of windows to test on.
    """
    params = jax.eval_shape(partial(model.init, setup.shape), jax.random.key(0))
    row = jax.ShapeDtypeStruct((), jnp.int32)
    loss = partial(_test_loss, setup=setup, forward=forward)
    return _program(loss, params, _windows(setup, test), row)


def _windows(setup: Setup, count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count, setup.seq_len + 1), jnp.uint16)


def _program(fn: Callable, *arguments: Any, **jit: Any) -> Callable[..., Any]:
    """Returns a function compiled; only one thread traces and lowers at a time."""
    with _TRACING:
        lowered = jax.jit(fn, **jit).lower(*arguments)
    return lowered.compile(OPTIONS if jax.default_backend() == "gpu" else None)


@contextlib.contextmanager
def ahead(
    setup: Setup, variants: Sequence[Variant], windows: texts.Windows
) -> Iterator[dict[str, Callable[[], Programs]]]:
    """Compiles variants on threads, while earlier variants train in this context.

    On a CPU each variant is compiled when its function is first called, because kernels
    are interpreted there, and only one thread at a time may do this.

    Yields:
      Functions by the variants' names. Each waits for its variant's programs and
      returns them, or raises the error of their compilation.
    """
    sizes = {"train": len(windows.train), "test": len(windows.test)}
    make = partial(compiled, setup, **sizes)
    if jax.default_backend() != "gpu":
        yield {v.name: functools.cache(partial(make, v)) for v in variants}
        return
    pool = ThreadPoolExecutor(6)
    try:
        futures = {v.name: pool.submit(make, v) for v in variants}
        yield {name: future.result for name, future in futures.items()}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def train(
    setup: Setup,
    programs: Programs,
    seed: int,
    windows: tuple[UInt16[Array, "n length+1"], UInt16[Array, "m length+1"]],
    advance: Callable[[int], Any] = lambda steps: None,
    *,
    start: State | None = None,
) -> dict[str, float]:
    """Runs a training, and returns its losses and seconds.

    Args:
      setup: The settings.
      programs: The variant's programs.
      seed: The seed of the initialization and of the order of windows.
      windows: The windows to train and to test on, on the device.
      advance: A function that is called with the number of steps since its last call.
      start: The state after the shared steps, if there are any.

    Returns:
      The test losses of the last weights and of their average, each with the variant's
      forward pass and with `bf16`'s; the mean training loss of the last twentieth of
      the steps; the seconds of the steps; and all seconds. Losses are nats per token.
    """
    started = time.perf_counter()
    state = programs.init(np.int32(seed)) if start is None else programs.begin(start)
    steps = range(0 if start is None else setup.shared_steps, setup.steps)
    state, losses = _after(setup, programs, seed, windows[0], advance, state, steps)
    last = losses[-math.ceil(setup.steps / 20) :]
    row = {"train_loss": math.fsum(map(float, last)) / len(last)}
    row["train_seconds"] = time.perf_counter() - started
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), state.params)
    for name, params in (("last", wide), ("average", state.average)):
        for forward, program in programs.losses.items():
            row[f"{name}_{forward}"] = _mean(setup, program, params, windows[1])
    return row | {"seconds": time.perf_counter() - started}


def shared(
    setup: Setup,
    programs: Programs,
    seed: int,
    windows: UInt16[Array, "n length+1"],
    advance: Callable[[int], Any] = lambda steps: None,
) -> State:
    """Returns the state after the shared steps, on the host.

    Args:
      setup: The settings.
      programs: The reference's programs.
      seed: The seed of the initialization and of the order of windows.
      windows: The windows to train on, on the device.
      advance: A function that is called with the number of steps since its last call.
    """
    state, steps = programs.init(np.int32(seed)), range(setup.shared_steps)
    state, _ = _after(setup, programs, seed, windows, advance, state, steps)
    return jax.device_get(state)


def digest(state: State) -> str:
    """Returns a hash of a state's bits.

    Another process may compile the same steps differently, and get other bits.
    """
    leaves = map(np.asarray, jax.tree.leaves(state))
    joined = b"".join(leaf.tobytes() for leaf in leaves)
    return hashlib.blake2b(joined, digest_size=8).hexdigest()


def _after(
    setup: Setup,
    programs: Programs,
    seed: int,
    windows: UInt16[Array, "n length+1"],
    advance: Callable[[int], Any],
    state: State,
    steps: range,
) -> tuple[State, list[Array]]:
    """Runs `steps` from a state; returns the state after them, and their losses."""
    count = setup.steps * setup.batch_size
    order = jax.device_put(texts.order(seed, windows=len(windows), count=count))
    losses = []
    for done, index in enumerate(steps, 1):
        early = index < programs.early_steps
        step = programs.step if early else programs.late_step
        state, loss = step(state, windows, order)
        losses.append(loss)
        if done % _WAIT == 0 or done == len(steps):
            jax.block_until_ready(loss)
            advance(done % _WAIT or _WAIT)
    return state, losses


def _mean(setup: Setup, program: Callable, params: model.Params, test: Array) -> float:
    """Returns the mean loss of all test windows."""
    rows = range(0, len(test), _test_batch(setup, len(test)))
    losses = [program(params, test, np.int32(row)) for row in rows]
    return math.fsum(map(float, losses)) / len(losses)


def _test_batch(setup: Setup, count: int) -> int:
    """Returns the largest divisor of `count` up to the batch size of training."""
    return max(n for n in range(1, setup.batch_size + 1) if count % n == 0)


def _init(seed: Int32[Array, ""], setup: Setup, variant: Variant) -> State:
    params = model.init(setup.shape, jax.random.key(seed))
    params = jax.tree.map(lambda p: p * variant.nudge, params)
    # These zeros weigh e**-20 at the end, with the default `average`.
    average = jax.tree.map(jnp.zeros_like, params)
    params = _stored(params, variant.param_dtype)
    opt_state = _optimizer(setup, variant).init(params)
    return State(params, average, opt_state, jnp.int32(0), jnp.int32(seed))


def _begin(state: State, setup: Setup, variant: Variant) -> State:
    """Returns a variant's state that continues from the state of its reference."""
    params = jax.tree.map(lambda p: p * variant.nudge, state.params)
    params = _stored(params, variant.param_dtype)
    like = jax.eval_shape(_optimizer(setup, variant).init, params)
    opt_state = coat.from_optax_state(state.opt_state, like)
    return state._replace(params=params, opt_state=opt_state)


def _stored(params: model.Params, dtype: DTypeLike) -> model.Params:
    return jax.tree.map(lambda p: p.astype(dtype), params)


def _optimizer(setup: Setup, variant: Variant) -> optax.GradientTransformation:
    settings = dataclasses.replace(setup, b2=variant.b2)
    optimizer: Optimizer = variant.optimizer
    return optimizer.transformation(settings, setup.steps)


def _step(
    state: State,
    windows: UInt16[Array, "n length+1"],
    order: Int32[Array, " reads"],
    setup: Setup,
    variant: Variant,
    forward: Forward,
) -> tuple[State, Float32[Array, ""]]:
    size = setup.batch_size
    rows = lax.dynamic_slice(order, (state.step * size,), (size,))
    batch = windows[rows].astype(jnp.int32)
    loss_of = partial(model.loss, shape=setup.shape, forward=forward)
    loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
    tx, given = _optimizer(setup, variant), (grads, state.opt_state, state.params)
    if variant.optimizer.fused:
        key = jax.random.key(state.seed) if variant.stochastic else None
        params, opt_state = coat.fused_update(tx, *given, key=key)
    else:
        updates, opt_state = tx.update(*given)
        params = optax.apply_updates(state.params, updates)
    rate = min(1.0, 1 / (setup.average * setup.steps))
    average = jax.tree.map(
        lambda a, p: a + rate * (p.astype(jnp.float32) - a), state.average, params
    )
    return State(params, average, opt_state, state.step + 1, state.seed), loss


def _test_loss(
    params: model.Params,
    windows: UInt16[Array, "m length+1"],
    row: Int32[Array, ""],
    setup: Setup,
    forward: Forward,
) -> Float32[Array, ""]:
    size = _test_batch(setup, len(windows))
    batch = lax.dynamic_slice_in_dim(windows, row, size).astype(jnp.int32)
    return model.loss(params, batch, shape=setup.shape, forward=forward)
