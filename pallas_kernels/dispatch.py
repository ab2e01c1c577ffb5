"""Which implementation of an operation runs here, and why."""

import contextlib
import contextvars
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
from jax.experimental.xla_metadata import set_xla_metadata

# `mosaic` is a kernel for Hopper GPUs, `reference` its meaning in jnp, for any device.
Implementation = Literal["mosaic", "reference"]


def has_hopper() -> bool:
    """Whether JAX's default device is a GPU with compute capability 9.0."""
    device = jax.devices()[0]
    return device.platform == "gpu" and device.compute_capability == "9.0"


def multiprocessors() -> int:
    """How many multiprocessors the GPU has that is compiled for; 132 without one."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.num_cores:
        return abstract.num_cores
    return getattr(jax.devices()[0], "core_count", None) or 132


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs as one operation.

    Attributes:
      operation: The operation's name.
      arrays: Dtypes and shapes of what it takes.
      implementation: What runs.
      reason: Why.
    """

    operation: str
    arrays: tuple[str, ...]
    implementation: Implementation
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What runs as the operations that a function calls, in their order."""

    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        rows = [("operation", "of", "runs", "calls", "because")]
        for choice, calls in Counter(self.choices).items():
            arrays = " ".join(choice.arrays)
            what = (choice.operation, arrays, choice.implementation)
            rows.append((*what, str(calls), choice.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)


_made: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar(
    "choices", default=None
)
_forbidden: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "forbidden", default=None
)
_traces = itertools.count()


def explain(fn: Callable, *args: Any, **kwargs: Any) -> Explanation:
    """What runs as the operations of this package that `fn(*args, **kwargs)` calls.

    Nothing is computed: `fn` is traced, also if it was traced before. What a loop or
    `vmap` repeats counts once.

    Args:
      fn: Any function that JAX can trace, jitted ones included.
      *args: Its arguments. Only shapes and dtypes of arrays matter, and
        `jax.ShapeDtypeStruct`s will do; what is no array stays as it is.
      **kwargs: Its keyword arguments, likewise.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import explain, norm
      >>> print(explain(norm, jnp.ones((4, 256)), implementation="reference"))
      operation  of              runs       calls  because
      norm       float32[4,256]  reference  1      the caller named it
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {j: x for j, x in enumerate(leaves) if hasattr(x, "shape")}

    def call(arrays):
        merged = [arrays.get(j, leaf) for j, leaf in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(tree, merged)
        fn(*args, **kwargs)

    choices: list[Choice] = []
    token = _made.set(choices)
    try:
        with traced_anew():
            jax.eval_shape(call, arrays)
    finally:
        _made.reset(token)
    return Explanation(tuple(choices))


@contextlib.contextmanager
def traced_anew() -> Iterator[None]:
    """Within it functions are traced that were traced before."""
    # Metadata are part of what traces are looked up by: these find none.
    with set_xla_metadata(trace=str(next(_traces))):
        yield


@contextlib.contextmanager
def without_kernels(reason: str) -> Iterator[None]:
    """Within it kernels run only where they are named, and `explain` says why."""
    token = _forbidden.set(reason)
    try:
        yield
    finally:
        _forbidden.reset(token)


def choose(
    implementation: Implementation | None,
    obstacle: str | None,
    *,
    operation: str = "unnamed",
    arrays: Any = (),
) -> Implementation:
    """What to run: the one that was named, or the fastest that can run.

    Args:
      implementation: What the caller named, if anything.
      obstacle: Why the kernel cannot run, whatever the device; None if it can.
      operation: The operation's name, for `explain`.
      arrays: What it takes, a tree of arrays, for `explain`.

    Raises:
      ValueError: If the kernel was named and cannot run, or the name is unknown.
    """
    if implementation not in (None, "mosaic", "reference"):
        raise ValueError(
            f"implementations are 'mosaic' and 'reference', got {implementation!r}"
        )
    if implementation == "mosaic" and obstacle is not None:
        raise ValueError(f"the kernel cannot run: {obstacle}")
    reason = "the caller named it"
    if implementation is None:
        obstacles = [] if has_hopper() else [f"{_device()} is no Hopper GPU"]
        obstacles += [why for why in (_forbidden.get(), obstacle) if why is not None]
        implementation = "reference" if obstacles else "mosaic"
        reason = "; ".join(obstacles) or f"{_device()} is a Hopper GPU"
    made = _made.get()
    if made is not None:
        described = tuple(map(_described, jax.tree.leaves(arrays)))
        made.append(Choice(operation, described, implementation, reason))
    return implementation


def _device() -> str:
    return jax.devices()[0].device_kind


def _described(array: Any) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"
